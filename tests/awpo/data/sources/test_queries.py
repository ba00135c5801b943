"""Rows of a query with its tools and calls: xLAM, Seal-Tools, Hammer, BFCL.

Hammer's are read from a real file besides, BFCL's from the installed package. Of xLAM and Seal-Tools no raw row is at
hand: their rows are written by hand from the published formats.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from awpo.data.decompose import decompose
from awpo.data.sources import RowError, Source, bfcl, detect, hammer, read, sealtools, xlam
from awpo.data.sources.base import NO_CALL_REPLY
from awpo.types import Dialogue, Message, Tool, ToolCall


def refused(source: Source, row: Any) -> str:
    with pytest.raises(RowError) as caught:
        source.read(row)
    return caught.value.reason


# xLAM

XLAM_TOOLS = [
    {
        "name": "live_giveaways_by_type",
        "description": "Retrieve live giveaways.",
        "parameters": {
            "type": {"description": "The type (e.g., game)", "type": "str", "default": "game"},
            "limit": {"description": "At most", "type": "int, optional", "default": ""},
            "ids": {"description": "Which", "type": "List[int]"},
        },
    }
]
XLAM_CALLS = [
    {"name": "live_giveaways_by_type", "arguments": {"type": "beta", "ids": [1]}},
    {"name": "live_giveaways_by_type", "arguments": {"type": "game", "ids": []}},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"description": "The type (e.g., game)", "type": "string", "default": "game"},
        "limit": {"description": "At most", "type": "integer"},
        "ids": {"description": "Which", "type": "array", "items": {"type": "integer"}},
    },
    "required": ["ids"],
}


@pytest.mark.parametrize("dump", [json.dumps, lambda value: value, repr])
def test_xlam(dump: Any) -> None:
    dialogue = xlam.SOURCE.read({"id": 7, "query": "Where?", "tools": dump(XLAM_TOOLS), "answers": dump(XLAM_CALLS)})
    assert dialogue == Dialogue(
        "xlam-7",
        "xlam",
        (Tool("live_giveaways_by_type", "Retrieve live giveaways.", SCHEMA),),
        (
            Message("user", "Where?"),
            Message("assistant", None, tuple(ToolCall(call["name"], call["arguments"]) for call in XLAM_CALLS)),
        ),
    )
    assert [instance.kind for instance in decompose(dialogue)] == ["call"]


@pytest.mark.parametrize("nothing", ["[]", "", [], " [ ] "])
def test_empty_answers_mean_that_no_call_is_due(nothing: Any) -> None:
    dialogue = xlam.SOURCE.read({"query": "Where?", "tools": json.dumps(XLAM_TOOLS), "answers": nothing})
    assert dialogue.messages[-1] == Message("assistant", NO_CALL_REPLY)
    assert [instance.kind for instance in decompose(dialogue)] == ["reply"]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ("[{", "a tool call is not JSON"),
        ('[{"name": "f", "arguments": {"a": 1}, "more": 1}]', "malformed tool call"),
        ('[{"name": "f", "tool": "f", "arguments": {}}]', "malformed tool call"),
        ('[{"arguments": {}}]', "malformed tool call"),
        ('[{"name": "f", "arguments": [1]}]', "malformed tool call"),
        ('["f"]', "malformed tool call"),
        ("3", "malformed tool call"),
    ],
)
def test_answers_that_are_no_calls(answers: str, reason: str) -> None:
    assert refused(xlam.SOURCE, {"query": "x", "tools": "[]", "answers": answers}) == reason


def test_a_row_without_query_or_tools() -> None:
    assert refused(xlam.SOURCE, {"tools": "[]", "answers": "[]"}) == "no query, tools and answers"
    assert refused(xlam.SOURCE, {"query": "x", "tools": "[{", "answers": "[]"}) == "the list of tools is not JSON"


# Seal-Tools

APIS = [
    {
        "api_name": "getFilmDetails",
        "api_description": "Retrieve details",
        "field": "Entertainment/Film",
        "parameters": {
            "title": {"type": "str", "description": "It's the title"},
            "year": {"type": "int", "description": ""},
        },
        "required": ["title"],
        "responses": {"genre": {"type": "str", "description": "The genre"}},
    }
]
FILM = Tool(
    "getFilmDetails",
    "Retrieve details",
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "It's the title"},
            "year": {"type": "integer", "description": ""},
        },
        "required": ["title"],
    },
)
CALLING = [{"api": "getFilmDetails", "parameters": {"title": "Pulp Fiction"}, "responses": ["API_call_0"]}]


def seal_prompt(apis: Any = APIS, calling: Any = CALLING, query: str = 'The film "Pulp Fiction".') -> dict[str, Any]:
    human = (
        'Please chooose the needed apis.\nOutput format: [{"api": "", "parameters": {"": ""}}]\n\nInput:\n'
        f'api_list = {apis!r}\ntask_instruction = "{query}"\nOutput:\n'
    )
    turns = [{"from": "human", "value": human}, {"from": "gpt", "value": repr(calling)}]
    return {"id": "dev-easy-0", "conversations": turns}


@pytest.mark.parametrize(
    "row",
    [
        seal_prompt(),
        {"id": "dev-easy-0", "query": 'The film "Pulp Fiction".', "tools": APIS, "calling": CALLING},
        {"id": "dev-easy-0", "query": 'The film "Pulp Fiction".', "api_list": json.dumps(APIS), "calling": json.dumps(CALLING)},
        {"id": "dev-easy-0", "query": 'The film "Pulp Fiction".', "tools": APIS, "answers": [{"tool": "getFilmDetails", "arguments": {"title": "Pulp Fiction"}}]},
        {"id": "dev-easy-0", "query": 'The film "Pulp Fiction".', "tools": APIS, "answers": [{"name": "getFilmDetails", "parameters": {"title": "Pulp Fiction"}}]},
    ],
)  # fmt: skip
def test_sealtools(row: Any) -> None:
    assert sealtools.SOURCE.sniff(row)
    assert sealtools.SOURCE.read(row) == Dialogue(
        "sealtools-dev-easy-0",
        "sealtools",
        (FILM,),
        (
            Message("user", 'The film "Pulp Fiction".'),
            Message("assistant", None, (ToolCall("getFilmDetails", {"title": "Pulp Fiction"}),)),
        ),
    )


def test_sealtools_calls_that_need_results_are_refused() -> None:
    second = {"api": "getFilmDetails", "parameters": {"title": ["API_call_0"]}, "responses": ["API_call_1"]}
    assert (
        refused(sealtools.SOURCE, seal_prompt(calling=[*CALLING, second])) == "a call that needs another call's result"
    )


def test_sealtools_lines_without_tools_say_so() -> None:
    row = {"id": "dev-easy-0", "query": "x", "calling": CALLING}
    assert sealtools.SOURCE.sniff(row)
    assert refused(sealtools.SOURCE, row) == "no list of tools or no list of calls"


def test_rows_of_others_are_not_taken_for_sealtools() -> None:
    assert not sealtools.SOURCE.sniff(
        {"query": "x", "tools": json.dumps(XLAM_TOOLS), "answers": json.dumps(XLAM_CALLS)}
    )
    assert not sealtools.SOURCE.sniff(
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]}
    )


# Hammer


def hammer_row(tools: str, query: str, output: str) -> dict[str, Any]:
    parts = {
        "TASK INSTRUCTION": "Call.",
        "AVAILABLE TOOLS": tools,
        "FORMAT INSTRUCTION": "```\n[]\n```",
        "QUERY": query,
    }
    text = "".join(f"[BEGIN OF {name}]\n{part}\n[END OF {name}]\n\n" for name, part in parts.items())
    return {"instruction": text, "input": "", "output": output}


@pytest.mark.parametrize("dump", [json.dumps, repr])
@pytest.mark.parametrize("fence", ["```\n{}\n```", "{}", "```json\n{}\n```"])
def test_hammer(dump: Any, fence: str) -> None:
    query = "Say [END OF QUERY] twice"
    dialogue = hammer.SOURCE.read(hammer_row(dump(XLAM_TOOLS), query, fence.format(dump(XLAM_CALLS))))
    assert dialogue.tools[0].parameters == SCHEMA
    assert dialogue.messages[:2] == (Message("system", "Call."), Message("user", query))
    assert [call.arguments for call in dialogue.messages[2].tool_calls] == [call["arguments"] for call in XLAM_CALLS]


def test_hammer_rows_that_are_refused() -> None:
    assert refused(hammer.SOURCE, hammer_row("[]", "x", "I can't")) == "a tool call is not JSON"
    assert refused(hammer.SOURCE, hammer_row("[{", "x", "[]")) == "the list of tools is not JSON"
    row = hammer_row("[]", "x", "[]")
    row["instruction"] = row["instruction"].replace("[END OF QUERY]", "")
    assert refused(hammer.SOURCE, row) == "a part of the instruction is missing"


def test_hammers_own_file(shared_data: Path) -> None:
    path = shared_data / "hammer" / "masking_sft_data_example.json"
    assert detect(path) == "hammer"
    rows = json.loads(path.read_text("utf-8"))
    dialogues = list(read(path))
    for row, dialogue in zip(rows, dialogues, strict=True):
        assert isinstance(dialogue, Dialogue)
        # a second reading, by splitting at the marks' lines
        text = row["instruction"].split("\n")
        tools = json.loads(text[text.index("[BEGIN OF AVAILABLE TOOLS]") + 1])
        calls = json.loads(row["output"].strip("`\n"))
        query = text[text.index("[BEGIN OF QUERY]") + 1 : text.index("[END OF QUERY]")]
        assert [tool.name for tool in dialogue.tools] == [tool["name"] for tool in tools]
        assert [list(tool.parameters["properties"]) for tool in dialogue.tools] == [
            list(t["parameters"]) for t in tools
        ]
        assert dialogue.messages[1].content == "\n".join(query)
        target = dialogue.messages[-1]
        assert [{"name": call.name, "arguments": call.arguments} for call in target.tool_calls] == calls
        assert target.content == (None if calls else NO_CALL_REPLY)
    assert Counter(bool(d.messages[-1].tool_calls) for d in dialogues if isinstance(d, Dialogue)) == {True: 8, False: 2}


# BFCL


def entry(truth: Any, **fields: Any) -> dict[str, Any]:
    function = {
        "name": "f",
        "description": "F.",
        "parameters": {"type": "dict", "properties": {"a": {"type": "float"}}},
    }
    question = [[{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]]
    return {"id": "simple_0", "question": question, "function": function, "ground_truth": truth, **fields}


def test_bfcl_takes_the_first_value_allowed() -> None:
    truth = [
        {
            "f": {
                "a": [1, 2],
                "b": ["", "left out"],
                "c": ["kept", ""],
                "d": [{"x": [5], "y": ["", 0]}],
                "e": [[1, 2], [3]],
                "g": [[{"z": ["q"]}]],
                "h": [""],
                "i": [[]],
            }
        },
        {"f": {}},
    ]
    dialogue = bfcl.SOURCE.read(entry(truth, split="train"))
    arguments = {"a": 1, "c": "kept", "d": {"x": 5}, "e": [1, 2], "g": [{"z": "q"}], "h": "", "i": []}
    assert dialogue.messages == (
        Message("system", "S"),
        Message("user", "Q"),
        Message("assistant", None, (ToolCall("f", arguments), ToolCall("f", {}))),
    )
    assert (dialogue.id, dialogue.split) == ("bfcl-simple_0", "test")  # a benchmark is never trained on
    assert dialogue.tools[0].parameters == {"type": "object", "properties": {"a": {"type": "number"}}}


def test_bfcl_without_an_answer() -> None:
    for name in ("irrelevance_3", "live_irrelevance_3-1-0"):
        assert bfcl.SOURCE.read(entry(None, id=name)).messages[-1].content == NO_CALL_REPLY
    for name in ("live_relevance_0-0-0", "simple_1", None):
        assert refused(bfcl.SOURCE, entry(None, id=name)) == "no ground truth"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (entry([], id="irrelevance_0"), "malformed ground truth"),
        (entry([{"f": {"a": 1}}]), "malformed ground truth"),
        (entry([{"f": {"a": []}}]), "malformed ground truth"),
        (entry([{"f": {}, "g": {}}]), "malformed ground truth"),
        (entry([["cd(folder='x')"]]), "malformed ground truth"),
        (entry([{"f": {}}], question=[[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]), "an entry of several turns"),
        (entry([{"f": {}}], question=[[{"role": "tool", "content": "a"}]]), "unknown role"),
        (entry([{"f": {}}], question=[[{"role": "user"}]]), "content is not text"),
        (entry([{"f": {}}], function={"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "wizard"}}}}), "malformed tool"),
    ],
)  # fmt: skip
def test_bfcl_entries_that_are_refused(row: Any, reason: str) -> None:
    assert refused(bfcl.SOURCE, row) == reason


def test_bfcl_agrees_with_the_benchmarks_own_checker() -> None:
    """Every target made from an answer of the package is right by the package's checker."""
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip("the package bfcl-eval is not installed")
    from evaluation.bfcl.data import read_category

    reasons: Counter[str] = Counter()
    for category in ("simple", "parallel_multiple", "live_multiple", "irrelevance"):
        for item in read_category(category):
            question = [[{"role": message.role, "content": message.content} for message in item.turns[0]]]
            row = {"id": item.id, "question": question, "function": list(item.functions), "ground_truth": item.answer}
            try:
                dialogue = bfcl.SOURCE.read(row)
            except RowError as error:
                reasons[error.reason] += 1
                continue
            reasons["read"] += 1
            calls = dialogue.messages[-1].tool_calls
            if item.answer is None:
                assert calls == ()
                continue
            assert [call.name for call in calls] == [next(iter(answer)) for answer in item.answer]
            for call, answer in zip(calls, item.answer, strict=True):
                allowed = answer[call.name]
                assert set(call.arguments) <= set(allowed)
                for name, values in allowed.items():
                    if name not in call.arguments:
                        assert "" in values
                    elif not isinstance(call.arguments[name], dict) and not (
                        isinstance(call.arguments[name], list)
                        and any(isinstance(p, dict) for p in call.arguments[name])
                    ):
                        assert call.arguments[name] in values
    assert reasons["read"] > 1500
