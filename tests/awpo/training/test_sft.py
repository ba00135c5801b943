from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from awpo.artifacts import read_manifest
from awpo.chat import render_prompt
from awpo.config import SftConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import METRICS, Tail
from awpo.training.sft import IGNORED, Demonstrations, PadAroundTarget, prepare_demonstrations, target_loss, train_sft

QUICK = SftConfig(steps=6, batch_size=8, learning_rate=1e-2, save_every=2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint").state_dict()


def test_only_the_target_and_its_end_carry_loss(tiny_model: Path, instances: Path) -> None:
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


def test_an_interrupted_run_ends_as_an_undisturbed_one(
    tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_sft(str(tiny_model), instances, tmp_path / "whole", QUICK)
    import awpo.training.sft as module

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(
            module.LogToFiles,
            "on_step_begin",
            lambda self, args, state, control, **_: die() if state.global_step == 5 else None,
        )
        with pytest.raises(RuntimeError, match="killed"):
            train_sft(str(tiny_model), instances, tmp_path / "cut", QUICK)
    train_sft(str(tiny_model), instances, tmp_path / "cut", QUICK)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_a_share_of_demonstrations_decides_wrongly(instances: Path) -> None:
    rows = read_instances(instances, {"train"})
    changed, replaced = prepare_demonstrations(rows, SftConfig(wrong_decision_share=0.5))
    different = [new for old, new in zip(rows, changed, strict=True) if old.target != new.target]
    assert len(different) == replaced
    assert 5 < replaced < 27
    assert all(new.rationale for new in different)
    assert prepare_demonstrations(rows, SftConfig())[1] == 0


def test_no_instance_that_fits_is_a_user_error(tiny_model: Path, instances: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training instance of at most 16 tokens"):
        train_sft(str(tiny_model), instances, tmp_path / "out", SftConfig(max_length=16))


def test_a_model_that_is_not_there_is_a_user_error(instances: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load the model"):
        train_sft(str(tmp_path / "empty"), instances, tmp_path / "out", QUICK)
