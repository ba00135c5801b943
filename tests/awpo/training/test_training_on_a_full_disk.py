"""A training whose disk fills up while it writes checkpoints: told in one line, and the run goes on once there is room
as if there had been room all the time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import MANIFEST, read_manifest
from awpo.config_training import PolicyConfig, SftConfig
from awpo.errors import UserError
from awpo.events import EVENTS, METRICS, Tail
from awpo.files import file_hash
from awpo.processes import run_worker
from awpo.training.checkpoints import last_whole_checkpoint, step_of
from awpo.training.identity import RESUME, WHOLE
from awpo.training.policy import train_policy
from awpo.training.sft import train_sft
from tests.small_disk import MIB, SmallDisk, small_disk

STEPS = 4
SFT = SftConfig(steps=STEPS, batch_size=4, save_every=2, learning_rate=3e-3, threads=1)
# A checkpoint in the middle of a rollout batch.
POLICY = PolicyConfig(
    steps=STEPS,
    prompts_per_rollout=6,
    group_size=2,
    steps_per_rollout=3,
    micro_batch_size=2,
    max_completion_length=8,
    learning_rate=3e-3,
    save_every=2,
    threads=1,
)
TRAININGS: dict[str, tuple[Callable[..., Any], SftConfig | PolicyConfig]] = {
    "sft": (train_sft, SFT),
    "policy": (train_policy, POLICY),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64 * MIB) as found:
        yield found


def blocks(folder: Path) -> int:
    """Bytes that a folder takes of its disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def result(out: Path) -> tuple[list[Any], dict[str, str], str]:
    rows = [
        [row["step"], {name: value for name, value in row["metrics"].items() if "seconds" not in name}]
        for row in Tail(out / METRICS)
    ]
    weights = {path.name: file_hash(path) for path in (out / "checkpoint").glob("*.safetensors")}
    samples = out / "judge_samples.jsonl"
    return rows, weights, samples.read_text("utf-8") if samples.exists() else ""


@functools.cache
def undisturbed(stage: str, model: Path, instances: Path, folder: Path) -> tuple[Path, int]:
    """A training with room enough, and how much of a disk its first checkpoint took."""
    train, config = TRAININGS[stage]
    out, sizes = folder / stage, []
    mark = "awpo.training.checkpoints.write_atomically"
    with pytest.MonkeyPatch.context() as patch:
        from awpo.training import checkpoints

        write = checkpoints.write_atomically

        def measured(path: Path, data: str) -> None:
            if path.name == WHOLE:
                sizes.append(blocks(path.parent))
            write(path, data)

        patch.setattr(mark, measured)
        train(str(model), instances, out, config)
    return out, sizes[0]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, instances: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    return lambda stage: undisturbed(stage, tiny_model, instances, folder)


@pytest.mark.parametrize(
    ("stage", "checkpoints", "goes_on_after"),
    [("sft", 0.5, 0), ("sft", 1.5, 2), ("sft", 2.1, 4), ("policy", 0.5, 0), ("policy", 1.5, 2)],
)
def test_a_checkpoint_that_does_not_fit_ends_the_training_and_hurts_none(
    stage: str,
    checkpoints: float,
    goes_on_after: int,
    whole: Any,
    disk: SmallDisk,
    tiny_model: Path,
    instances: Path,
) -> None:
    """There is room for so many `checkpoints`: for two and a bit, the model at the end is what does not fit."""
    (reference, size), (train, config) = whole(stage), TRAININGS[stage]
    out = disk.folder / "stage"
    disk.fill(leave=int(checkpoints * size))
    with pytest.raises(UserError, match=rf"^no space left on the disk of {out}; free some and run the same again: it"):
        train(str(tiny_model), instances, out, config)
    assert not (out / MANIFEST).exists()
    disk.make_room()
    train(str(tiny_model), instances, out, config)
    [told] = [row["message"] for row in Tail(out / EVENTS) if row["event"] == "note"]
    assert told.startswith(f"goes on after step {goes_on_after}" if goes_on_after else "starts at step 1 again")
    assert read_manifest(out) is not None
    assert result(out) == result(reference)


@pytest.mark.slow
def test_a_worker_tells_it_and_keeps_the_checkpoint_before(
    whole: Any, disk: SmallDisk, tiny_model: Path, instances: Path
) -> None:
    """As tasks run it, on a disk that somebody else fills up once there is a checkpoint."""
    _, size = whole("policy")
    config = POLICY.model_copy(update={"steps": 40, "save_every": 1})
    out = disk.folder / "stage"
    names = {"model": str(tiny_model), "instances": str(instances), "out": str(out)}
    job = {**names, "config": config.model_dump(mode="json")}

    def fill(row: dict[str, Any]) -> None:
        if row["event"] == "progress" and disk.free() > size:
            disk.fill(leave=size // 2)

    with pytest.raises(UserError, match=r"^no space left on the disk of .*stage; free some and run the same again"):
        run_worker("awpo.training.policy", job, out, on_event=fill)
    kept = last_whole_checkpoint(out / RESUME)
    assert kept is not None
    disk.make_room()
    run_worker("awpo.training.policy", job, out)
    assert [row["step"] for row in Tail(out / METRICS)] == list(range(1, 41))
    [told] = [row["message"] for row in Tail(out / EVENTS) if row["event"] == "note"]
    assert told == f"goes on after step {step_of(kept)} of 40"
