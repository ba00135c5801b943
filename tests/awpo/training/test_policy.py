import ast
import inspect
import json
import math
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from awpo.config import JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, RunLog, Tail
from awpo.methods import METHODS, get_method
from awpo.training.policy import prompt_rows, train_policy, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer

QUICK = PolicyConfig(
    steps=4,
    prompts_per_rollout=4,
    group_size=4,
    steps_per_rollout=2,
    micro_batch_size=4,
    learning_rate=1e-2,
    max_completion_length=12,
    save_every=2,
)
TRAINED = sorted(name for name, method in METHODS.items() if method.trains)


def metrics_of(out: Path) -> list[dict[str, float]]:
    return [row["metrics"] for row in Tail(out / METRICS)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint").state_dict()


@pytest.fixture
def trainer(tiny_model: Path, instances: Path, tmp_path: Path) -> PolicyTrainer:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chosen = read_instances(instances, {"train"})
    rows, _ = prompt_rows(tokenizer, chosen, 2000)
    method = get_method("awpo")
    return PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        processing_class=tokenizer,
        args=trainer_arguments(QUICK, method, tmp_path, 1),
        train_dataset=rows,
        method=method,
        scorer=Scorer(method, QUICK, None),
        instances=chosen,
        log=RunLog(tmp_path),
    )


def rollout(trainer: PolicyTrainer) -> dict:
    trainer.model.train()
    rows = [dict(trainer.train_dataset[i // 4]) for i in range(16)]
    return trainer._generate_and_score_completions(rows)


def test_the_hooks_that_are_overridden_are_where_they_were() -> None:
    """TRL is pinned because these are private; this fails when an update moves one of them."""
    expected = {
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_compute_loss": ["self", "model", "inputs"],
        "_generate_single_turn": [
            "self",
            "prompt_ids",
            "images",
            "multimodal_fields",
            "num_generations",
            "has_tool_images",
        ],
        "_tokenize_prompts": ["self", "prompts"],
        "_prepare_inputs": ["self", "generation_batch"],
        "_get_train_sampler": ["self", "dataset"],
        "_save_rng_state": ["self", "output_dir"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
        "_get_grad_norm": ["self", "model", "grad_norm"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == parameters
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)" in source
    # What a checkpoint restores: the buffered batch is used where it is, at the position that `_step` gives.
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in source
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in source


# Fields of TRL's config that say nothing of the result: names, places, logs, and the parts of what is off
# (vLLM, SAPO, VESPO, adaptive entropy, synchronised reference models).
WITHOUT_EFFECT = re.compile(
    r"model_init_kwargs|trust_remote_code|num_generations_eval|ds3_gather_for_generation|pad_to_multiple_of"
    r"|generation_batch_size|chat_template_kwargs|cache_implementation|vllm_(?!importance_sampling_correction$).*"
    r"|sapo_.*|vespo_.*|entropy_(coef_.*|target)|ref_model_.*|max_tool_calling_iterations|log_.*"
    r"|num_completions_to_print|transformers_continuous_batching_config|use_transformers_paged"
)


@pytest.mark.parametrize("name", TRAINED)
def test_what_matters_of_trl_is_set_for_every_method(name: str, tmp_path: Path) -> None:
    """And is what the method says: a field that an update of TRL adds, or a default that it moves, fails here."""
    method = METHODS[name]
    arguments = trainer_arguments(QUICK, method, tmp_path, 1)
    expected = {
        "beta": 0.0,
        "delta": None,
        "disable_dropout": True,
        "cast_lm_head_to_fp32": False,
        "entropy_coef": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28 if name == "dapo" else 0.2,
        "generation_kwargs": None,
        "importance_sampling_level": "token",
        "loss_type": {"dapo": "dapo", "dr_grpo": "dr_grpo"}.get(name, "grpo"),
        "mask_truncated_completions": False,
        "max_completion_length": 12,
        "min_p": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "num_generations": 4,
        "num_iterations": 1,
        "off_policy_mask_threshold": None,
        "repetition_penalty": 1.0,
        "reward_weights": None,
        "router_aux_loss_coef": 0.0,
        "scale_rewards": "none",
        "shuffle_dataset": True,
        "steps_per_generation": 4,
        "sync_ref_model": False,
        "temperature": 1.0,
        "top_entropy_quantile": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "use_adaptive_entropy": False,
        "use_bias_correction_kl": False,
        "use_transformers_continuous_batching": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
    }
    own = {field.name for field in fields(GRPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert expected.keys() == {name for name in own if not WITHOUT_EFFECT.fullmatch(name)}
    assert {key: getattr(arguments, key) for key in expected} == expected
    shared = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "lr_scheduler_kwargs": None,
        "optim": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "label_smoothing_factor": 0.0,
        "neftune_noise_alpha": None,
        "use_liger_kernel": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "ignore_data_skip": False,
        "dataloader_drop_last": False,
        "fp16": False,
        "seed": 0,
    }
    assert {key: getattr(arguments, key) for key in shared} == shared


def test_a_default_that_matters_is_not_left_to_trl() -> None:
    """Each is written out, even where TRL's default is the same today."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(trainer_arguments)))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "GRPOConfig"]
    written = {keyword.arg for keyword in call.keywords}
    own = {field.name for field in fields(GRPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert {name for name in own if not WITHOUT_EFFECT.fullmatch(name)} <= written


def test_every_tool_stands_in_the_prompt_that_is_trained_on(trainer: PolicyTrainer) -> None:
    batch = rollout(trainer)
    for ids in batch["prompt_ids"]:
        text = trainer.processing_class.decode(ids)
        assert "get_weather" in text
        assert "get_time" in text


def test_the_scored_text_keeps_its_tags_and_loses_its_end(trainer: PolicyTrainer) -> None:
    tokenizer = trainer.processing_class
    text = "<think>\nx\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    assert trainer._decode([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) == text


def test_the_loss_is_the_clipped_surrogate_with_a_radius_per_row(trainer: PolicyTrainer) -> None:
    """Worked out by hand from log-probabilities: token means, then the mean over rows (TRL's loss "grpo")."""
    batch = rollout(trainer)
    count = batch["advantages"].shape[0]
    generator = torch.Generator().manual_seed(3)
    batch["advantages"] = torch.randn(count, generator=generator)
    batch["clip_low"] = torch.rand(count, generator=generator) * 0.2 + 0.01
    batch["clip_high"] = torch.rand(count, generator=generator) * 0.2 + 0.01
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        now = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    batch["old_per_token_logps"] = now + 0.3 * torch.randn(now.shape, generator=generator)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    expected = 0.0
    for i in range(count):
        terms = []
        for t in range(width):
            if batch["completion_mask"][i, t]:
                ratio = (now[i, t] - batch["old_per_token_logps"][i, t]).exp().item()
                low, high = 1 - batch["clip_low"][i].item(), 1 + batch["clip_high"][i].item()
                advantage = batch["advantages"][i].item()
                terms.append(-min(ratio * advantage, min(max(ratio, low), high) * advantage))
        expected += sum(terms) / len(terms) / count
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert isinstance(trainer.epsilon_low, float)


def test_log_probabilities_and_gradients_are_those_of_trl(trainer: PolicyTrainer) -> None:
    """Computed in pieces without common padding, they are what TRL computes of the whole padded batch."""
    batch = rollout(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width, real = batch["completion_ids"].shape[1], batch["completion_mask"].bool()
    found = []
    for compute in (trainer._get_per_token_logps_and_entropies, None):
        trainer.model.zero_grad()
        if compute is None:
            logps, entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(
                trainer, trainer.model, ids, mask, width, compute_entropy=True
            )
        else:
            logps, entropies, _ = compute(trainer.model, ids, mask, width, compute_entropy=True)
        logps[real].sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        found.append((logps[real].detach(), entropies[real].detach(), gradient))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


def test_rollouts_follow_the_policy(trainer: PolicyTrainer) -> None:
    """First tokens are drawn with the model's own probabilities (chi-squared over the likeliest and the rest)."""
    prompt = trainer.processing_class(trainer.train_dataset[0]["prompt"])["input_ids"]
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(3)  # a random model is near uniform over its tokens
        expected = trainer.model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    drawn, _ = trainer._generate_single_turn([prompt] * 600, None, {}, 4)
    first = torch.tensor([ids[0] for ids in drawn])
    top = expected.topk(5).indices
    seen = torch.tensor([float((first == token).sum()) for token in top] + [0.0])
    seen[-1] = 600 - seen.sum()
    hoped = 600 * torch.cat([expected[top], 1 - expected[top].sum().reshape(1)])
    assert ((seen - hoped) ** 2 / hoped).sum() < 25.7  # the 0.9999 quantile for 5 degrees of freedom
    assert len({tuple(ids) for ids in drawn}) > 300


def test_rows_keep_their_radius_when_trl_shuffles_and_splits(trainer: PolicyTrainer) -> None:
    trainer.model.train()
    rows = [dict(trainer.train_dataset[i // 4]) for i in range(16)]
    trainer.args.steps_per_generation = 4
    seen = [trainer._prepare_inputs(rows)]
    for step in range(1, 4):
        trainer._step = step
        seen.append(trainer._prepare_inputs(rows))
    assert sum(len(part["advantages"]) for part in seen) == 16
    assert all(part["clip_low"].shape == part["advantages"].shape == part["clip_high"].shape for part in seen)


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_trains(name: str, tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    train_policy(str(tiny_model), instances, out, QUICK.model_copy(update={"method": name}))
    rows = metrics_of(out)
    assert len(rows) == QUICK.steps
    assert all(isinstance(value, float | int) and value == value for row in rows for value in row.values())
    for key in ("reward/total", "reward/format", "reward/correct", "reward/reasoning", "response_length"):
        assert key in rows[0], key
    # docs/method.md, in the step that begins with a rollout; what is of each step, in the next one, too.
    each = {"loss", "gradient_norm", "learning_rate", "entropy", "clip/clipped_share", "tokens/update", "seconds/step"}
    each |= {"seconds/update"}
    begins = {
        "response_length",
        "reward/total",
        "reward/format",
        "reward/correct",
        "reward/reasoning",
        "gate/open_share",
    }
    begins |= {"saturated_share", "difficulty/mean", "clip/radius_mean", "judge/failure_rate", "tokens/rollout"}
    begins |= {f"zero_variance_share/{reward}" for reward in METHODS[name].rewards}
    begins |= {f"gate/{kind}_p{quantile}" for kind in ("ratio", "correlation") for quantile in (10, 50, 90)}
    begins |= {"judge/seconds_per_judgement", "seconds/rollout", "seconds/judge"}
    assert each | begins <= rows[0].keys()
    assert each <= rows[1].keys()
    stages = sum(rows[0][f"seconds/{stage}"] for stage in ("rollout", "judge", "update"))
    assert stages == pytest.approx(rows[0]["seconds/step"])
    assert all(rows[0][f"seconds/{stage}"] > 0 for stage in ("rollout", "judge", "update"))
    assert json.loads((out / "summary.json").read_text())["steps"] == QUICK.steps
    samples = [json.loads(line) for line in (out / "judge_samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 8
    if METHODS[name].gate not in ("never", "always"):
        assert 0 <= rows[0]["gate/open_share"] <= 1
        assert 0.05 <= rows[0]["clip/radius_mean"] <= 0.2 + 1e-6


def test_tokens_are_counted_by_stage(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """A rollout batch's tokens are computed once in its rollout and once, in parts, in the steps that use it."""
    train_policy(str(tiny_model), instances, tmp_path / "out", QUICK)
    rows = metrics_of(tmp_path / "out")
    for first in (0, 2):
        assert rows[first]["tokens/rollout"] == rows[first]["tokens/update"] + rows[first + 1]["tokens/update"]
        assert rows[first]["tokens/step"] == rows[first]["tokens/rollout"] + rows[first]["tokens/update"]
        assert rows[first + 1]["tokens/step"] == rows[first + 1]["tokens/update"]
    per_step = QUICK.prompts_per_rollout * QUICK.group_size // QUICK.steps_per_rollout
    assert [row["samples/total"] for row in rows] == [per_step * (step + 1) for step in range(len(rows))]
    assert rows[2]["tokens/total"] == rows[0]["tokens/rollout"] + rows[2]["tokens/rollout"]


def test_a_gradient_that_is_not_finite_ends_the_run(trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, seen = trainer._compute_loss, {}

    def broken(model: Any, inputs: dict[str, Any]) -> Any:
        seen.setdefault(trainer.state.global_step, []).extend(inputs["instance"].tolist())
        return compute(model, inputs) * (math.nan if trainer.state.global_step == 2 else 1.0)

    monkeypatch.setattr(trainer, "_compute_loss", broken)
    with pytest.raises(UserError, match=r"the gradient of optimiser step 3 is not finite \(nan\)") as caught:
        trainer.train()
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert trainer.state.global_step == 2
    names = list(dict.fromkeys(trainer.instances[index].id for index in seen[2]))
    assert f"its batch is of the instances {', '.join(names[:3])}" in str(caught.value)
    [event] = [row for row in Tail(trainer.run_log.folder / EVENTS) if row["event"] == "not_finite"]
    assert {"what": "gradient", "value": "nan", "step": 3, "rank": 0, "instances": names}.items() <= event.items()


def test_a_loss_that_is_not_finite_ends_the_run_before_its_gradient(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One completion's advantage is infinite, as of a reward that overflowed: of all micro-batches one is named."""
    whole = trainer._generate_and_score_completions

    def overflowing(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = whole(inputs)
        batch["advantages"][3] = math.inf
        spoilt.append(int(batch["instance"][3]))
        return batch

    spoilt: list[int] = []
    monkeypatch.setattr(trainer, "_generate_and_score_completions", overflowing)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(UserError, match=r"the loss of optimiser step [12] is not finite"):
        trainer.train()
    [event] = [row for row in Tail(trainer.run_log.folder / EVENTS) if row["event"] == "not_finite"]
    assert trainer.instances[spoilt[0]].id in event["instances"]
    if event["step"] == 1:
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_a_policy_that_collapses_is_stopped_and_goes_on_when_told_to(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """A learning rate far too high: after the first batch the policy knows one thing to say."""
    changes = {"steps": 12, "learning_rate": 0.5, "save_every": 2, "stop_on_collapse": True}
    config, out = QUICK.model_copy(update={**changes, "max_completion_length": 24}), tmp_path / "out"
    with pytest.raises(UserError, match=r"may have collapsed.*ends the run.*its last checkpoint is kept"):
        train_policy(str(tiny_model), instances, out, config)
    assert not (out / "manifest.json").exists()
    assert list((out / ".resume").glob("checkpoint-*/whole"))
    assert len(metrics_of(out)) < 12
    train_policy(str(tiny_model), instances, out, config.model_copy(update={"stop_on_collapse": False}))
    events = list(Tail(out / EVENTS))
    assert any(row["event"] == "note" and row["message"].startswith("goes on after step") for row in events)
    assert any(row["event"] == "warning" and "may have collapsed" in row["message"] for row in events)
    assert len(metrics_of(out)) == 12
    assert all("rollout/repeated_share" in row for row in metrics_of(out)[::2])


def test_rewards_that_vary_change_the_weights(trainer: PolicyTrainer) -> None:
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_a_checkpoint_half_written_is_not_resumed_from(tmp_path: Path) -> None:
    """Reported by others: a checkpoint half written."""
    from awpo.training.checkpoints import WHOLE, last_whole_checkpoint

    for step, whole in ((2, True), (10, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / WHOLE).write_text(str(step))
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-12").exists()
    assert last_whole_checkpoint(tmp_path / "nothing") is None


def test_a_method_that_trains_no_policy_is_refused(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'sft' trains no policy"):
        train_policy(str(tiny_model), instances, tmp_path / "out", QUICK.model_copy(update={"method": "sft"}))


def test_too_few_prompts_are_a_user_error(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    config = QUICK.model_copy(update={"max_prompt_length": 16})
    with pytest.raises(UserError, match=r"fewer than policy\.prompts_per_rollout = 4"):
        train_policy(str(tiny_model), instances, tmp_path / "out", config)


def test_one_step_per_rollout_says_that_clipping_does_nothing(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    config = QUICK.model_copy(update={"steps_per_rollout": 1, "micro_batch_size": 8, "steps": 1})
    train_policy(str(tiny_model), instances, tmp_path / "out", config)
    events = list(Tail(tmp_path / "out" / "events.jsonl"))
    assert any("clipping does nothing" in row.get("message", "") for row in events)


def test_a_gate_that_decides_nothing_is_told_of_once_in_a_run(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """A judge whose scale is next to nothing adds no variance: r is 1 in every group whose outcomes vary."""
    update = {"steps": 7, "steps_per_rollout": 1, "micro_batch_size": 16, "judge": JudgeConfig(scale=1e-9)}
    config = QUICK.model_copy(update=update)
    train_policy(str(tiny_model), instances, tmp_path / "out", config)
    rows = metrics_of(tmp_path / "out")
    told = [row["gate/open_share"] for row in rows if "gate/open_share" in row]  # none where no group's outcomes vary
    assert told
    assert set(told) == {1.0}
    assert any(row["saturated_share"] > 0 for row in rows)
    said = [row.get("message", "") for row in Tail(tmp_path / "out" / "events.jsonl")]
    assert sum("the gate 'ratio' of method 'awpo' was open in 100.0% of the groups" in line for line in said) == 1


def test_an_endpoint_is_not_asked_where_the_method_does_not_need_it() -> None:
    judge = JudgeConfig.read({"kind": "endpoint", "endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "x"}}, "x")
    assert Scorer(get_method("grpo"), QUICK.model_copy(update={"judge": judge}), None).judge is None


def test_rollouts_are_scored_once_and_anew_where_they_are_others(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[str]] = []
    score = trainer.scorer.score
    monkeypatch.setattr(trainer.scorer, "score", lambda i, t, n: (texts.append(list(t)), score(i, t, n))[1])
    batch = rollout(trainer)
    assert len(texts) == 1
    rows = [dict(trainer.train_dataset[i // 4]) for i in range(16)]
    ids = [
        [token for token in row.tolist() if token != trainer._tokenizer.pad_token_id] for row in batch["completion_ids"]
    ]
    trainer._begin_scoring(rows, ids)
    others = [list(reversed(row)) for row in ids]
    trainer._calculate_rewards(rows, None, None, others)
    assert len(texts) == 3
    assert texts[2] == [trainer._decode(row) for row in others]


def test_the_method_card_says_who_judged(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    for name, judged in (("awpo", True), ("grpo", False)):
        train_policy(str(tiny_model), instances, tmp_path / name, QUICK.model_copy(update={"method": name}))
        card = json.loads((tmp_path / name / "checkpoint" / "method_card.json").read_text())
        assert ("judge" in card) == judged
    card = json.loads((tmp_path / "awpo" / "checkpoint" / "method_card.json").read_text())
    assert card["judge"]["kind"] == "rubric"
    assert len(card["judge"]["rules"]) == 16
