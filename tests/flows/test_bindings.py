"""Servers listen on this machine alone, as the kernel tells it."""

from __future__ import annotations

import inspect
import ipaddress
import os
from pathlib import Path

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest

from awpo.serving import server, vllm
from flows.cli import serve
from flows.prefect_server import HOST, answers, server_environment, temporary_server
from flows.servers import Addresses, mlflow_command


def listening(port: int) -> set[str]:
    """The addresses that some process of this machine listens at on that port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, told = local.partition(":")
            if state == "0A" and int(told, 16) == port:
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


@pytest.mark.slow
@pytest.mark.servers
def test_a_temporary_prefect_server_listens_on_loopback_alone() -> None:
    before = os.environ.get("PREFECT_API_URL")
    with temporary_server() as url:
        assert answers(f"{url}/health")
        assert listening(int(url.split(":")[2].partition("/")[0])) == {"127.0.0.1"}
    assert os.environ.get("PREFECT_API_URL") == before


def test_all_others_are_told_to() -> None:
    assert ipaddress.ip_address(HOST).is_loopback
    assert server_environment(4200)["PREFECT_SERVER_API_HOST"] == HOST
    command = mlflow_command(Addresses(4200, 5000))
    assert command[command.index("--host") + 1] == HOST
    for start in (server.serve_model, vllm.serve_model, serve):
        assert ipaddress.ip_address(inspect.signature(start).parameters["host"].default).is_loopback
