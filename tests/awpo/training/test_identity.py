"""What the result of training depends on: how it was launched is a part of it, but for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import open_stage
from awpo.config_training import PolicyConfig, SftConfig
from awpo.errors import UserError
from awpo.launch import read_launch
from awpo.training.checkpoints import check_launch, open_training
from awpo.training.identity import (
    GROWING,
    RESUME,
    WHOLE,
    TrainingIdentity,
    policy_identity,
    refuse_other_launch,
    sft_identity,
)

ONE, TWO = read_launch("cpu").effect(), read_launch("cpu-2").effect()


def test_work_of_one_process_is_what_it_was(instances: Path) -> None:
    """The settings alone: finished work of earlier versions is not done again."""
    config, policy = SftConfig(seed=3), PolicyConfig(seed=3)
    for launch in (None, ONE):
        assert sft_identity("org/model", instances, config, launch).settings == config.identity()
        assert policy_identity("org/model", instances, policy, launch).settings == policy.identity()
        assert sft_identity("org/model", instances, config, launch).former
    two = sft_identity("org/model", instances, config, TWO)
    assert two.settings == {**config.identity(), "processes": 2}
    assert not two.former, "what an earlier version did was by one process"


class Died(RuntimeError):
    pass


@contextmanager
def unfinished(out: Path, work: TrainingIdentity, checkpoint: bool) -> Iterator[None]:
    """A training in `out` that dies, with or without a checkpoint."""

    def die() -> None:
        with open_stage(out, "policy", work.inputs, work.settings):
            if checkpoint:
                folder = out / RESUME / "checkpoint-2"
                folder.mkdir(parents=True)
                (folder / WHOLE).touch()
            raise Died

    with pytest.raises(Died):
        die()
    yield


def work(launch: dict[str, Any], **settings: Any) -> TrainingIdentity:
    return TrainingIdentity({"model": "m"}, {"steps": 4, "seed": 0, **settings, **launch}, "")


def test_a_checkpoint_of_other_processes_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "policy"
    zero = {"processes": 8, "accelerate": {"distributed_type": "DEEPSPEED"}}
    with unfinished(out, work(TWO), checkpoint=True):
        refuse_other_launch(out, work(TWO))
        refuse_other_launch(out, work({}, seed=1))  # other work, which begins anew
        with pytest.raises(
            UserError, match=r"training by 2 processes, which 1 process cannot go on with; launch it as"
        ):
            refuse_other_launch(out, work({}))
        with pytest.raises(UserError, match=r"by 2 processes, which 8 processes of DEEPSPEED cannot go on with"):
            refuse_other_launch(out, work(zero))
        refuse_other_launch(out, work({}, steps=9))
        with pytest.raises(UserError, match="2 processes"):
            refuse_other_launch(out, work({}, steps=9), GROWING)

        def train() -> None:
            with open_training(out, "policy", work({})):
                raise AssertionError("the worker asks, too")

        with pytest.raises(UserError, match="2 processes"):
            train()
        assert (out / RESUME / "checkpoint-2" / WHOLE).exists()


def test_where_there_is_no_checkpoint_nothing_is_refused(tmp_path: Path) -> None:
    with unfinished(tmp_path / "policy", work(TWO), checkpoint=False):
        refuse_other_launch(tmp_path / "policy", work({}))


def test_other_processes_than_were_meant_are_refused() -> None:
    assert check_launch(None) == {}
    assert check_launch({}) == {}
    with pytest.raises(UserError, match=r"^2 processes were to share the training, and the launcher started 1; "):
        check_launch(TWO)
