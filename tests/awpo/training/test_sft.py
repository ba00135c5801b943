import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState

from awpo.artifacts import read_manifest
from awpo.chat import render_prompt
from awpo.config_training import PolicyConfig, SftConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, Tail
from awpo.training import sft_trainer
from awpo.training.checkpoints import RESUME, WHOLE
from awpo.training.policy import train_policy
from awpo.training.sft import Demonstrations, LogToFiles, prepare_demonstrations, train_sft, trainer_arguments
from awpo.training.sft_trainer import IGNORED, OrderedByLength, PadAroundTarget, TargetTrainer, target_loss

QUICK = SftConfig(steps=6, batch_size=8, learning_rate=1e-2, save_every=2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint").state_dict()


def test_only_the_target_and_its_end_carry_loss(tiny_model: Path, instances: Path) -> None:
    """trl#4975, NeMo-RL#2176: tool results are trained on."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    instance = read_instances(instances, {"train"})[0]
    (row,) = Demonstrations(tokenizer, [instance], 2000).rows
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    text = tokenizer.decode(trained)
    assert text.startswith("<think>\nget_weather fits")
    assert text.endswith("</tool_call><|im_end|>")
    ignored = row["input_ids"][: row["labels"].count(IGNORED)]
    assert tokenizer.decode(ignored) == render_prompt(tokenizer, instance)


def test_too_long_instances_are_counted(tiny_model: Path, instances: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    data = Demonstrations(tokenizer, read_instances(instances, {"train"}), 16)
    assert (len(data), data.too_long) == (0, 32)


def test_the_loss_is_that_of_each_row_alone(tiny_model: Path, instances: Path) -> None:
    """Padding, on whichever side, changes nothing: the batch's loss is the token mean of single unpadded rows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = Demonstrations(tokenizer, read_instances(instances, {"train"}), 2000).rows[::7]
    assert len({len(row["input_ids"]) for row in rows}) > 1
    batch = PadAroundTarget(tokenizer.pad_token_id)(rows)
    labels = batch.pop("labels")
    together = target_loss(model(**batch), labels)
    total, count = 0.0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        targets = torch.tensor(row["labels"][1:])
        total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    assert together.item() == pytest.approx(total / count, abs=1e-5)


def test_training_lowers_the_loss_and_leaves_a_checkpoint(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    out = tmp_path / "sft"
    summary = train_sft(str(tiny_model), instances, out, SftConfig(steps=30, batch_size=8, learning_rate=1e-2))
    losses = [row["metrics"]["loss"] for row in Tail(out / METRICS) if "loss" in row["metrics"]]
    assert losses[-1] < 0.7 * losses[0]
    assert summary["instances"] == 32
    manifest = read_manifest(out)
    assert manifest is not None
    assert "checkpoint/model.safetensors" in manifest.outputs
    assert (out / "checkpoint" / "method_card.json").exists()


def test_same_seed_same_weights_and_another_seed_others(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_sft(str(tiny_model), instances, tmp_path / name, QUICK.model_copy(update={"seed": seed}))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)


# 32 instances are three batches an epoch, the last of eight, so steps 1 to 5 end within epochs and at the end of one.
RESUMED = SftConfig(steps=5, batch_size=12, learning_rate=1e-2, save_every=1)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, instances: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "sft"
    train_sft(str(tiny_model), instances, out, RESUMED)
    return out


def assert_ends_alike(out: Path, undisturbed: Path) -> None:
    """The same weights to the last bit, the same metrics of each step, once, and the same summary."""
    first, second = weights(undisturbed), weights(out)
    assert all(torch.equal(first[key], second[key]) for key in first)
    rows, expected = (
        [(row["step"], row["metrics"]) for row in Tail(folder / METRICS)] for folder in (out, undisturbed)
    )
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5]
    assert rows == expected
    assert (out / "summary.json").read_text() == (undisturbed / "summary.json").read_text()


@pytest.mark.parametrize(("save_every", "cut"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 3), (3, 4)])
def test_a_run_that_was_cut_after_any_step_ends_as_an_undisturbed_one(
    save_every: int,
    cut: int,
    undisturbed: Path,
    tiny_model: Path,
    instances: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(self: object, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step == cut:
            raise RuntimeError("killed")

    config = RESUMED.model_copy(update={"save_every": save_every})
    with monkeypatch.context() as patch:
        patch.setattr(LogToFiles, "on_step_begin", die)
        with pytest.raises(RuntimeError, match="killed"):
            train_sft(str(tiny_model), instances, tmp_path / "cut", config)
    train_sft(str(tiny_model), instances, tmp_path / "cut", config)
    assert_ends_alike(tmp_path / "cut", undisturbed)


def cut_after(step: int, model: Path, instances: Path, out: Path, config: SftConfig) -> None:
    """Trains until `step` steps are done, and dies."""

    def die(self: object, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step == step:
            raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogToFiles, "on_step_begin", die)
        with pytest.raises(RuntimeError, match="killed"):
            train_sft(str(model), instances, out, config)


def notes(out: Path) -> list[str]:
    return [row["message"] for row in Tail(out / "events.jsonl") if row["event"] == "note"]


def test_another_save_every_goes_on_and_acts(
    undisturbed: Path, tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    cut_after(2, tiny_model, instances, out, RESUMED)
    train_sft(str(tiny_model), instances, out, RESUMED.model_copy(update={"save_every": 4}))
    assert_ends_alike(out, undisturbed)
    assert notes(out) == ["goes on after step 2 of 5"]
    # At the fourth step and at the end, and not at the third as before.
    assert sorted(path.name for path in (out / RESUME).iterdir()) == ["checkpoint-4", "checkpoint-5"]
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.attempts == 2
    card = json.loads((out / "checkpoint" / "method_card.json").read_text())
    assert card == json.loads((undisturbed / "checkpoint" / "method_card.json").read_text()) | {"code": card["code"]}
    assert card.keys().isdisjoint({"counts", "outputs", "seconds", "attempts"})


def test_more_steps_start_anew_and_say_why(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """The learning rate falls over all steps: those that were done were other ones."""
    cut_after(2, tiny_model, instances, tmp_path, RESUMED)
    train_sft(str(tiny_model), instances, tmp_path, RESUMED.model_copy(update={"steps": 6}))
    assert notes(tmp_path) == ["starts anew, as what was here is of other settings: steps was 5 and is 6"]
    assert [row["step"] for row in Tail(tmp_path / METRICS)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [2, 4])
def test_a_worker_killed_by_the_system_is_resumed_from_bit_for_bit(
    cut: int, undisturbed: Path, tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """SIGKILL leaves a process no time for anything; where in a step it falls is up to the system."""
    out = tmp_path / "killed"
    job = {"model": str(tiny_model), "instances": str(instances), "out": str(out), "config": RESUMED.model_dump()}
    out.mkdir()
    (out / "job.json").write_text(json.dumps(job))
    worker = subprocess.Popen(
        [sys.executable, "-m", "awpo.training.sft", str(out / "job.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while worker.poll() is None and not (out / RESUME / f"checkpoint-{cut}" / WHOLE).exists():
            time.sleep(0.005)
        assert worker.poll() is None, "it ended before it could be killed"
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == -signal.SIGKILL
    train_sft(str(tiny_model), instances, out, RESUMED)
    assert_ends_alike(out, undisturbed)


def test_the_trainer_of_trl_computes_the_same_loss(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    """On a GPU the loss is TRL's own; loss and gradient are those of `target_loss`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    dataset = Demonstrations(tokenizer, read_instances(instances, {"train"}), 2000).to_dataset()
    trainer = TargetTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        processing_class=tokenizer,
        args=trainer_arguments(QUICK, tmp_path),
        train_dataset=dataset,
        data_collator=PadAroundTarget(tokenizer.pad_token_id),
    )
    trainer.model.train()
    found = []
    for compute in (trainer.compute_loss, super(TargetTrainer, trainer).compute_loss):
        batch = trainer.data_collator([dataset[row] for row in (0, 2, 9, 17)])
        if found:
            del batch["logits_to_keep"]
        trainer.model.zero_grad()
        loss = compute(trainer.model, batch, num_items_in_batch=torch.tensor(321))
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])))
    assert found[0][1].abs().max() > 1e-3
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_rows_of_similar_length_stand_together_in_an_order_of_seed_and_epoch() -> None:
    lengths = [10 * (row % 4) + row // 4 for row in range(32)]
    sampler = OrderedByLength(lengths, batch_size=4, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(32))
    assert first == list(sampler) == list(OrderedByLength(lengths, 4, 3))
    assert first != list(OrderedByLength(lengths, 4, 4))
    torch.rand(5)  # whatever else is drawn
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    spreads = [
        max(lengths[row] for row in first[i : i + 4]) - min(lengths[row] for row in first[i : i + 4])
        for i in (4, 8, 20)
    ]
    assert sum(spreads) / 3 < 15  # of 37; in random order the mean is about 24


def test_without_rationales_the_target_is_the_action_alone(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = Demonstrations(tokenizer, read_instances(instances, {"train"})[:1], 2000, rationales=False).rows
    trained = [token for token, label in zip(rows[0]["input_ids"], rows[0]["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode(trained) == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    )
    config = QUICK.model_copy(update={"steps": 2, "rationales": False})  # the first step of a warm-up moves nothing
    train_sft(str(tiny_model), instances, tmp_path / "bare", config)
    train_sft(str(tiny_model), instances, tmp_path / "thought", config.model_copy(update={"rationales": True}))
    bare, thought = weights(tmp_path / "bare"), weights(tmp_path / "thought")
    assert not all(torch.equal(bare[key], thought[key]) for key in bare)


def test_a_share_of_demonstrations_decides_wrongly(instances: Path) -> None:
    rows = read_instances(instances, {"train"})
    changed, replaced = prepare_demonstrations(rows, SftConfig(wrong_decision_share=0.5))
    different = [new for old, new in zip(rows, changed, strict=True) if old.target != new.target]
    assert len(different) == replaced
    assert 5 < replaced < 27
    assert all(new.rationale for new in different)
    assert prepare_demonstrations(rows, SftConfig())[1] == 0


def test_the_pair_sft_grpo_is_sft_and_then_grpo(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    train_sft(str(tiny_model), instances, tmp_path / "sft", QUICK)
    start = tmp_path / "sft" / "checkpoint"
    config = PolicyConfig(
        steps=2,
        prompts_per_rollout=4,
        group_size=4,
        steps_per_rollout=2,
        micro_batch_size=8,
        learning_rate=1e-2,
        max_completion_length=12,
    )
    for method in ("grpo", "sft_grpo"):
        train_policy(str(start), instances, tmp_path / method, config.model_copy(update={"method": method}))
    before, one, two = weights(tmp_path / "sft"), weights(tmp_path / "grpo"), weights(tmp_path / "sft_grpo")
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], before[key]) for key in one)
    card = json.loads((tmp_path / "sft_grpo" / "checkpoint" / "method_card.json").read_text())
    assert card["method"]["stages"] == ["sft", "policy"]


def test_no_instance_that_fits_is_a_user_error(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training instance of at most 16 tokens"):
        train_sft(str(tiny_model), instances, tmp_path / "out", SftConfig(max_length=16))


def test_a_model_that_is_not_there_is_a_user_error(instances: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load the model"):
        train_sft(str(tmp_path / "empty"), instances, tmp_path / "out", QUICK)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_its_batch(
    tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def overflowing(outputs: Any, labels: torch.Tensor, count: Any = None) -> torch.Tensor:
        seen.append(labels)
        return target_loss(outputs, labels, count) / (0.0 if len(seen) == 4 else 1.0)

    monkeypatch.setattr(sft_trainer, "target_loss", overflowing)
    out = tmp_path / "out"
    with pytest.raises(
        UserError, match=r"the loss of optimiser step 4 is not finite \(inf\).*sft.learning_rate"
    ) as told:
        train_sft(str(tiny_model), instances, out, QUICK)
    [event] = [row for row in Tail(out / EVENTS) if row["event"] == "not_finite"]
    assert len(event["instances"]) == QUICK.batch_size
    known = {instance.id: instance for instance in read_instances(instances, {"train"})}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = Demonstrations(tokenizer, [known[name] for name in event["instances"]], 2000).rows
    targets = sorted(tuple(i for i in row["labels"] if i != IGNORED) for row in rows)
    assert targets == sorted(
        tuple(i for i in row if i != IGNORED) for row in seen[3].tolist()
    )  # that batch and no other
    assert event["instances"][0] in str(told.value)
    assert (out / RESUME / "checkpoint-2" / WHOLE).exists()
    assert not (out / RESUME / "checkpoint-4").exists()
    monkeypatch.undo()
    train_sft(str(tiny_model), instances, out, QUICK)  # from there it goes on
    assert [row["step"] for row in Tail(out / METRICS)] == [1, 2, 3, 4, 5, 6]
