"""Several machines that share a training: which this is and where they meet, as who started them says.

Every machine is given the same launch preset, and in its environment `AWPO_MACHINES`, its own number `AWPO_MACHINE_RANK`
(0, 1, ...), and `MASTER_ADDR` and `MASTER_PORT` of machine 0. Within a step of Slurm (`srun`), the first two are
`SLURM_NNODES` and `SLURM_NODEID` where they are not set.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.errors import UserError

MACHINES, MACHINE_RANK = "AWPO_MACHINES", "AWPO_MACHINE_RANK"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
# Of a step of Slurm; outside of one, SLURM_NNODES is of machines that nothing has been started on.
STEP = "SLURM_STEP_ID"
STANDARD_PORT = 29500


@dataclass(frozen=True)
class MeetingPoint:
    """This machine's number among all, and where processes of all machines meet: at a port of machine 0."""

    rank: int
    address: str
    port: int


def machines_given() -> int | None:
    """How many machines share the work; None where nobody says. Raises UserError where it is no number from 1 on."""
    return _number(MACHINES, "SLURM_NNODES", least=1)


def machine_rank() -> int:
    """The number of this machine, 0 where nobody says another. Raises UserError where it is no number from 0 on."""
    return _number(MACHINE_RANK, "SLURM_NODEID", least=0) or 0


def meeting_point(machines: int) -> MeetingPoint:
    """Raises UserError where the environment lacks a part of it, or numbers this machine beyond `machines`."""
    rank, address = _number(MACHINE_RANK, "SLURM_NODEID", least=0), os.environ.get(ADDRESS)
    if rank is None or not address:
        missing = MACHINE_RANK if rank is None else ADDRESS
        raise UserError(
            f"the training is shared by {machines} machines, and {missing} is not set; give each machine its number "
            f"from 0 on as {MACHINE_RANK}, and the name of machine 0 as {ADDRESS}"
        )
    if rank >= machines:
        raise UserError(f"{MACHINE_RANK} = {rank}, and there are {machines} machines, numbered from 0 on")
    return MeetingPoint(rank, address, _number(PORT, least=1) or STANDARD_PORT)


def _number(name: str, of_slurm: str = "", *, least: int) -> int | None:
    if name not in os.environ and of_slurm and STEP in os.environ:
        name = of_slurm
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name} = {text!r} is no whole number from {least} on")
    return int(text)


class Board:
    """Machine 0's side of the work that it shares: what the others are to start, and how theirs ended.

    It listens at the port after `MASTER_PORT`, where the others stay connected (`awpo.machine_help`); lines of JSON go
    both ways. A machine whose connection breaks has failed.
    """

    def __init__(self, machines: int, port: int) -> None:
        self.machines = machines
        self._connections: list[socket.socket] = []
        self._others: dict[int, socket.socket] = {}
        self._work: dict[str, Any] = {"number": 0}
        self._under_way = self._closed = False
        self._ended: set[int] = set()
        self._problem = ""
        self._changed = threading.Condition()
        self._server = socket.create_server(("", port), reuse_port=False)
        threading.Thread(target=self._accept, name="machines", daemon=True).start()

    def start(self, module: str, job_file: Path) -> None:
        """Has all others start their processes, those that are not there yet when they come."""
        with self._changed:
            self._work = {
                "number": self._work["number"] + 1,
                "module": module,
                "job": str(job_file.absolute()),
            }
            self._under_way, self._problem = True, ""
            self._ended.clear()
            self._tell(self._work, self._others.values())

    def stop(self, patience: float) -> None:
        """Has all others end what they do for the work that is under way, after `patience` seconds to end by itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem or len(self._ended) == self.machines - 1, patience)
            self._under_way = False
            self._tell({"stop": True}, self._others.values())

    def problem(self) -> str:
        """What has gone wrong on another machine; empty where nothing has."""
        with self._changed:
            return self._problem

    def close(self) -> None:
        """Lets the others go, also those that have come and not yet said their number: there will be no more work."""
        with self._changed:
            self._closed = True
            self._tell({"end": True}, self._connections)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # closing alone lets a waiting `accept` take one more
        self._server.close()

    def _tell(self, message: dict[str, Any], connections: Iterable[socket.socket]) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                with self._changed:
                    self._connections.append(connection)
                    if self._closed:
                        self._tell({"end": True}, [connection])
                threading.Thread(target=self._listen, args=(connection,), name="machine", daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        number = -1
        with connection, contextlib.suppress(OSError, ValueError, KeyError), connection.makefile() as lines:
            number = int(json.loads(next(lines, "{}"))["rank"])
            with self._changed:
                self._others[number] = connection
                if self._under_way:
                    connection.sendall(json.dumps(self._work).encode() + b"\n")
            for line in lines:
                told = json.loads(line)
                with self._changed:
                    if told["number"] != self._work["number"] or not self._under_way:
                        continue  # of work that was stopped
                    self._ended.add(number)
                    if told["code"] and not self._problem:
                        self._problem = f"the processes of machine {number} ended with code {told['code']}"
                    self._changed.notify_all()
        with self._changed:
            self._connections.remove(connection)
            if self._others.get(number) is connection:
                del self._others[number]
                if self._under_way and number not in self._ended and not self._problem:
                    self._problem = f"machine {number} is gone"
            self._changed.notify_all()


_board: list[Board] = []


@contextmanager
def leading(machines: int) -> Iterator[None]:
    """Here machine 0 has the others take part in all work that is launched on `machines`. Of one machine, nothing.

    Raises UserError where the environment doesn't say where machines meet.
    """
    if machines == 1:
        yield
        return
    board = Board(machines, meeting_point(machines).port + 1)
    _board.append(board)
    try:
        yield
    finally:
        _board.remove(board)
        board.close()


def board() -> Board | None:
    """The board of the machine that leads others; None where none does."""
    return _board[-1] if _board else None
