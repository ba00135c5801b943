"""Against TRL's own GRPOTrainer: same weights, prompts, completions and rewards give its advantages, loss, gradients.

TRL divides by the sample std with 1e-4 added; every method takes that convention as `std: sample, eps: 1e-4`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from awpo.advantages import estimate
from awpo.chat import render_prompt, render_target
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.events import RunLog
from awpo.methods import Method, get_method
from awpo.training.policy import prompt_rows, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer
from awpo.types import Instance, Message, ToolCall

CONVENTION: dict[str, Any] = {"std": "sample", "eps": 1e-4}
GROUP = 4
MAXIMUM = 220


def by_convention(name: str) -> Method:
    """A method with TRL's std and eps; read, not changed, as dr_grpo divides by no std."""
    return Method.read({**get_method(name).to_json(), **CONVENTION}, "here")


CONFIG = PolicyConfig(
    prompts_per_rollout=4,
    group_size=GROUP,
    steps_per_rollout=2,
    micro_batch_size=4,
    max_completion_length=MAXIMUM,
    steps=2,
    save_every=2,
)
# Each method in TRL's own settings, and the rewards that are its reward functions.
OUTCOME = ("format", "correct")
THEIRS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo": ({"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2}, OUTCOME),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.2}, OUTCOME),
    "dapo": (
        {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.28},
        (*OUTCOME, "overlong"),
    ),
    "gdpo": (
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum", "epsilon": 0.2},
        (*OUTCOME, "reasoning"),
    ),
}


# Advantages of fixed tensors


class Table:
    """TRL's advantages of a table of rewards (N, rewards), by its own trainer on rollouts of one token."""

    def __init__(self, model: Path, out: Path, settings: dict[str, Any], rewards: int, prompts: int) -> None:
        self.values = torch.zeros(prompts * GROUP, rewards)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.rows = [{"prompt": f"prompt {number // GROUP}"} for number in range(prompts * GROUP)]

        def column(number: int) -> Callable[..., list[float | None]]:
            def reward(completions: list[str], **_: Any) -> list[float | None]:
                return [None if value != value else value for value in self.values[:, number].tolist()]

            reward.__name__ = f"reward_{number}"
            return reward

        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            processing_class=tokenizer,
            reward_funcs=[column(number) for number in range(rewards)],
            args=GRPOConfig(
                output_dir=str(out),
                num_generations=GROUP,
                per_device_train_batch_size=prompts * GROUP,
                use_cpu=True,
                bf16=False,
                report_to="none",
                **settings,
            ),
            train_dataset=Dataset.from_list(self.rows),
        )
        self.trainer.model.train()
        ids = [[tokenizer.eos_token_id]] * (prompts * GROUP)
        self.trainer._generate_single_turn = lambda *_: (ids, None)

    def advantages(self, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(P, G); in float64 the rounding of TRL's own arithmetic is out of the comparison."""
        self.values = values
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.trainer._generate_and_score_completions(self.rows)["advantages"].view(-1, GROUP)
        finally:
            torch.set_default_dtype(before)


def draw(generator: torch.Generator, prompts: int) -> dict[str, torch.Tensor]:
    """Rewards as they occur: format 0 or 1, correct on a grid or anywhere, the judge's score anywhere."""
    shape = (prompts, GROUP)
    correct = torch.rand(shape, generator=generator) * 6 - 3
    grid = torch.randint(-6, 7, shape, generator=generator) / 2
    return {
        "format": torch.randint(0, 2, shape, generator=generator).float(),
        "correct": torch.where(torch.arange(prompts)[:, None] % 2 == 0, correct, grid),
        "overlong": -torch.rand(shape, generator=generator),
        "reasoning": torch.rand(shape, generator=generator) * 3,
    }


def ours(method: Method, rewards: dict[str, torch.Tensor]) -> torch.Tensor:
    outcome = rewards["format"] + rewards["correct"]
    if method.overlong_share:
        outcome = outcome + rewards["overlong"]
    bound_P = torch.ones(len(outcome))
    given = {name: rewards[name] for name in ("format", "correct", "reasoning")}
    return estimate(method, {"outcome": outcome, **given}, r_min=-3 * bound_P, r_max=4 * bound_P).advantages


@pytest.mark.parametrize("name", THEIRS)
def test_advantages_of_fixed_tensors(name: str, tiny_model: Path, tmp_path: Path) -> None:
    settings, columns = THEIRS[name]
    table = Table(tiny_model, tmp_path, settings, len(columns), prompts=6)
    generator = torch.Generator().manual_seed(11)
    method = by_convention(name)
    for _ in range(20):
        rewards = draw(generator, 6)
        values = torch.stack([rewards[column].flatten() for column in columns], dim=1)
        torch.testing.assert_close(ours(method, rewards), table.advantages(values), atol=1e-6, rtol=1e-6)
        theirs = table.advantages(values, torch.float64)
        doubled = {key: value.double() for key, value in rewards.items()}
        torch.testing.assert_close(ours(method, doubled), theirs, atol=1e-9, rtol=0)
        assert theirs.abs().max() > 0.5
    # the comparison can tell conventions apart
    if name != "dr_grpo":
        assert (ours(get_method(name), rewards) - theirs).abs().max() > 1e-2


def test_where_trl_differs_a_group_without_variance(tiny_model: Path, tmp_path: Path) -> None:
    """By construction (NeMo-RL#4161): the last bit of a float32 is 0 here, and a small advantage in TRL.

    In gdpo that advantage moves the batch's mean, and so the group whose rewards are exactly equal, too.
    """
    above = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)).item()
    outcome = torch.tensor([[1.0] * 4, [0.7, above, 0.7, 0.7], [3.0, 1, 1, -1]])
    rewards = {"format": torch.zeros(3, 4), "correct": outcome, "reasoning": torch.zeros(3, 4)}
    for name, settings in (("grpo", THEIRS["grpo"][0]), ("gdpo", THEIRS["gdpo"][0])):
        table = Table(tiny_model, tmp_path / name, settings, 1, prompts=3)
        theirs = table.advantages(outcome.reshape(-1, 1))
        found = ours(by_convention(name), rewards)
        assert found[:2].tolist() == [[0] * 4] * 2
        assert theirs[0].abs().max() < (1e-3 if name == "gdpo" else 1e-9)
        assert 1e-5 < theirs[1].abs().max() < 1e-2
        torch.testing.assert_close(found[2], theirs[2], atol=1e-3, rtol=0)


def test_where_trl_differs_a_failed_judgement(tiny_model: Path, tmp_path: Path) -> None:
    """TRL's sum counts a reward that is None as 0; here the group is trained on its outcome alone."""
    outcome, reasoning = torch.tensor([[1.0, 1, -1, -1]]), torch.tensor([[3.0, float("nan"), 3, 3]])
    rewards = {"format": torch.zeros(1, 4), "correct": outcome, "reasoning": reasoning}
    table = Table(tiny_model, tmp_path, THEIRS["grpo"][0], 2, prompts=1)
    theirs = table.advantages(torch.cat([outcome, reasoning]).T)
    found = ours(by_convention("grpo_mixed"), rewards)
    # R = 4, 1, 2, 2: the rollout whose judgement failed is the worst of all, though its outcome is among the best
    assert theirs[0].argmin() == 1
    torch.testing.assert_close(found, ours(by_convention("grpo"), rewards))


# Loss and gradients of a tiny model's fixed batch


def texts(instance: Instance) -> list[tuple[str, bool]]:
    """Four completions of different worth, and whether each ends with the end token."""
    thought = instance.rationale
    call = instance.target.tool_calls[0] if instance.target.tool_calls else ToolCall("get_time", {"city": "Oslo"})
    return [
        (render_target(instance.target, thought), True),
        (render_target(Message("assistant", None, (ToolCall(call.name, {"city": "Bonn"}),)), "city is Bonn."), True),
        (render_target(Message("assistant", "Hello. " * 20), thought), False),
        (f"<think>\n{thought}\n<tool_call>", True),
    ]


class Batch:
    """A fixed batch of four prompts with four completions each, and the trainers that see it."""

    def __init__(self, model: Path, instances: Path, out: Path) -> None:
        self.model, self.out = model, out
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        everything = read_instances(instances, {"train"})
        calls = [instance for instance in everything if instance.kind == "call"][:3]
        self.instances = [*calls, next(instance for instance in everything if instance.kind == "reply")]
        self.ids: list[list[int]] = []
        for instance in self.instances:
            for text, ended in texts(instance):
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: MAXIMUM - 1]
                self.ids.append([*ids, self.tokenizer.eos_token_id] if ended else ids)
        self.rows, _ = prompt_rows(self.tokenizer, self.instances, 4000)

    def ours(self, method: Method) -> PolicyTrainer:
        return PolicyTrainer(
            model=self.load(),
            processing_class=self.tokenizer,
            args=trainer_arguments(CONFIG, method, self.out, 1),
            train_dataset=self.rows,
            method=method,
            scorer=Scorer(method, CONFIG, None),
            instances=self.instances,
            log=RunLog(self.out),
        )

    def theirs(self, name: str) -> GRPOTrainer:
        settings, columns = THEIRS[name]
        scorer = Scorer(get_method(name), CONFIG, None)

        def column(reward: str) -> Callable[..., list[float]]:
            def score(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
                ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
                found = [self.tokenizer.decode([i for i in ids if i not in ends]) for ids in completion_ids]
                scores = scorer.score([self.instances[i] for i in index], found, [len(ids) for ids in completion_ids])
                return list(getattr(scores, reward))

            score.__name__ = reward
            return score

        return GRPOTrainer(
            model=self.load(),
            processing_class=self.tokenizer,
            reward_funcs=[column(reward) for reward in columns],
            args=GRPOConfig(
                output_dir=str(self.out),
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                steps_per_generation=4,
                num_generations=GROUP,
                max_completion_length=MAXIMUM,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                **settings,
            ),
            train_dataset=self.rows,
        )

    def load(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model)

    def step(self, trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
        """The micro-batches of one rollout: advantages, losses, and the gradient of the first optimiser step.

        The weights are moved after the rollout, by the same amounts for every trainer, so that clipping is alive.
        """
        trainer._generate_single_turn = lambda *_: (self.ids, None)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        rows = [dict(self.rows[number // GROUP]) for number in range(len(self.ids))]
        with pytest.MonkeyPatch.context() as patch:  # each shuffles the rows of a rollout in a way of its own
            patch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda rows: rows)
            patch.setattr("awpo.training.packed_trainer.shuffled", lambda rows, _: rows)
            trainer._prepare_inputs(rows)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        batches = trainer._buffered_inputs
        losses = []
        for batch in batches[:2]:
            losses.append(trainer.compute_loss(trainer.model, batch))
            losses[-1].backward()
        found = {
            "ids": torch.cat([row[row != self.tokenizer.pad_token_id] for b in batches for row in b["completion_ids"]]),
            "advantages": torch.cat([batch["advantages"] for batch in batches]),
            "losses": torch.stack(losses).detach(),
            "gradient": torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]),
            "clipped": torch.tensor(trainer._metrics["train"]["clip_ratio/region_mean"]),
        }
        if "clip_low" in batches[0]:
            found["radii"] = torch.stack([torch.cat([b[key] for b in batches]) for key in ("clip_low", "clip_high")])
        return found


@pytest.fixture
def batch(tiny_model: Path, instances: Path, tmp_path: Path) -> Batch:
    return Batch(tiny_model, instances, tmp_path)


@pytest.mark.parametrize("name", THEIRS)
def test_loss_and_gradient_of_a_fixed_batch(name: str, batch: Batch) -> None:
    theirs = batch.step(batch.theirs(name))
    found = batch.step(batch.ours(by_convention(name)))
    assert torch.equal(found["ids"], theirs["ids"])
    for key in ("advantages", "losses", "gradient"):
        torch.testing.assert_close(found[key], theirs[key], atol=1e-6, rtol=1e-6)
    # it says something: advantages and gradient are there, and the clip is at work
    assert theirs["advantages"].abs().max() > 0.5
    assert theirs["gradient"].abs().max() > 1e-3
    assert theirs["clipped"].min() > 0.01


def test_awpo_without_its_parts_is_grpo_to_the_last_bit(batch: Batch) -> None:
    bare = get_method("awpo").changed(gate="never", difficulty="none", clip="fixed")
    found, expected = batch.step(batch.ours(bare)), batch.step(batch.ours(get_method("grpo")))
    assert found.keys() == expected.keys() >= {"radii"}
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert expected["advantages"].abs().max() > 0.5
    # and with its parts it is not
    assert not torch.equal(batch.step(batch.ours(get_method("awpo")))["losses"], expected["losses"])


def test_prompts_are_those_that_were_rendered(batch: Batch) -> None:
    """Both trainers get the same rows; TRL adds or drops nothing."""
    prompts, _, _ = batch.theirs("grpo")._tokenize_prompts([row["prompt"] for row in batch.rows])
    assert [batch.tokenizer.decode(ids) for ids in prompts] == [
        render_prompt(batch.tokenizer, instance) for instance in batch.instances
    ]
