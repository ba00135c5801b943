"""A run that dies between its last step and its result resumes there, and makes no further step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from awpo.config_training import PolicyConfig, SftConfig
from awpo.events import METRICS, Tail
from awpo.files import file_hash
from awpo.training import policy, sft

POLICY = PolicyConfig(
    steps=2,
    prompts_per_rollout=2,
    group_size=2,
    steps_per_rollout=1,
    micro_batch_size=4,
    max_completion_length=8,
    save_every=1,
)
SFT = SftConfig(steps=2, batch_size=4, save_every=1)


@pytest.mark.parametrize(("module", "train", "config"), [(sft, "train_sft", SFT), (policy, "train_policy", POLICY)])
def test_no_step_is_made_after_the_last(
    module: Any, train: str, config: Any, tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def begin(out: Path) -> None:
        getattr(module, train)(str(tiny_model), instances, out, config)

    def die(*_: Any, **__: Any) -> None:
        raise KeyError("killed")

    begin(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_trained", die)
        with pytest.raises(KeyError):
            begin(tmp_path / "cut")
    begin(tmp_path / "cut")
    assert [row["step"] for row in Tail(tmp_path / "cut" / METRICS)] == [1, 2]
    weights = [file_hash(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "cut")]
    assert weights[0] == weights[1]
