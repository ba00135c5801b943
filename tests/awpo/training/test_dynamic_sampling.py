import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from awpo.advantages import estimate
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.events import RunLog
from awpo.methods import get_method
from awpo.training.dynamic_sampling import replace_groups, teaching_groups, varying_groups
from awpo.training.policy import prompt_rows, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Drawn, Scorer, Scores, chosen_rows


def batch(advantages: list[float], width: int, first: int) -> dict:
    count = len(advantages)
    ids = first + torch.arange(count)[:, None].expand(count, width)
    return {
        "prompt_ids": ids.clone(),
        "completion_ids": ids.clone(),
        "completion_mask": torch.ones(count, width, dtype=torch.long),
        "advantages": torch.tensor(advantages),
        "teaches": torch.tensor(advantages) != 0,
        "clip_low": torch.full((count,), first / 1000),
        "num_items_in_batch": torch.tensor(count * width),
    }


def test_groups_without_variance_are_replaced_in_order_and_others_kept() -> None:
    """trl#6365, trl#7068: groups without variance in the denominator."""
    old = batch([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], width=2, first=100)
    new = batch([0.0, 0.0, 2.0, -2.0, 0.0, 0.0], width=3, first=200)
    assert varying_groups(old, 2).tolist() == [True, False, False]
    merged = replace_groups(old, new, 2, pad_id=7)
    assert merged["advantages"].tolist() == [1.0, -1.0, 2.0, -2.0, 0.0, 0.0]
    # Prompts are padded on the left, completions on the right; what could not be filled stays as it was.
    assert merged["prompt_ids"].tolist() == [
        [7, 100, 100],
        [7, 101, 101],
        [202] * 3,
        [203] * 3,
        [7, 104, 104],
        [7, 105, 105],
    ]
    assert merged["completion_ids"][0].tolist() == [100, 100, 7]
    assert merged["completion_mask"][0].tolist() == [1, 1, 0]
    assert merged["clip_low"].tolist() == [0.1, 0.1, 0.2, 0.2, 0.1, 0.1] or torch.allclose(
        merged["clip_low"], torch.tensor([0.1, 0.1, 0.2, 0.2, 0.1, 0.1])
    )


def test_nothing_useful_drawn_changes_nothing() -> None:
    """DAPO#22, AReaL#450: dynamic sampling without end."""
    old = batch([0.0, 0.0, 1.0, -1.0], width=2, first=100)
    new = batch([0.0] * 4, width=2, first=200)
    merged = replace_groups(old, new, 2, pad_id=7)
    assert all(torch.equal(merged[key], old[key]) for key in old)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "outcome", "overlong", "reasoning", "teaches"),
    [
        ("dapo", [4.0, 1.0], [0.0, 0.0], [NAN, NAN], True),
        ("dapo", [4.0, 1.0], [0.0, -0.5], [NAN, NAN], True),
        ("dapo", [1.0, 1.0], [0.0, -0.5], [NAN, NAN], False),  # length alone tells them apart
        ("dapo", [1.0, 1.0], [0.0, 0.0], [0.0, 3.0], False),  # which dapo does not read
        ("grpo_mixed", [1.0, 1.0], [0.0, 0.0], [0.0, 3.0], True),
        ("grpo_mixed", [1.0, 1.0], [0.0, 0.0], [NAN, 3.0], False),
        ("grpo_mixed", [4.0, 1.0], [0.0, 0.0], [0.0, 3.0], False),  # the judge cancels the outcome: no advantage
        ("gdpo", [4.0, 1.0], [0.0, 0.0], [1.0, 1.0], True),
    ],
)
def test_what_a_group_can_teach(
    name: str, outcome: list[float], overlong: list[float], reasoning: list[float], teaches: bool
) -> None:
    method = get_method(name)
    rewards = {"format": torch.tensor([[1.0, 1.0]]), "reasoning": torch.tensor([reasoning])}
    rewards |= {"outcome": torch.tensor([outcome]), "correct": torch.tensor([outcome]) - 1}
    given = {**rewards, "outcome": rewards["outcome"] + torch.tensor([overlong])}
    result = estimate(method, given, r_min=torch.tensor([-3.0]), r_max=torch.tensor([4.0]))
    assert teaching_groups(method, rewards, result).tolist() == [teaches]


def test_rows_of_several_draws_keep_what_is_theirs(instances: Path) -> None:
    rows = read_instances(instances, {"train"})
    draws = [
        Drawn(rows[:2], ["a", "b"], Scores(format=[0, 1], correct=[2, 3], judge_seconds=1.0)),
        Drawn(rows[2:4], ["c", "d"], Scores(format=[4, 5], correct=[6, 7], judge_seconds=2.0)),
    ]
    found = chosen_rows(draws, [2, 1, 3])
    assert found.texts == ["c", "b", "d"]
    assert found.instances == [rows[2], rows[1], rows[3]]
    assert found.scores == Scores(format=[4, 1, 5], correct=[6, 3, 7], judge_seconds=3.0)


def test_metrics_and_samples_are_of_the_groups_that_are_trained_on(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """And the outcome is told without the penalty for length, which dapo trains on all the same."""
    config = PolicyConfig(
        steps=2, prompts_per_rollout=4, group_size=4, steps_per_rollout=2, micro_batch_size=4, max_completion_length=8
    )
    method, tokenizer = get_method("dapo"), AutoTokenizer.from_pretrained(tiny_model)
    chosen = read_instances(instances, {"train"})
    trainer = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        processing_class=tokenizer,
        args=trainer_arguments(config, method, tmp_path, 1),
        train_dataset=prompt_rows(tokenizer, chosen, 2000)[0],
        method=method,
        scorer=Scorer(method, config, tmp_path / "samples.jsonl"),
        instances=chosen,
        log=RunLog(tmp_path),
    )
    trainer.model.train()
    # All answers are wrong but half of those of one group, in the second draw.
    score, drawn = trainer.scorer.score, []

    def scored(instances: list, texts: list[str], lengths: list[int]) -> Scores:
        scores = score(instances, texts, lengths)
        scores.format, scores.correct = [0.0] * 16, [-3.0] * 16
        if len(drawn) == 1:
            scores.correct[4:8] = [0.0, 0.0, -3.0, -3.0]
        drawn.append((texts, lengths, scores))
        return scores

    trainer.scorer.score = scored  # type: ignore[method-assign]
    batch = trainer._generate_and_score_completions([dict(trainer.train_dataset[i // 4]) for i in range(16)])
    store = trainer._metrics["train"]
    assert len(drawn) == 4
    assert batch.keys().isdisjoint({"teaches", "row", "format", "overlong"})
    taught = batch["advantages"].view(4, 4).ne(0).any(dim=1).tolist()
    assert taught == [True, False, False, False], "the first empty group's place, and no advantage by length alone"
    penalty = [*drawn[1][2].overlong[4:8], *drawn[0][2].overlong[4:]]
    assert min(penalty) < 0
    assert store["reward/outcome"] == [pytest.approx(-3 + 6 / 16)]
    assert store["reward/overlong"] == [pytest.approx(sum(penalty) / 16)]
    assert store["reward/total"] == [pytest.approx(-3 + (6 + sum(penalty)) / 16)]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    texts = {0: set(drawn[0][0][4:]), 1: set(drawn[1][0][4:8])}
    assert all(row["completion"] in texts[row["draw"]] and row["step"] == 1 for row in samples)
    lengths = batch["completion_mask"].sum(dim=1)
    assert store["completions/mean_length"] == [pytest.approx(lengths.float().mean().item())]
    assert store["dynamic_sampling/empty_share"] == [0.75]
