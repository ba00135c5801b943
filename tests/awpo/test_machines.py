"""Several machines that share a training, of which this is one: what the environment says."""

from __future__ import annotations

import json
import socket

import pytest

from awpo.errors import UserError
from awpo.launch import read_launch
from awpo.machines import Board, MeetingPoint, machine_rank, machines_given, meeting_point
from tests.awpo.test_processes import wait_until

NAMES = ("AWPO_MACHINES", "AWPO_MACHINE_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_STEP_ID", "SLURM_NNODES", "SLURM_NODEID")


@pytest.fixture(autouse=True)
def _nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def test_one_machine_needs_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (machines_given(), machine_rank()) == (None, 0)
    monkeypatch.setenv("SLURM_NNODES", "2")  # of a job in which nothing has been started on them
    assert machines_given() is None
    assert read_launch("cpu-2").machines == 1


@pytest.mark.parametrize("names", [NAMES[:2], SLURM[1:]])
def test_who_started_them_says_which_machine_this_is(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip((*names, "SLURM_STEP_ID", "MASTER_ADDR"), ("3", "2", "0", "first"), strict=True):
        monkeypatch.setenv(name, value)
    assert (machines_given(), machine_rank()) == (3, 2)
    assert meeting_point(3) == MeetingPoint(2, "first", 29500)
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert meeting_point(3).port == 1234
    settings = read_launch("zero3-8")
    assert (settings.machines, settings.total, settings.effect()["processes"]) == (3, 24, 24)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"MASTER_ADDR": "first"}, "shared by 2 machines, and AWPO_MACHINE_RANK is not set; give each machine its num"),
        ({"AWPO_MACHINE_RANK": "1"}, "MASTER_ADDR is not set; .* the name of machine 0 as MASTER_ADDR"),
        ({"AWPO_MACHINE_RANK": "2", "MASTER_ADDR": "first"}, "AWPO_MACHINE_RANK = 2, and there are 2 machines, numb"),
        ({"AWPO_MACHINE_RANK": "one", "MASTER_ADDR": "first"}, "AWPO_MACHINE_RANK = 'one' is no whole number from 0 o"),
        ({"AWPO_MACHINE_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "0"}, "MASTER_PORT = '0' is no whole numb"),
    ],
)
def test_what_is_missing_is_told(given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        meeting_point(2)


def test_who_came_and_said_no_number_yet_is_let_go() -> None:
    """The work ends while another machine is still coming."""
    board = Board(2, port=0)
    address = ("127.0.0.1", board._server.getsockname()[1])
    with socket.create_connection(address, timeout=10) as other, other.makefile() as lines:
        assert wait_until(lambda: board._connections, 10)
        board.close()
        assert json.loads(next(lines)) == {"end": True}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)
