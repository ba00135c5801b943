"""`awpo methods`: complete, and readable on a narrow screen."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from awpo.methods import METHODS, Method
from flows.cli import app


def methods(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": str(columns)})


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_method_is_listed_with_its_settings_and_sources() -> None:
    done = methods()
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    starts = [line.split()[0] for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert [name for name in starts if name in METHODS] == list(METHODS)
    listed = words(done.stdout)
    for method in METHODS.values():
        assert method.summary in listed
        assert all(f"source: {source}" in listed for source in method.sources)
    assert "gate correlation, c_min 0.5, mix_coefficient 1, difficulty parabola, difficulty_floor 0.1" in listed
    assert "epsilon_high 0.28" in listed


@pytest.mark.parametrize("name", METHODS)
def test_one_method_is_told_whole(name: str) -> None:
    done = methods(name)
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    told, method = words(done.stdout), METHODS[name]
    assert told.startswith(f"{name} what it does ")
    assert method.reading.partition(";")[0] in told
    if method.trains:
        for key in Method.model_fields.keys() - {"name", "summary", "sources", "reading", "stages"}:
            assert f" {key} " in told
    assert (" (0.05) " in told) == (name != "awpo_low_variance" and method.trains)  # tau, of another gate


def test_one_method_as_json_and_a_name_that_is_none() -> None:
    assert json.loads(methods("awpo", "--json").stdout) == METHODS["awpo"].to_json()
    done = methods("awpo_sotf")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: no method 'awpo_sotf'; did you mean 'awpo_soft'?\n"
