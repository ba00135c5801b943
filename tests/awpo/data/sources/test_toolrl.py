"""ToolRL's rows: the numbered list of tools, the history in tags, and the step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from awpo.chat import parse_completion, render_target
from awpo.data.decompose import decompose
from awpo.data.sources import Rejected, RowError, detect, read
from awpo.data.sources.toolrl import PLACEHOLDER_THOUGHTS, SOURCE
from awpo.rewards import is_exact
from awpo.types import Dialogue, Message, Tool, ToolCall

SYSTEM = """You are helpful.

**Available Tools**
In your response, you can use the following tools:
1. Name: Search Managers
Description: Search for managers.
Two lines.
Parameters: {"name": {"description": "Who", "type": "string", "default": ""}}
2. Name: add
Description: 2. Name: this is no entry, nor is
7. Name: this
Parameters: {"a": {"description": "", "type": "int", "default": ""}, "b": {"description": "", "type": "int, optional", "default": 1}}

**Steps for Each Turn**
1. **Think:** Recall.

**Output Format**
```plaintext
<think> </think>
```

**Important Notes**
1. Always.
"""
HISTORY = "**Dialogue Records History**\n"
CALL = '<tool_call>\n{"name": "add", "parameters": {"a": 1}}\n{"name": "add", "parameters": {"a": 2, "b": 3}}\n</tool_call>'


def row(history: str = "<user> Hi </user>", output: str = "<response> Hello </response>", system: str = SYSTEM) -> Any:
    return {"instruction": system, "input": HISTORY + history, "output": output}


def reason(given: Any) -> str:
    with pytest.raises(RowError) as caught:
        SOURCE.read(given)
    return caught.value.reason


def test_tools_become_schemas_and_the_layout_leaves_the_system_text() -> None:
    dialogue = SOURCE.read(row())
    assert dialogue.tools == (
        Tool(
            "Search Managers",
            "Search for managers.\nTwo lines.",
            {"type": "object", "properties": {"name": {"description": "Who", "type": "string"}}},
        ),
        Tool(
            "add",
            "2. Name: this is no entry, nor is\n7. Name: this",
            {
                "type": "object",
                "properties": {
                    "a": {"description": "", "type": "integer"},
                    "b": {"description": "", "type": "integer", "default": 1},
                },
                "required": ["a"],
            },
        ),
    )
    assert dialogue.messages == (
        Message("system", "You are helpful."),
        Message("user", "Hi"),
        Message("assistant", "Hello"),
    )


def test_a_section_of_another_kind_stays_in_the_system_text() -> None:
    system = SYSTEM + "\n**House Rules**\nBe polite.\n"
    assert SOURCE.read(row(system=system)).messages[0].content == "You are helpful.\n\n**House Rules**\nBe polite."


def test_parameters_in_python_notation() -> None:
    system = (
        SYSTEM.split("1. Name")[0] + "1. Name: t\nDescription: d\nParameters: {'a': {'type': 'str', 'default': ''}}"
    )
    assert SOURCE.read(row(system=system)).tools[0].parameters["properties"] == {"a": {"type": "string"}}


def test_a_history_with_calls_results_and_thoughts() -> None:
    history = f"""<user> One and
two? </user>

<think> Add them. </think>
{CALL}
<obs> [{{"name": "add", "results": 2}}, {{"name": "add", "results": 5}}] </obs>

<think> Answer. </think>
<response> 2 and 5. </response>

<user> Thanks, and <b>bye</b> </user>"""
    output = (
        f"<think> I could <tool_call> or </think> not, <response> so. </think>\n{CALL}\n<response> Wait. </response>"
    )
    calls = (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2, "b": 3}))
    assert SOURCE.read(row(history, output)).messages[1:] == (
        Message("user", "One and\ntwo?"),
        Message("assistant", None, calls, "Add them."),
        Message("tool", '{"name": "add", "results": 2}', name="add"),
        Message("tool", '{"name": "add", "results": 5}', name="add"),
        Message("assistant", "2 and 5.", (), "Answer."),
        Message("user", "Thanks, and <b>bye</b>"),
        Message("assistant", "Wait.", calls, "I could <tool_call> or </think> not, <response> so."),
    )


@pytest.mark.parametrize("result", ["free text", '[{"name": "add"}]', '[{"name": "x"}, {"name": "add"}]', "[]", "{"])
def test_a_result_that_does_not_list_the_calls_stays_one_message(result: str) -> None:
    history = f"<user> Hi </user>\n{CALL}\n<obs> {result} </obs>"
    assert SOURCE.read(row(history)).messages[3:-1] == (Message("tool", result, name="add"),)


def test_steps_end_at_the_next_thought_and_at_the_second_of_a_kind() -> None:
    history = "<user> Hi </user><think> a </think><response> b </response><think> c </think><response> d </response>"
    assert [message.content for message in SOURCE.read(row(history)).messages[1:]] == ["Hi", "b", "d", "Hello"]


def test_a_tag_in_a_text_does_not_end_it() -> None:
    history = "<user> What does </user> mean, and <obs>? </user>"
    assert SOURCE.read(row(history)).messages[1].content == "What does </user> mean, and <obs>?"


@pytest.mark.parametrize("thought", sorted(PLACEHOLDER_THOUGHTS))
def test_stock_sentences_are_no_thoughts(thought: str) -> None:
    assert SOURCE.read(row(output=f"<think> {thought} </think>\n{CALL}")).messages[-1].thought is None


def test_both_shapes_read_the_same() -> None:
    flat = row()
    nested = {
        "prompt": [{"role": "system", "content": flat["instruction"]}, {"role": "user", "content": flat["input"]}],
        "reward_model": {"ground_truth": flat["output"], "style": "rule"},
        "extra_info": {"split": "test", "index": 3},
    }
    assert SOURCE.sniff(flat)
    assert SOURCE.sniff(nested)
    first, second = SOURCE.read(flat), SOURCE.read(nested)
    assert (first.tools, first.messages, first.id) == (second.tools, second.messages, second.id)
    assert (first.split, second.split) == (None, "test")


def test_the_steps_of_one_dialogue_share_its_id() -> None:
    first = SOURCE.read(row("<user> Hi </user>", CALL))
    later = SOURCE.read(row(f"<user> Hi </user>\n{CALL}\n<obs> 2 </obs>"))
    other = SOURCE.read(row("<user> Hello </user>", CALL))
    assert first.id == later.id != other.id


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row(system="No tools here."), "no tool list in the system text"),
        (row(system="**Available Tools**\nnone"), "no tool list in the system text"),
        (row(system="**Available Tools**\n1. Name: t\nParameters: {}"), "malformed tool"),
        (
            row(system="**Available Tools**\n1. Name: t\nDescription: d\nParameters: {broken"),
            "a tool's parameters are not JSON",
        ),
        (
            row(system='**Available Tools**\n1. Name: t\nDescription: d\nParameters: {"a": {"type": "wizard"}}'),
            "malformed tool",
        ),
        (
            row(system="**Available Tools**\n1. Name: t\nDescription: d\nParameters: {'a': {1, 2}}"),
            "a tool's parameters are not JSON",
        ),
        (row(""), "an empty history"),
        (row("Hi"), "text outside of the tags"),
        (row("<user> Hi"), "a tag that is not closed"),
        (row("<user> Hi </user> there"), "a tag that is not closed"),
        (row(output="Hello"), "text outside of the tags"),
        (row(output="<user> Hi </user>"), "the output is not one step"),
        (row(output=f"{CALL}\n{CALL}"), "the output is not one step"),
        (row(output="<tool_call> nothing </tool_call>"), "a tool call is not JSON"),
        (row(output="<tool_call></tool_call>"), "malformed tool call"),
        (row(output='<tool_call>{"name": "add", "parameters": {}, "extra": 1}</tool_call>'), "malformed tool call"),
        (row(output='<tool_call>{"name": "add", "parameters": 3}</tool_call>'), "malformed tool call"),
        ({"instruction": SYSTEM, "input": HISTORY}, "no system text, history and output"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "the prompt is not a system and a user message"),
    ],
)
def test_what_is_not_read_has_a_reason(given: Any, expected: str) -> None:
    assert reason(given) == expected


def test_hostile_text_takes_linear_time() -> None:
    many = 100_000  # quadratic, this takes minutes
    assert reason(row("<user> " + "</user> x" * many)) == "a tag that is not closed"
    assert reason(row(output="<think> " + "</think> " * many + "<tool_call>" * many)) == "a tag that is not closed"
    assert reason(row(system="**Available Tools**\n" + "1. Name: t\n" * many)) == "malformed tool"


# The real files. Each count is taken twice: by the reader, and from the raw text by other means.


def raw_rows(path: Path) -> list[tuple[str, str, str]]:
    """(system text, history, output) of each row."""
    if path.suffix == ".json":
        return [(item["instruction"], item["input"], item["output"]) for item in json.loads(path.read_text("utf-8"))]
    return [
        (item["prompt"][0]["content"], item["prompt"][1]["content"], item["reward_model"]["ground_truth"])
        for item in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize(("name", "rows"), [("rlla_sft_first260.json", 260), ("rlla_4k_test.parquet", 80)])
def test_every_row_of_the_real_files_is_read(shared_data: Path, name: str, rows: int) -> None:
    path = shared_data / "toolrl" / name
    assert detect(path) == "toolrl"
    raw, items = raw_rows(path), list(read(path))
    assert len(items) == len(raw) == rows
    for (system, history, output), item in zip(raw, items, strict=True):
        assert isinstance(item, Dialogue), item
        names = re.findall(r"(?m)^\d+\. Name: (.*)$", system)
        assert [tool.name for tool in item.tools] == names
        listed = re.findall(r"(?m)^Parameters: (.*)$", system)
        assert [list(tool.parameters["properties"]) for tool in item.tools] == [
            list(json.loads(text)) for text in listed
        ]
        roles = [message.role for message in item.messages]
        assert roles.count("user") == history.count("<user>")
        assert roles.count("assistant") == history.count("<think>") + 1
        step = output.rpartition("</think>")[2]
        blocks = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", step, re.DOTALL)
        calls = [json.loads(line) for block in blocks for line in block.split("\n")]
        target = item.messages[-1]
        assert [(call.name, call.arguments) for call in target.tool_calls] == [
            (call["name"], call["parameters"]) for call in calls
        ]
        assert bool(target.content) == ("<response>" in step)
        assert (target.thought is None) == any(text in output for text in PLACEHOLDER_THOUGHTS)
        for tool in item.tools:  # the one claim the reader adds to the source
            required = set(tool.parameters.get("required", ()))
            assert all(required <= set(call.arguments) for call in target.tool_calls if call.name == tool.name)


@pytest.mark.parametrize("name", ["rlla_sft_first260.json", "rlla_4k_test.parquet"])
def test_real_targets_survive_rendering_and_parsing(shared_data: Path, name: str) -> None:
    checked = 0
    for item in read(shared_data / "toolrl" / name):
        assert not isinstance(item, Rejected)
        try:
            (instance,) = decompose(item, last_step_only=True)
        except RowError:
            continue
        completion = parse_completion(render_target(instance.target, instance.rationale or "Because."))
        assert not completion.errors
        assert is_exact(instance.target, completion)
        checked += 1
    assert checked == {"rlla_sft_first260.json": 259, "rlla_4k_test.parquet": 78}[name]


# API-Bank as ToolRL processed it.


def processed(history: str, answer: Any, system: str = SYSTEM) -> dict[str, Any]:
    return {"system": system, "user": f"*{HISTORY}{history}", "answer": answer, "other": {"file": "a", "id": 0}}


@pytest.mark.parametrize("many", [False, True])
def test_an_answer_is_a_call_or_a_list_of_calls(many: bool) -> None:
    call = {"name": "add", "parameters": {"a": 1}}
    history = "<user> Hi </user>\n<response> One. </response>\n<response> Two. </response>\n<tool_call>\n"
    history += '{"name": "add", "parameters": {"a": 1}}\n</tool_call>\n<obs> 3 </obs>\n<user> And? </user>\n'
    dialogue = SOURCE.read(processed(history, [call] if many else call))
    assert dialogue.split == "test"  # a benchmark
    assert dialogue.messages[1:] == (
        Message("user", "Hi"),
        Message("assistant", "One.\nTwo.", (ToolCall("add", {"a": 1}),)),
        Message("tool", "3", name="add"),
        Message("user", "And?"),
        Message("assistant", None, (ToolCall("add", {"a": 1}),)),
    )


def test_tools_written_in_one_line() -> None:
    system = (
        "**Available Tools**\nIn your response, you can use the following tools:\n1. Find: The API: for 2. finding.\n"
        "Parameters: {'q': {'type': 'str', 'description': \"Who's\"}}\n2. Other: x\nParameters: {}\n\n**Output Format**\nx"
    )
    dialogue = SOURCE.read(processed("<user> Hi </user>", {"name": "Find", "parameters": {"q": "x"}}, system))
    assert [(tool.name, tool.description) for tool in dialogue.tools] == [
        ("Find", "The API: for 2. finding."),
        ("Other", "x"),
    ]
    assert dialogue.tools[0].parameters["properties"] == {"q": {"type": "string", "description": "Who's"}}


@pytest.mark.parametrize("answer", ["text", None, 3])
def test_an_answer_that_is_no_call(answer: Any) -> None:
    assert reason(processed("<user> Hi </user>", answer)) == "no system text, history and output"
