"""Formats `apibank` and `apibank-dialogues`: API-Bank (arXiv 2304.08244), as rows of one step and as whole dialogues.

A row of `apibank` has `instruction`, `input` and `expected_output` (levels 1 and 2) or `output` (level 3): tools as
JSON objects after "API descriptions:" or before the dialogue, then the dialogue up to a request, a line for each
`User:`, `AI:` and `API-Request: [..]->result`; the output is that request. A row of `apibank-dialogues` has
`requirement`, `apis` (calls with their results) and `response`.

What becomes of it:
- What the AI says before a request is one step with it; what it says twice in a row is one reply.
- Every value is written in quotes, whatever its type, and quotes inside are not escaped. So a value is read as what
  its parameter's type says, where it is one: "25" is 25 for a number, "['a']" a list for an array; else it stays text.
- Tools that the dialogue finds with ToolSearcher are on offer beside those listed; a dialogue has one list of tools.
- API-Bank is a benchmark: every dialogue is of the split "test", so that none is trained on.
- Rows cut from one dialogue share its file's name, or at level 3 its request, as their dialogue id; so do the
  dialogue of a request and the rows cut from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from awpo.data.call_syntax import Names, scan_calls
from awpo.data.sources.base import RowError, Source, dialogue_hash, read_tool, read_value
from awpo.data.strict_json import StrictDecoder, dump
from awpo.types import Dialogue, Message, Tool, ToolCall, content_hash

SOURCE_NAME = "apibank"
_DESCRIPTIONS = "API descriptions:"
_REQUEST = "API-Request:"
_GENERATE = "Generate API Request:"
_SPEAKERS = ("User:", "AI:", _REQUEST, _GENERATE)
_RESULT = "]->"
_NOT_SPACE = re.compile(r"\S")
SEARCHER = {
    "name": "ToolSearcher",
    "description": "Searches for relevant tools in library based on the keywords.",
    "parameters": {"keywords": {"type": "str", "description": "The keyword to search for."}},
}
"""The tool that whole dialogues begin with and do not list; the words are those of the rows."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def sniff(row: Any) -> bool:
    """Whether the row has an instruction with descriptions of APIs and a dialogue that ends at a request."""
    return (
        isinstance(row, Mapping)
        and all(isinstance(row.get(key), str) for key in ("instruction", "input"))
        and _DESCRIPTIONS in row["instruction"]
        and isinstance(row.get("expected_output", row.get("output")), str)
    )


def sniff_dialogue(row: Any) -> bool:
    """Whether the row has a requirement, the calls made for it and a response."""
    return (
        isinstance(row, Mapping)
        and all(isinstance(row.get(key), str) for key in ("requirement", "response"))
        and isinstance(row.get("apis"), list)
    )


def _read_tool(value: Any, where: str) -> Tool:
    if not isinstance(value, Mapping):
        raise RowError("malformed tool", f"{where}: not an object")
    return read_tool(
        {
            "name": value.get("name", value.get("apiCode")),
            "description": value.get("description"),
            "parameters": value.get("input_parameters", value.get("parameters")),
        },
        where,
    )


def _listed_tools(text: str, where: str) -> list[Tool]:
    """The tools of JSON objects that follow one another."""
    tools: list[Tool] = []
    decoder, at = StrictDecoder(), 0
    while found := _NOT_SPACE.search(text, at):
        at = found.start()
        try:
            value, at, fault = decoder.raw_decode(text, at)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise RowError("the list of tools is not JSON", f"{where}: {fault}")
        tools.append(_read_tool(value, f"{where}, tool {len(tools)}"))
    return tools


def _found_tools(result: Any) -> list[Tool]:
    """The tools that a search's result describes; a result that describes none finds none."""
    if isinstance(result, Mapping) and "output" in result:
        result = result["output"]
    found = result if isinstance(result, list) else [result]
    described = [part for part in found if isinstance(part, Mapping) and "input_parameters" in part]
    return [_read_tool(part, "a tool that was found") for part in described]


def _typed(call: ToolCall, tools: Mapping[str, Tool]) -> ToolCall:
    """The call with each text that should be of another type read as that, where it can be."""
    tool = tools.get(call.name)
    properties = tool.parameters.get("properties", {}) if tool else {}
    arguments = {}
    for name, value in call.arguments.items():
        described = properties.get(name)
        kinds = _PYTHON_TYPES.get(str(described.get("type"))) if isinstance(described, Mapping) else None
        if isinstance(value, str) and kinds:
            try:
                read = read_value(value)
            except ValueError:
                read = value
            # a bool is an int in Python, but no number in JSON
            value = read if isinstance(read, kinds) and (bool in kinds or not isinstance(read, bool)) else value
        arguments[name] = value
    return replace(call, arguments=arguments)


class _Reader:
    """The messages and tools of one dialogue, in the making."""

    def __init__(self, tools: list[Tool]) -> None:
        self.messages: list[Message] = []
        self.tools: dict[str, Tool] = {}
        self.names = Names()
        self.replied: list[str] = []  # what the AI has said since anything else was
        self.offer(tools)

    def offer(self, tools: list[Tool]) -> None:
        for tool in tools:
            self.tools.setdefault(tool.name, tool)
            self.names.add(tool.name)

    def reply(self, text: str) -> None:
        """What the AI says; twice in a row is one reply."""
        self.replied.append(text)

    def add(self, message: Message) -> None:
        """Any other message, after what the AI has said before it."""
        if self.replied:
            self.messages.append(Message("assistant", "\n".join(self.replied)))
            self.replied = []
        self.messages.append(message)

    def request(self, text: str, where: str) -> None:
        """A request in code, `[Name(key='value')]`."""
        calls, problem = scan_calls(text, self.names, unescaped_quotes=True)
        if problem is not None or len(calls) != 1:
            raise RowError("a call that cannot be read", f"{where}, {problem or f'{len(calls)} calls'}")
        self.add(Message("assistant", None, (_typed(calls[0], self.tools),)))

    def result(self, text: str) -> None:
        name = self.messages[-1].tool_calls[0].name
        self.add(Message("tool", text, name=name))
        if name == SEARCHER["name"]:
            try:
                self.offer(_found_tools(read_value(text)))
            except ValueError:
                return

    def dialogue(self, name: str | None) -> Dialogue:
        tools, messages = tuple(self.tools.values()), tuple(self.messages)
        return Dialogue(name or dialogue_hash(tools, messages), SOURCE_NAME, tools, messages, "test")


def _turns(text: str) -> list[tuple[str, str]]:
    """(speaker, text) of each turn; a line without a speaker goes on with the turn before, "" speaks before the first."""
    turns: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        speaker = next((name for name in _SPEAKERS if line.startswith(name)), None)
        if speaker is not None:
            turns.append((speaker, [line[len(speaker) :]]))
        elif turns:
            turns[-1][1].append(line)
        else:
            turns.append(("", [line]))
    return [(speaker, "\n".join(said).strip()) for speaker, said in turns]


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue up to the row's request, whose last message is that request. Raises RowError."""
    if not sniff(row):
        raise RowError("no instruction, dialogue and request")
    reader = _Reader(_listed_tools(row["instruction"].partition(_DESCRIPTIONS)[2], "instruction"))
    for index, (speaker, text) in enumerate(_turns(row["input"])):
        where = f"turn {index}"
        if speaker == "":
            reader.offer(_listed_tools(text, "input"))
        elif speaker == "User:":
            reader.add(Message("user", text))
        elif speaker == "AI:":
            reader.reply(text)
        elif speaker == _REQUEST:
            call, arrow, result = text.partition(_RESULT)
            reader.request(f"{call}]" if arrow else text, where)
            if arrow:
                reader.result(result.strip())
    output = row.get("expected_output", row.get("output")).strip()
    if not output.startswith(_REQUEST):
        raise RowError("a call that cannot be read", f"output: no {_REQUEST!r}")
    reader.request(output.removeprefix(_REQUEST).strip(), "output")
    first = next((message.content for message in reader.messages if message.role == "user"), "")
    file = row.get("file")
    return reader.dialogue(f"{SOURCE_NAME}-{file}" if isinstance(file, str) and file else _id_of(first or ""))


def _id_of(request: str) -> str:
    return f"{SOURCE_NAME}-{content_hash(request.strip())}"


def read_dialogue(row: Mapping[str, Any]) -> Dialogue:
    """The whole dialogue: request, each call with its result, response. Raises RowError."""
    if not sniff_dialogue(row):
        raise RowError("no requirement, calls and response")
    reader = _Reader([_read_tool(SEARCHER, "ToolSearcher")])
    reader.messages.append(Message("user", row["requirement"].strip()))
    for index, api in enumerate(row["apis"]):
        where = f"call {index}"
        if not isinstance(api, Mapping) or not isinstance(api.get("api_name"), str):
            raise RowError("malformed tool call", f"{where}: needs 'api_name'")
        if not isinstance(api.get("input"), dict):
            raise RowError("malformed tool call", f"{where}: needs an object 'input'")
        call = _typed(ToolCall(api["api_name"], dict(api["input"])), reader.tools)
        reader.messages.append(Message("assistant", None, (call,)))
        try:
            reader.result(dump(api.get("output"), spaced=True))
        except ValueError as error:
            raise RowError("a tool result that is not JSON", f"{where}: {error}") from None
    reader.messages.append(Message("assistant", row["response"].strip()))
    return reader.dialogue(_id_of(row["requirement"]))


SOURCE = Source(SOURCE_NAME, "API-Bank's rows (instruction, input, expected_output)", sniff, read, 1, True)
DIALOGUES = Source(
    f"{SOURCE_NAME}-dialogues", "API-Bank's dialogues (requirement, apis, response)", sniff_dialogue, read_dialogue, 1
)
