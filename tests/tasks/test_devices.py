"""Each piece of work gets GPUs of its own, among all processes of a machine; no GPU is needed to see that."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from awpo.errors import UserError
from awpo.launch import LaunchSettings, read_launch
from tasks.devices import check_machine, own_devices, visible_devices

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("told", "expected"),
    [("0,1,2", ["0", "1", "2"]), ("3", ["3"]), ("", []), ("-1", []), ("0,-1,2", ["0"]), ("GPU-ab/c", ["GPU-ab/c"])],
)
def test_the_devices_are_those_that_cuda_sees(told: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert visible_devices() == expected


def test_work_at_once_has_different_devices_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-x/y")
    with own_devices(1) as first, own_devices(2) as second:
        assert first == {"CUDA_VISIBLE_DEVICES": "4"}
        assert second == {"CUDA_VISIBLE_DEVICES": "5,GPU-x/y"}
        with own_devices(1) as shared:
            assert shared == {}, "more processes than cards share them all"
    with own_devices(3) as again:
        assert again == {"CUDA_VISIBLE_DEVICES": "4,5,GPU-x/y"}


def test_too_few_free_devices_hold_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with own_devices(1), own_devices(2) as both:
        assert both == {}
        with own_devices(1) as other:
            assert other == {"CUDA_VISIBLE_DEVICES": "1"}


def test_on_a_cpu_and_for_work_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with own_devices(1) as found:
        assert found == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with own_devices(0) as found:
        assert found == {}


def test_a_killed_process_holds_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = (
        "import time\nfrom tasks.devices import own_devices\n"
        "with own_devices(1) as found: print(found, flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "{'CUDA_VISIBLE_DEVICES': '0'}\n"
    with own_devices(1) as found:
        assert found == {"CUDA_VISIBLE_DEVICES": "1"}
    other.kill()
    other.wait()
    with own_devices(2) as found:
        assert found == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_launch_that_shares_a_model_on_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(UserError, match=r"^the launch preset takes 8 GPUs of a machine, and this one has 0; choose a"):
        check_machine(read_launch("fsdp2-8"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # GPUs without device files
    check_machine(read_launch("fsdp2-8"))
    check_machine(read_launch("cpu-2-fsdp2"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_machine(LaunchSettings(processes=8))  # torchrun's processes go without GPUs
    check_machine(LaunchSettings(processes=8, accelerate="fsdp2", interpreter=sys.executable))


def test_a_launch_by_deepspeed_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="takes DeepSpeed, which is not there; run `make install-deepspeed`"):
        check_machine(read_launch("cpu-2-zero3"))
    check_machine(read_launch("cpu-2-fsdp2"))
