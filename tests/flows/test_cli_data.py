"""`awpo data inspect`, and the options of `awpo data decompose`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from awpo.artifacts import open_stage
from flows.cli import app

COMMIT = "0" * 40


def awpo(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    other = {"name": "other_tool", "parameters": {"type": "object", "properties": {}}}
    rows = []
    for number in range(12):
        call = {"function": {"name": "f", "arguments": {"city": number if number == 3 else f"City {number}"}}}
        messages = [{"role": "user", "content": f"Question {number}"}, {"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": "ok"}, {"role": "assistant", "content": "Done."}]
        rows.append(json.dumps({"id": str(number), "split": "train", "messages": messages, "tools": [tool, other]}))
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_inspect_shows_instances_and_counts(source: Path) -> None:
    done = awpo("inspect", source, "--number", "2")
    assert done.exit_code == 0, done.output
    assert done.output.count("of dialogue") == 2
    assert "24 instances, 0 with a rationale" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    only = awpo("inspect", source, "--kind", "reply", "--number", "1")
    assert "openai · reply · step 2 of 2 · train" in only.output
    assert "12 instances" in only.output


def test_inspect_writes_a_page(source: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = awpo("inspect", source, "--html", page)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"in {page}"
    assert "Question 0" in page.read_text("utf-8")


def test_inspect_prints_its_counts_as_json(source: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = awpo("inspect", source, "--kind", "call", "--html", page, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {
        "instances": 12,
        "with_rationale": 0,
        "source": {"openai": 12},
        "kind": {"call": 12},
        "split": {"train": 12},
        "depth": {"1": 12},
        "length": {"500": 12},
        "offered": {"2": 12},
        "called": {"f": 12},
        "rejected": {},
        "html": str(page),
    }
    assert page.exists()


def test_inspect_of_a_stage_without_instances_says_so(tmp_path: Path) -> None:
    with open_stage(tmp_path / "result", "evaluation", {}, {}) as stage:
        (stage.folder / "rows.jsonl").write_text("{}")
        stage.finish()
    done = awpo("inspect", tmp_path / "result")
    assert done.exit_code == 2
    assert "is the result of the stage 'evaluation', which holds no instances" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "cal"], "unknown kind 'cal'; known: call, reply, call+reply"),
        (["--source", "xlam"], "holds no instance of source xlam"),
        (["--kind", "call+reply"], "holds no instance of kind call+reply"),
        (["--format", "opnai"], "did you mean 'openai'?"),
    ],
)
def test_inspect_says_in_one_line_what_is_wrong(source: Path, options: list[str], said: str) -> None:
    done = awpo("inspect", source, *options)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [["inspect"], ["decompose", "--out", "OUT"]])
@pytest.mark.parametrize(
    ("name", "said"), [("hub:a/b", "names no revision"), ("hub:a/b@main", "can move"), ("nowhere", "does not exist")]
)
def test_sources_that_cannot_be_read(tmp_path: Path, command: list[str], name: str, said: str) -> None:
    done = awpo(*(str(tmp_path / "out") if part == "OUT" else part for part in command), name)
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "out").exists()


def test_decompose_drops_and_masks_when_asked(source: Path, tmp_path: Path) -> None:
    def counts(*options: str) -> dict[str, object]:
        done = awpo("decompose", source, "--out", tmp_path / f"out{len(options)}{options[-1:]}", "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.output.splitlines()[-1])

    kept = counts()
    assert kept["invalid_calls"] == {"openai": {"wrong type": 1}}
    assert (kept["dialogues"], kept["dialogues_masked"]) == (12, {})
    assert counts("--invalid-calls", "drop")["dialogues"] == 11
    masked = counts("--mask", "1", "--irrelevance", "1", "--seed", "3")
    assert masked["dialogues_masked"] == {"functions": 12, "irrelevance": 12}
    assert masked["instances"] == 12


def test_decompose_says_what_it_could_not_understand(tmp_path: Path) -> None:
    functions = json.dumps([{"name": "Get It", "parameters": {"type": "dict", "properties": {"a": {"type": "int"}}}}])
    rows = []
    for text in ("[Get It(a=Rome)]", "[Get It(a='1')]", "[Get It(a=1)]", "[Get It(a=Paris)]"):
        turns = [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": text}]
        rows.append(json.dumps({"system": f"A list of functions: {functions}", "conversations": turns}))
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(rows))
    done = awpo("decompose", path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    start = lines.index(f"rows that are not used, one of each reason (all in {tmp_path / 'out' / 'rejected.jsonl'}):")
    assert lines[start + 1 : start + 4] == [
        "  a call that cannot be read: data.jsonl row 0, turn 1, character 10: 'Rome' is no literal",
        f"calls that don't fit their schema, one of each reason (all in {tmp_path / 'out' / 'invalid_calls.jsonl'}):",
        "  toolace: wrong type: data.jsonl row 1, Get It, a, integer expected, not '1'",
    ]


def test_a_wrong_setting_is_one_line(source: Path, tmp_path: Path) -> None:
    done = awpo("decompose", source, "--out", tmp_path / "out", "--invalid-calls", "mend")
    assert done.exit_code == 2
    assert "invalid_calls" in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_select_takes_what_the_file_says(source: Path, tmp_path: Path) -> None:
    assert awpo("decompose", source, "--out", tmp_path / "instances").exit_code == 0
    config = tmp_path / "select.yaml"
    config.write_text("mixture: {dialogues: 5}\n")
    done = awpo("select", tmp_path / "instances", "--out", tmp_path / "out", "--config", config, "--json")
    assert done.exit_code == 0, done.output
    counts = json.loads(done.output.splitlines()[-1])
    assert counts["mixture"] == {"openai · 2-3": 5}
    assert (counts["instances_read"], counts["instances"]) == (24, 10)
    config.write_text("mixtures: {dialogues: 5}\n")
    wrong = awpo("select", tmp_path / "instances", "--out", tmp_path / "out", "--config", config)
    assert wrong.exit_code == 2
    assert "did you mean 'mixture'" in wrong.output
