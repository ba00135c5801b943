"""How a training is started: presets, command lines, and what their launchers make of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from awpo.errors import UserError
from awpo.launch import ACCELERATE, DEFAULT, LAUNCHES, LaunchSettings, launch_presets, read_launch

GPU_PRESETS = {
    "ddp-8": "MULTI_GPU",
    "zero2-8": "DEEPSPEED",
    "zero3-8": "DEEPSPEED",
    "zero3-offload-8": "DEEPSPEED",
    "fsdp2-8": "FSDP",
}
TWINS = {"cpu-2-zero2": "zero2-8", "cpu-2-zero3": "zero3-8", "cpu-2-fsdp2": "fsdp2-8"}
JOB = Path("run", "job.json")


def test_the_presets() -> None:
    assert set(launch_presets()) == {DEFAULT, "cpu-2", *TWINS, *GPU_PRESETS}
    assert read_launch(DEFAULT) == LaunchSettings()
    for name in launch_presets():
        assert read_launch(name) == read_launch(str(LAUNCHES / f"{name}.yaml"))
        assert set(yaml.safe_load((LAUNCHES / f"{name}.yaml").read_text())) <= {"processes", "accelerate", "device"}


@pytest.mark.parametrize("name", TWINS)
def test_a_preset_of_cpus_is_that_of_gpus_but_for_device_and_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    cpu, gpu = read_launch(name), read_launch(TWINS[name])
    assert cpu == gpu.model_copy(update={"processes": 2, "device": "cpu"})
    assert cpu.effect() == gpu.effect() | {"processes": 2}
    environment = cpu.environment(1)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DS_ACCELERATOR"]) == ("", "cpu")
    assert gpu.environment(1)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "DS_ACCELERATOR" not in gpu.environment(1)


def test_one_process_is_started_as_it_is() -> None:
    assert LaunchSettings().command("awpo.training.sft", JOB) == [
        *(sys.executable, "-m", "awpo.worker", "awpo.training.sft", str(JOB))
    ]


def test_several_are_started_by_torchrun_as_it_reads_its_options() -> None:
    from torch.distributed.run import config_from_args, parse_args

    python, *rest = read_launch("cpu-2").command("awpo.training.sft", JOB)
    assert (python, *rest[:3]) == (sys.executable, "-m", "awpo.ranks", "torchrun")
    arguments = parse_args(rest[3:])
    assert arguments.module
    assert (arguments.training_script, arguments.training_script_args) == (
        "awpo.worker",
        ["awpo.training.sft", str(JOB)],
    )
    assert arguments.standalone, "a port of its own, so that several runs stand beside each other"
    config, _, _ = config_from_args(arguments)
    assert (config.nproc_per_node, config.max_nodes, config.max_restarts) == (2, 1, 0)


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_gpu_preset_is_started_by_accelerate_as_it_reads_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    settings = read_launch(name)
    _, *rest = settings.command("awpo.training.policy", JOB)
    assert rest[:3] == ["-m", "awpo.ranks", "accelerate"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(rest[3:]))
    assert arguments.module
    assert (arguments.training_script, arguments.training_script_args) == (
        "awpo.worker",
        ["awpo.training.policy", str(JOB)],
    )
    assert (arguments.num_processes, arguments.num_machines, arguments.main_process_port) == (8, 1, 0)
    assert defaults.distributed_type == GPU_PRESETS[name]
    kinds = {"MULTI_GPU": "multi_gpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp"}
    assert [kind for kind in kinds.values() if getattr(arguments, kind)] == [kinds[GPU_PRESETS[name]]]
    assert not arguments.cpu
    if name.startswith("zero"):
        assert arguments.zero_stage == int(name[4])
    if name == "fsdp2-8":
        assert int(arguments.fsdp_version) == 2


def test_what_the_result_depends_on() -> None:
    """Nothing for one process: what was trained before there were presets is not trained again."""
    assert read_launch(DEFAULT).effect() == {}
    assert read_launch("cpu-2").effect() == {"processes": 2}
    zero = read_launch("zero3-8").effect()
    assert zero["processes"] == 8
    assert zero["accelerate"]["deepspeed_config"]["zero_stage"] == 3
    assert "num_processes" not in zero["accelerate"]
    assert read_launch("zero2-8").effect() != zero


def test_another_python_and_a_config_of_ones_own(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text((ACCELERATE / "zero3.yaml").read_text())
    preset = tmp_path / "launch.yaml"
    preset.write_text(yaml.safe_dump({"processes": 4, "accelerate": str(config), "interpreter": sys.executable}))
    command = read_launch(str(preset)).command("awpo.training.policy", JOB)
    assert command[0] == sys.executable
    assert command[command.index("--config_file") + 1] == str(config)
    assert command[command.index("--num_processes") + 1] == "4"


def test_another_python_finds_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    root = str(LAUNCHES.parents[2])
    found = LaunchSettings(interpreter=sys.executable).environment(1)["PYTHONPATH"].split(os.pathsep)
    assert found == [root, str(tmp_path)]
    assert LaunchSettings().environment(1)["PYTHONPATH"] == str(tmp_path)


def test_threads_are_shared_out() -> None:
    one, two = LaunchSettings(), LaunchSettings(processes=2)
    assert [one.threads_of_each(16, asked) for asked in (1, 2)] == [1, 2]
    assert [two.threads_of_each(cores, 1) for cores in (1, 2, 5, 16)] == [1, 1, 2, 8]
    environment = two.environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == os.environ.get("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("processes: 0", r"processes: must be at least 1, not 0"),
        ("processes: two", r"processes: must be a whole number, not 'two'"),
        ("proceses: 2", r"unknown key 'proceses'; did you mean 'processes'\?"),
        ("{processes: 8, accelerate: zero4}", r"accelerate: no config 'zero4'; did you mean 'zero3'\?"),
        ("{processes: 8, accelerate: ./none.yaml}", r"accelerate: no config './none.yaml'; known: cpu, ddp, "),
        ("{processes: 2, accelerate: cpu}", r"of CPUs \(use_cpu\), where accelerate starts one process and not 2; le"),
        ("interpreter: /no/python", r"interpreter: /no/python is no program; give the path of a Python"),
        ("device: gpu", r"device: must be 'auto' or 'cpu', not 'gpu'"),
        ("- 2", r"must hold a mapping of keys to values"),
    ],
)
def test_a_bad_preset_is_one_clear_line(values: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(values)
    with pytest.raises(UserError, match=told) as caught:
        read_launch(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no launch preset 'cpu2'; did you mean 'cpu-2'\?"):
        read_launch("cpu2")
    with pytest.raises(
        UserError, match=r"no launch preset 'xyz'; presets: cpu, cpu-2, cpu-2-fsdp2, .*a YAML file's path"
    ):
        read_launch("xyz")


@pytest.mark.parametrize("name", ["cpu-2", *GPU_PRESETS])
def test_launchers_of_several_machines_read_where_they_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    from torch.distributed.run import config_from_args, parse_args

    for variable, value in {"AWPO_MACHINES": "3", "AWPO_MACHINE_RANK": "2", "MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(variable, value)
    settings = read_launch(name)
    _, _, _, launcher, *options = settings.command("awpo.training.policy", JOB)
    if launcher == "torchrun":
        arguments = parse_args(options)
        config, _, _ = config_from_args(arguments)
        assert (config.min_nodes, config.max_nodes) == (3, 3)
    else:
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
        assert (arguments.num_processes, arguments.num_machines) == (24, 3)
        arguments.deepspeed_fields_from_accelerate_config = ""
        (prepare_deepspeed_cmd_env if arguments.use_deepspeed else prepare_multi_gpu_env)(arguments)
    assert int(arguments.nproc_per_node) == settings.processes
    assert (int(arguments.nnodes), int(arguments.node_rank)) == (3, 2)
    assert (arguments.master_addr, int(arguments.master_port)) == ("first", 29500)
