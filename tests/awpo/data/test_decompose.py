"""From dialogues to instances, and the stage that does it for a file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import IN_PROGRESS, read_manifest
from awpo.data import decompose as decompose_module
from awpo.data import sources
from awpo.data.decompose import decompose, decompose_source, invalid_calls
from awpo.data.settings import DecomposeConfig
from awpo.data.sources import RowError
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.types import Dialogue, Instance, Message, Tool, ToolCall

TOOLS = (
    Tool("add", "Adds.", {"type": "object", "properties": {}}),
    Tool("now", "Time.", {"type": "object", "properties": {}}),
)
ADD, NOW = ToolCall("add", {"a": 1}), ToolCall("now", {})


def user(text: str = "Hi") -> Message:
    return Message("user", text)


def step(content: str | None = None, *calls: ToolCall, thought: str | None = None) -> Message:
    return Message("assistant", content, calls, thought)


def result(text: str = "ok") -> Message:
    return Message("tool", text)


def dialogue(*messages: Message, name: str = "d", split: Any = None) -> Dialogue:
    return Dialogue(name, "s", TOOLS, messages, split)


def test_every_assistant_step_is_an_instance() -> None:
    messages = (
        Message("system", "Be brief."),
        user("1 + 1?"),
        step(None, ADD, thought="add fits."),
        result("2"),
        step("It is 2.", thought="The result is here."),
        user("And the time?"),
        step("One moment.", NOW),
        result("7:30"),
        step("7:30."),
    )
    instances = decompose(dialogue(*messages, split="validation"))
    bare = tuple(replace(message, thought=None) for message in messages)
    assert [item.target for item in instances] == [bare[2], bare[4], bare[6], bare[8]]
    assert [item.prompt for item in instances] == [bare[:2], bare[:4], bare[:6], bare[:8]]
    assert [item.rationale for item in instances] == ["add fits.", "The result is here.", None, None]
    assert [item.kind for item in instances] == ["call", "reply", "call+reply", "reply"]
    assert [(item.step, item.steps) for item in instances] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert {(item.source, item.dialogue_id, item.split) for item in instances} == {("s", "d", "validation")}
    assert all(item.tools == TOOLS for item in instances)
    assert len({item.id for item in instances}) == 4


def test_the_last_step_only() -> None:
    (instance,) = decompose(dialogue(user(), step("a"), user(), step(None, ADD, thought="t")), last_step_only=True)
    assert (instance.step, instance.steps, instance.rationale) == (1, 2, "t")
    assert instance.prompt == (user(), step("a"), user())


def test_thoughts_never_reach_a_prompt_or_a_target() -> None:
    thought = "secret"
    for instance in decompose(dialogue(user(), step(None, ADD, thought=thought), result(), step("x", thought=thought))):
        assert all(message.thought is None for message in (*instance.prompt, instance.target))


@pytest.mark.parametrize(
    ("messages", "merged"),
    [
        ((user(), step("Wait.", thought="a"), step(None, ADD, thought="b"), result()), step("Wait.", ADD)),
        ((user(), step(None, ADD), step(None, NOW), result(), result()), step(None, ADD, NOW)),
        ((user(), step("Wait.", ADD), step(None, NOW), result()), step("Wait.", ADD, NOW)),
    ],
)
def test_one_step_written_as_several_messages(messages: tuple[Message, ...], merged: Message) -> None:
    (instance,) = decompose(dialogue(*messages))
    assert instance.target == merged
    assert instance.rationale in ("a\nb", None)


def test_what_follows_the_last_step_is_let_pass() -> None:
    assert len(decompose(dialogue(user(), step("a"), user("bye")))) == 1
    assert len(decompose(dialogue(user(), step(None, ADD)))) == 1


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((), "no assistant step"),
        ((user(),), "no assistant step"),
        ((step("a"), user()), "an assistant step before any user message"),
        ((Message("system", "x"), step("a")), "an assistant step before any user message"),
        ((user(), Message("system", "x"), step("a")), "a system message in the middle"),
        ((user(), step("a"), step("b")), "two replies in a row"),
        ((user(), step(None, ADD), step("b")), "two replies in a row"),
        ((user(), step(None)), "an empty assistant step"),
        ((user(), step(" \n")), "an empty assistant step"),
        ((user(), result(), step("a")), "a tool result without a call"),
        ((user(), step("a"), result(), step("b")), "a tool result without a call"),
        ((user(), step(None, ADD), result(), result(), step("b")), "a tool result without a call"),
        ((user(), step(None, ADD), user(), step("b")), "a call without a result"),
        ((user(), step(None, ToolCall("Add", {}))), "a call of a tool that is not offered"),
        ((user(), step(None, ToolCall("sub", {})), result(), step("b")), "a call of a tool that is not offered"),
    ],
)
def test_dialogues_that_are_refused(messages: tuple[Message, ...], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        decompose(dialogue(*messages))
    assert caught.value.reason == reason


# The stage.


def row(name: str, text: str = "a", **fields: Any) -> str:
    messages = [user(name).to_json(), step(text, thought="t").to_json()]
    return json.dumps({"id": name, "messages": messages, "tools": [], **fields})


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def test_counts_add_up_and_every_rejected_row_is_listed(tmp_path: Path) -> None:
    source = write(
        tmp_path / "data.jsonl",
        row("a", split="train"),
        "{broken",
        row("b", source="mine"),
        row("a", "other", split="train"),  # the same id, another dialogue
        row("b", source="mine"),
        "7",
        json.dumps({"messages": [{"role": "user", "content": "\N{SNOWMAN}"}]}),
        row("c"),
    )
    manifest = decompose_source(source, tmp_path / "out")
    assert manifest.counts == {
        "rows_read": 8,
        "dialogues": 3,
        "instances": 3,
        "rejected": {
            "not sound JSON": 1,
            "the id of an earlier dialogue": 1,
            "the same as an earlier row": 1,
            "not an object": 1,
            "no assistant step": 1,
        },
        "invalid_calls": {},
        "dialogues_masked": {},
        "instances_by_split": {"train": 3},
        "instances_by_kind": {"reply": 3},
        "instances_by_source": {"mine": 1, "openai": 2},
    }
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text("utf-8").splitlines()]
    assert [(item["file"], item["row"], item["reason"]) for item in listed] == [
        ("data.jsonl", 1, "not sound JSON"),
        ("data.jsonl", 3, "the id of an earlier dialogue"),
        ("data.jsonl", 4, "the same as an earlier row"),
        ("data.jsonl", 5, "not an object"),
        ("data.jsonl", 6, "no assistant step"),
    ]
    assert [item.dialogue_id for item in read_instances(tmp_path / "out")] == ["a", "b", "c"]
    assert set(manifest.outputs) == {"instances-00000.parquet", "rejected.jsonl", "invalid_calls.jsonl"}


CITY = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def call_row(name: str, *arguments: dict[str, Any], source: str = "mine") -> str:
    calls = [{"function": {"name": "f", "arguments": given}} for given in arguments]
    messages = [{"role": "user", "content": name}, {"role": "assistant", "tool_calls": calls}]
    return json.dumps({"id": name, "source": source, "split": "train", "messages": messages, "tools": [CITY]})


def test_calls_that_do_not_fit_are_counted_by_source_and_reason(tmp_path: Path) -> None:
    source = write(
        tmp_path / "data.jsonl",
        call_row("a", {"city": "Rome"}),
        call_row("b", {"city": 5, "x": 1}, {}, {"city": "Rome"}),
        call_row("c", {}, source="other"),
        call_row("d", {"city": None}),
    )
    kept = decompose_source(source, tmp_path / "kept")
    expected = {
        "mine": {"unknown parameter": 1, "missing parameter": 1, "null for a value": 1},
        "other": {"missing parameter": 1},
    }
    assert kept.counts["invalid_calls"] == expected
    assert kept.counts["instances"] == 4
    listed = [json.loads(line) for line in (tmp_path / "kept" / "invalid_calls.jsonl").read_text("utf-8").splitlines()]
    assert [(item["row"], item["message"], item["tool"], item["reason"], item["where"]) for item in listed] == [
        (1, 1, "f", "unknown parameter", "x"),
        (1, 1, "f", "missing parameter", "city"),
        (2, 1, "f", "missing parameter", "city"),
        (3, 1, "f", "null for a value", "city"),
    ]
    dropped = decompose_source(source, tmp_path / "dropped", config=DecomposeConfig(invalid_calls="drop"))
    assert dropped.fingerprint != kept.fingerprint
    assert dropped.counts["invalid_calls"] == expected
    assert dropped.counts["rejected"] == {"a call that does not fit its schema": 3}
    assert [item.dialogue_id for item in read_instances(tmp_path / "dropped")] == ["a"]
    reasons = [
        json.loads(line)["detail"] for line in (tmp_path / "dropped" / "rejected.jsonl").read_text().splitlines()
    ]
    assert reasons[1] == "message 1, f: missing parameter: city"


def test_a_call_has_to_fit_one_of_the_tools_of_its_name() -> None:
    other = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = (Tool("f", "", {"type": "object", "properties": {}}), Tool("f", "", other))
    for arguments, faults in (({"x": 1}, 0), ({}, 0), ({"x": "1"}, 1)):
        message = step(None, ToolCall("f", arguments))
        assert len(invalid_calls(Dialogue("d", "s", tools, (user(), message)))) == faults


def test_a_finished_result_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "data.jsonl", row("a")), tmp_path / "out"
    first = decompose_source(source, out)
    shard = out / "instances-00000.parquet"
    before = shard.stat().st_mtime_ns
    assert decompose_source(source, out) == first
    assert decompose_source(source, out, format="openai") == first
    assert shard.stat().st_mtime_ns == before
    # Another version of the reader is another result, and so is another content.
    monkeypatch.setitem(sources.FORMATS, "openai", replace(sources.FORMATS["openai"], version=999))
    second = decompose_source(source, out)
    assert second.fingerprint != first.fingerprint
    write(source, row("a"), row("b"))
    assert decompose_source(source, out).counts["instances"] == 2


def test_an_interrupted_run_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "data.jsonl", *(row(str(number)) for number in range(20))), tmp_path / "out"
    checked = decompose_module.check_dialogue

    def dies(item: Dialogue) -> Dialogue:
        if item.id == "15":
            raise KeyboardInterrupt
        return checked(item)

    monkeypatch.setattr(decompose_module, "check_dialogue", dies)
    with pytest.raises(KeyboardInterrupt):
        decompose_source(source, out)
    assert read_manifest(out) is None
    assert (out / IN_PROGRESS).exists()
    with pytest.raises(UserError):
        read_instances(out)
    monkeypatch.setattr(decompose_module, "check_dialogue", checked)
    assert decompose_source(source, out).counts["instances"] == len(read_instances(out)) == 20


def test_a_source_without_a_usable_row_fails_with_the_reason(tmp_path: Path) -> None:
    source = write(
        tmp_path / "data.jsonl", *(json.dumps({"messages": [{"role": "user", "content": str(n)}]}) for n in range(3))
    )
    with pytest.raises(
        UserError, match=r"no row of .* can be used \(3 of 3: no assistant step; row 0: no assistant step\)"
    ):
        decompose_source(source, tmp_path / "out")
    assert read_manifest(tmp_path / "out") is None


def test_a_missing_source_and_a_wrong_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        decompose_source(tmp_path / "nowhere.json", tmp_path / "out")
    source = write(tmp_path / "data.jsonl", row("a"))
    with pytest.raises(UserError, match="unknown format"):
        decompose_source(source, tmp_path / "out", format="parquet")
    with pytest.raises(UserError, match="no list of conversation turns"):
        decompose_source(source, tmp_path / "out", format="sharegpt")


def test_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompose_module, "ROWS_PER_REPORT", 5)
    seen: list[tuple[int, int]] = []
    source = write(tmp_path / "data.jsonl", *(row(str(number)) for number in range(23)))
    decompose_source(source, tmp_path / "out", progress=lambda done, total, what="": seen.append((done, total)))
    assert len(seen) == 5
    assert seen[-1][0] == seen[-1][1] == source.stat().st_size
    assert seen == sorted(seen)


# The real files, each counted a second time from the raw text.


def check_instances(instances: list[Instance]) -> None:
    for instance in instances:
        offered = {tool.name for tool in instance.tools}
        assert all(call.name in offered for call in instance.target.tool_calls)
        assert instance.target.thought is None
        assert all(message.thought is None for message in instance.prompt)
        assert instance.prompt[-1].role in ("user", "tool")
        assert instance.id == instance.compute_id()


@pytest.mark.parametrize(
    ("name", "rows", "kinds", "rejected"),
    [
        ("rlla_sft_first260.json", 260, {"call": 221, "reply": 38}, [130]),
        ("rlla_4k_test.parquet", 80, {"call": 70, "reply": 8}, [9, 45]),
    ],
)
def test_toolrl(
    shared_data: Path, tmp_path: Path, name: str, rows: int, kinds: dict[str, int], rejected: list[int]
) -> None:
    counts = decompose_source(shared_data / "toolrl" / name, tmp_path).counts
    assert counts["rows_read"] == rows
    assert counts["dialogues"] == counts["instances"] == rows - len(rejected)
    assert counts["instances_by_kind"] == kinds
    # Calls whose name was torn apart at a bracket when the set was made.
    assert counts["rejected"] == {"a call of a tool that is not offered": len(rejected)}
    listed = [json.loads(line)["row"] for line in (tmp_path / "rejected.jsonl").read_text("utf-8").splitlines()]
    assert listed == rejected
    instances = read_instances(tmp_path)
    check_instances(instances)
    if name.endswith(".parquet"):
        assert counts["instances_by_split"] == {"test": 78}  # the rows say so themselves
        assert all(instance.rationale is None for instance in instances)
    else:
        assert set(counts["instances_by_split"]) == {"train", "validation", "test"}
        assert all(instance.rationale for instance in instances)


def test_glaive(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "glaive" / "glaive_first200.json"
    counts = decompose_source(path, tmp_path).counts
    distinct = {json.dumps(item): item for item in json.loads(path.read_text("utf-8"))}.values()
    speakers = Counter(turn["from"] for item in distinct for turn in item["conversations"])
    assert counts["rows_read"] == 200
    assert counts["dialogues"] == len(distinct) == 183
    assert counts["rejected"] == {"the same as an earlier row": 17}
    assert (
        counts["instances_by_kind"]
        == {"call": speakers["function_call"], "reply": speakers["gpt"]}
        == {"call": 129, "reply": 477}
    )
    instances = read_instances(tmp_path)
    check_instances(instances)
    by_dialogue = {instance.dialogue_id: set() for instance in instances}
    for instance in instances:
        by_dialogue[instance.dialogue_id].add(instance.split)
    assert all(len(found) == 1 for found in by_dialogue.values())
