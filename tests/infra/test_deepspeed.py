"""DeepSpeed itself reads the configs that accelerate's launcher makes of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from awpo.launch import read_launch

pytest.importorskip("deepspeed", reason="no DeepSpeed; make install-deepspeed")
# What transformers' trainer puts in the place of "auto", here of eight processes.
TRAINER = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
}


def deepspeed_config(preset: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a process that was started by the preset gives to DeepSpeed."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = read_launch(preset).command("awpo.training.policy", Path("job.json"))
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command[4:]))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, environment = prepare_deepspeed_cmd_env(arguments)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config: dict[str, Any] = DeepSpeedPlugin().deepspeed_config
    return {key: TRAINER.get(key, value) if value == "auto" else value for key, value in config.items()}


@pytest.mark.parametrize(
    ("preset", "stage", "offload"),
    [
        ("zero2-8", 2, "none"),
        ("zero3-8", 3, "none"),
        ("zero3-offload-8", 3, "cpu"),
        ("cpu-2-zero2", 2, "none"),
        ("cpu-2-zero3", 3, "none"),
    ],
)
def test_deepspeed_reads_a_preset(preset: str, stage: int, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    given = deepspeed_config(preset, monkeypatch)
    assert "auto" not in given.values()
    config = DeepSpeedConfig(given)
    zero = config.zero_config
    assert (config.zero_optimization_stage, config.gradient_clipping) == (stage, 1.0)
    found = [str(part.device) if part else "none" for part in (zero.offload_param, zero.offload_optimizer)]
    assert found == [offload, offload]
    assert zero.gather_16bit_weights_on_model_save == (stage == 3), "else a saved model would be empty"


def test_deepspeed_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = deepspeed_config("zero3-8", monkeypatch)
    given["zero_optimization"]["stage"] = 5
    with pytest.raises(ValueError, match="stage"):
        DeepSpeedConfig(given)
