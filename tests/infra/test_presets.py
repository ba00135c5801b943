"""Every preset is one that the code it is for accepts."""

import re
from pathlib import Path

import pytest

from awpo.config import EvaluationConfig
from awpo.config_training import PolicyConfig, SftConfig
from awpo.launch import read_launch
from awpo.methods import get_method
from awpo.models import preset_names, resolve_model
from awpo.settings import read_yaml
from awpo.training.memory import sharding_of
from awpo.training.model_shapes import shape_of
from awpo.training.plan import GPUS, Gpus, Plan

INFRA = Path(__file__).resolve().parents[2] / "infra"
SECTIONS = {"sft": SftConfig, "policy": PolicyConfig, "evaluation": EvaluationConfig}
HUB = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b-instruct-2507", "qwen3-8b", "qwen3-14b", "qwen3-32b")


def test_the_model_presets():
    assert set(preset_names()) >= {"embedded-1m", "embedded-3m", "smollm2-135m", *HUB}


@pytest.mark.parametrize("name", preset_names())
def test_a_model_preset_is_read(name):
    values = read_yaml(INFRA / "presets" / "models" / f"{name}.yaml")
    assert set(values) <= {"kind", "hub_id", "revision", "thinking", "launch", *SECTIONS}
    assert resolve_model(name).kind == values["kind"]
    for section, model in SECTIONS.items():
        model.read(values.get(section, {}), f"{name}: {section}")


@pytest.mark.parametrize("name", HUB)
def test_a_hub_model_trains_with_the_published_settings(name):
    choice = resolve_model(name)
    assert choice.kind == "hub"
    assert choice.location.startswith("Qwen/Qwen3-")
    assert choice.revision
    policy = PolicyConfig.read(choice.settings["policy"], name)
    assert (policy.prompts_per_rollout, policy.group_size, policy.steps_per_rollout) == (512, 4, 4)
    assert (policy.learning_rate, policy.temperature) == (1e-6, 1.0)
    assert (policy.max_prompt_length, policy.max_completion_length) == (2048, 1024)


def test_one_preset_trains_adapters():
    full, lora = (resolve_model(name).settings for name in ("qwen3-8b", "qwen3-8b-lora"))
    for section, model in (("sft", SftConfig), ("policy", PolicyConfig)):
        config = model.read(lora[section], section)
        assert config.lora.target_modules == "all-linear"
        # But for adapters and learning rate it is the preset of full training.
        same = {**lora[section], "learning_rate": full[section]["learning_rate"]}
        del same["lora"]
        assert same == full[section]


@pytest.mark.parametrize("name", [*HUB, "qwen3-8b-lora"])
def test_a_hub_model_fits_on_the_gpus_that_its_preset_names(name):
    first = (INFRA / "presets" / "models" / f"{name}.yaml").read_text("utf-8").splitlines()[0]
    named = re.search(r"on (\d+) GPUs of (\d+) GiB", first)
    assert named, first
    choice = resolve_model(name)
    launch = read_launch(choice.launch)
    method = get_method("awpo")
    config = PolicyConfig.read(choice.settings["policy"], name)
    found = Plan(
        shape_of(choice), config, method, launch, sharding_of(launch), Gpus(*map(int, named.groups())), GPUS["h100"]
    )
    assert found.fits, found.obstacles
    assert found.processes == found.gpus.count
    # Supervised fine-tuning holds no more at once: rows as long, and of them no more.
    sft = SftConfig.read(choice.settings["sft"], name)
    assert sft.max_length <= config.max_prompt_length + config.max_completion_length
    assert sft.micro_batch_size <= config.micro_batch_size
    assert sft.batch_size % (launch.processes * sft.micro_batch_size) == 0


@pytest.mark.parametrize(
    ("name", "distributed", "processes"),
    [
        ("cpu", "NO", 1),
        ("ddp", "MULTI_GPU", 8),
        ("zero2", "DEEPSPEED", 8),
        ("zero3", "DEEPSPEED", 8),
        ("zero3-offload", "DEEPSPEED", 8),
        ("fsdp2", "FSDP", 8),
    ],
)
def test_an_accelerate_config_is_read(name, distributed, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(INFRA / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type == distributed
    assert config.num_processes == processes
    assert config.use_cpu == (name == "cpu")
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[4])
    if name.startswith("zero3"):  # or a saved model is empty
        assert config.deepspeed_config["zero3_save_16bit_model"] is True
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
