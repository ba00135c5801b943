"""Faults that others reported of systems like this one, and the tests that show how this one behaves instead.

The references say where they were reported, and stand in the docstrings of the tests; what was reported nowhere in
particular stands there in words. Each test named here must exist; that it passes is its own business.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEGENERATE, POLICY, RESUME = (
    "awpo/test_advantages_degenerate.py",
    "awpo/training/test_policy.py",
    "awpo/training/test_resume.py",
)
LAYOUT, SHARDING, VLLM = ("awpo/training/test_batch_layout.py", "awpo/training/test_sharding.py", "awpo/training/test_vllm.py")  # fmt: skip
ROLLOUTS, WATCH = "awpo/training/test_vllm_rollouts.py", "awpo/training/test_rollout_watch.py"
ENDPOINT = "awpo/test_endpoint.py"
FAULTS, JUDGE, AVERAGES = "awpo/test_judge_faults.py", "awpo/test_judge_endpoint.py", "evaluation/bfcl/test_averages.py"
TRACKING, SLOTS, SERVERS = "tasks/test_tracking.py", "tasks/test_slots.py", "integration/test_servers.py"

# Reported as -> (file under tests/, test), one at least that holds the behaviour.
COVERED: dict[str, tuple[tuple[str, str], ...]] = {
    # Advantages and loss
    "NeMo-RL#4161: a float residue for a zero std": (
        (DEGENERATE, "test_the_last_bit_of_a_float32_is_no_variance"),
        (DEGENERATE, "test_equal_rewards_have_no_variance_whatever_their_mean_rounds_to"),
    ),
    "trl#5773: one valid reward makes a NaN std": (
        (DEGENERATE, "test_a_lone_valid_rollout"),
        (DEGENERATE, "test_an_invalid_rollout_is_in_no_statistic"),
    ),
    "trl#6365, trl#7068: groups without variance in the denominator": (
        (LAYOUT, "test_a_group_without_variance_counts_in_the_denominator_and_pushes_nothing"),
        ("awpo/test_advantages.py", "test_metrics_are_over_the_counted_groups"),
        (
            "awpo/training/test_dynamic_sampling.py",
            "test_groups_without_variance_are_replaced_in_order_and_others_kept",
        ),
    ),
    "trl#5619, trl#6024, ms-swift#10116: the normaliser depends on the micro-batch": (
        (LAYOUT, "test_the_gradient_does_not_depend_on_the_micro_batch"),
        (LAYOUT, "test_the_gradient_does_not_depend_on_the_number_of_processes"),
    ),
    "DAPO#22, AReaL#450: dynamic sampling without end": (
        ("awpo/training/test_known_faults.py", "test_dynamic_sampling_ends_with_a_warning_and_the_batch_as_it_is"),
        ("awpo/training/test_dynamic_sampling.py", "test_nothing_useful_drawn_changes_nothing"),
    ),
    "ms-swift#10148: a reward that is constant by a bug": (
        (WATCH, "test_a_reward_without_variance_is_told_once_by_its_name"),
        (WATCH, "test_a_resumed_run_remembers"),
    ),
    # Rollout, templates, masks
    "verl#6854: the template strips earlier thoughts": (
        (
            "awpo/training/test_whole_prompt.py",
            "test_fine_tuning_rollouts_and_evaluation_see_the_same_prompt_with_every_tool_whole",
        ),
        ("awpo/training/test_whole_prompt.py", "test_the_target_follows_the_prompt_as_the_template_would_have_it"),
    ),
    "trl#5224, rllm#272: decoding and tokenising again drifts": (
        ("awpo/training/test_known_faults.py", "test_the_tokens_that_were_drawn_are_trained_on"),
    ),
    "trl#4975, NeMo-RL#2176: tool results are trained on": (
        ("awpo/training/test_sft.py", "test_only_the_target_and_its_end_carry_loss"),
    ),
    "vllm#19056: malformed JSON raises inside a parser": (
        ("awpo/test_chat.py", "test_it_never_raises_and_what_it_gives_can_be_stored"),
        ("awpo/test_chat.py", "test_a_call_that_cannot_be_read_is_told_with_its_place"),
        ("fuzz/test_fuzz.py", "test_whatever_comes_is_read_or_refused"),
    ),
    "vllm#9744, vllm#29341: stale cache or weights after an update": (
        (VLLM, "test_the_trainer_and_the_server_agree_after_each_change"),
        (VLLM, "test_a_server_without_the_trained_weights_is_seen"),
        (ROLLOUTS, "test_rollouts_of_another_policy_end_the_run"),
    ),
    "trl#4772, open-instruct#1473: log-probabilities of trainer and rollout drift apart": (
        (ROLLOUTS, "test_the_correction_by_hand"),
        (ROLLOUTS, "test_rollouts_of_another_policy_end_the_run"),
        (ROLLOUTS, "test_a_difference_that_is_no_number_is_no_agreement"),
    ),
    # Judge
    "a parse failure is scored 0": (
        (JUDGE, "test_failures_are_nan_are_counted_and_not_remembered"),
        (JUDGE, "test_too_many_failures_stop_the_run_with_a_line_that_says_why"),
        (DEGENERATE, "test_a_failed_judgement_leaves_the_outcome_alone"),
    ),
    "answers in fences, with a preface, with scores as strings": (
        (FAULTS, "test_json_in_code_fences_with_a_preface_with_trailing_text_with_scores_as_strings_is_read"),
        ("awpo/test_judge_prompts.py", "test_unreadable_answers_are_no_score"),
    ),
    "verl#4107, slime#1361: rate limits and time-outs stall a step": (
        (FAULTS, "test_one_deadline_bounds_a_batch_whatever_the_server_asks_for"),
        (ENDPOINT, "test_never_more_requests_at_once_than_allowed"),
        (ENDPOINT, "test_pauses_grow_are_random_and_follow_the_seed"),
        (ENDPOINT, "test_retry_after_holds_back_every_request"),
        ("awpo/test_endpoint_cache.py", "test_no_call_is_made_twice_by_whatever_run"),
    ),
    "a thought that asks for the best score": (
        ("awpo/test_judge_prompts.py", "test_a_thought_cannot_leave_its_block"),
        ("awpo/test_judge_rubric.py", "test_the_rubric_cannot_be_talked_up"),
    ),
    # Resume and saving
    "accelerate#2016, trl#5911: a resumed run repeats or skips data": (
        (RESUME, "test_a_run_interrupted_after_every_step_ends_as_one_that_was_not"),
        (RESUME, "test_a_worker_killed_by_the_system_ends_as_one_that_was_not"),
    ),
    "DeepSpeed#3841: ZeRO-3 saves empty tensors": (
        (SHARDING, "test_a_training_in_shards_is_that_of_one_process_even_if_one_of_two_is_killed"),
        ("awpo/training/test_known_faults.py", "test_what_is_not_saved_as_it_was_trained_is_no_result"),
    ),
    "a checkpoint half written": ((POLICY, "test_a_checkpoint_half_written_is_not_resumed_from"),),
    # Evaluation
    "AU-Harness#31: scalars were never checked": (
        ("evaluation/bfcl/test_checker.py", "test_wrong_answers_fail"),
        ("evaluation/bfcl/test_checker.py", "test_verdicts_are_those_of_the_official_function"),
        (
            "evaluation/bfcl/test_golds.py",
            "test_every_reference_of_one_turn_passes_but_those_that_contradict_themselves",
        ),
    ),
    "gorilla#827: which averages are weighted": (
        (AVERAGES, "test_they_are_the_official_scripts_to_the_last_digit"),
        (AVERAGES, "test_the_overall_average_needs_every_category"),
        ("evaluation/bfcl/test_benchmark.py", "test_an_average_with_a_category_missing_is_partial_and_has_no_value"),
    ),
    "a silent model scores on irrelevance": (
        ("evaluation/bfcl/test_benchmark.py", "test_a_silent_model_scores_on_irrelevance_and_the_row_shows_why"),
        (
            "evaluation/test_report.py",
            "test_bfcl_shows_items_and_empty_outputs_and_never_a_zero_for_what_is_missing",
        ),
    ),
    "API-Bank's protocols differ": (("evaluation/api_bank/test_benchmark.py", "test_one_answer_gets_both_verdicts"),),
    # MLflow
    "mlflow#6183, mlflow#7046: long parameters, changed on resume": (
        (TRACKING, "test_parameters_of_any_length_and_number"),
        (TRACKING, "test_a_parameter_that_stands_is_not_changed_on_resume"),
        (TRACKING, "test_config_is_an_artifact_and_flat_parameters"),
    ),
    "mlflow#13456: the active run is per thread": (
        ("test_known_pains.py", "test_no_module_records_into_the_active_run"),
        ("flows/test_sweep.py", "test_every_stage_is_a_run_under_one_parent_with_a_true_status"),
        ("flows/test_at_once.py", "test_two_pipelines_at_once_end_clean_and_share_the_slots"),
    ),
    "SkyRL#1516: a run's status is not true": (
        (TRACKING, "test_after_every_way_to_end"),
        (TRACKING, "test_after_a_kill_without_a_word"),
    ),
    # Prefect
    "prefect#16373: Completed though a task failed": (
        ("flows/test_sweep.py", "test_a_failed_cell_is_told_and_does_not_end_the_others"),
    ),
    "prefect#16459: zombie runs after a kill": (
        (SERVERS, "test_all_deployments_are_registered"),
        (SERVERS, "test_a_run_whose_process_is_killed_leaves_the_truth_on_both_sides"),
    ),
    "prefect#9814: a retry does everything again": (
        ("tasks/test_stage_run.py", "test_finished_work_starts_no_process_and_makes_no_run"),
        ("flows/test_cells.py", "test_running_it_again_does_only_what_is_missing"),
    ),
    "prefect#17415: slots are lost": (
        (SLOTS, "test_slots_are_held_for_the_block_and_given_back_after_an_error"),
        (SLOTS, "test_a_killed_process_gives_its_slot_back_even_past_a_restart_of_the_server"),
        ("flows/test_cells.py", "test_ten_queued_cells_with_two_slots_never_compute_three_at_a_time"),
    ),
    "prefect#18934: database is locked": (
        ("test_known_pains.py", "test_the_docs_say_when_to_leave_sqlite"),
        ("flows/test_at_once.py", "test_two_pipelines_at_once_end_clean_and_share_the_slots"),
    ),
}


@functools.cache
def docstrings_in(file: str) -> dict[str, str]:
    """The names of a file's tests, those of its classes, too, with their docstrings as one line."""
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return {
        node.name: " ".join((ast.get_docstring(node) or "").split())
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("reported", COVERED)
def test_what_others_ran_into_has_a_test(reported: str) -> None:
    assert COVERED[reported]
    for file, name in COVERED[reported]:
        assert name in docstrings_in(file), f"{file} has no {name}"
    said = " ".join(docstrings_in(file)[name] for file, name in COVERED[reported])
    head = reported.partition(":")[0]
    for reference in head.split(", ") if "#" in head else (f"Reported by others: {reported}",):
        assert reference in said, f"no docstring of these tests names {reference}"


def test_every_reference_is_covered() -> None:
    """31 items; what was reported nowhere in particular is told in words."""
    references = [part for reported in COVERED for part in reported.partition(":")[0].split(", ") if "#" in part]
    assert len(COVERED) == 31
    assert len(set(references)) == len(references)


def test_no_module_records_into_the_active_run() -> None:
    """MLflow's active run is one per thread (mlflow#13456): runs are addressed by id, through a client."""
    calls = [
        f"{path.relative_to(TESTS.parent)}: mlflow.{node.func.attr}"
        for package in ("awpo", "evaluation", "tasks", "flows")
        for path in (TESTS.parent / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "mlflow"
        and node.func.attr.startswith(("start_run", "end_run", "active_run", "log_", "set_tag", "autolog"))
    ]
    assert calls == []


def test_the_docs_say_when_to_leave_sqlite() -> None:
    """SQLite's one lock is what "database is locked" comes of (prefect#18934)."""
    text = (TESTS.parent / "docs" / "operations.md").read_text("utf-8")
    [row] = [line for line in text.splitlines() if line.startswith("| `database is locked`")]
    assert "Postgres: `awpo migrate`" in row
