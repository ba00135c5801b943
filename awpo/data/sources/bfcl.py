"""Format `bfcl`: entries of the Berkeley Function-Calling Leaderboard, with the answer in the row.

An entry has `question` (turns of messages; one turn is read), `function` (one or a list) and `ground_truth`: calls
`{name: {parameter: [allowed values]}}`, in which "" allows to leave the parameter out. The target takes the first
value allowed, of nested objects too, and leaves out a parameter for which "" comes first. The benchmark keeps its
answers in files apart (`possible_answer`); an entry without one is read only where its id says that no call is due.

The leaderboard is a benchmark: every dialogue is of the split "test", whatever the row says, so that none is trained
on. Entries of several turns need their environment to be run, and are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awpo.data.sources.base import RowError, Source, action, read_tools, row_id
from awpo.types import Dialogue, Message, Role, ToolCall

SOURCE_NAME = "bfcl"
_NO_CALL_DUE = ("irrelevance", "live_irrelevance")
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


def sniff(row: Any) -> bool:
    """Whether the row has a question and functions."""
    return (
        isinstance(row, Mapping)
        and isinstance(row.get("question"), (str, list))
        and isinstance(row.get("function"), (dict, list))
    )


def _messages(question: Any) -> list[Message]:
    if isinstance(question, str):
        return [Message("user", question)]
    turns = question if question and isinstance(question[0], list) else [question]
    if len(turns) != 1:
        raise RowError("an entry of several turns", f"{len(turns)} turns")
    messages = []
    for index, message in enumerate(turns[0]):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise RowError("content is not text", f"question, message {index}")
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise RowError("unknown role", f"question, message {index}: {message.get('role')!r:.80}")
        messages.append(Message(role, message["content"]))
    return messages


def _chosen(allowed: Any) -> Any:
    """The first value allowed; in objects, and in lists of them, each value is again a list of those allowed."""
    if isinstance(allowed, dict):
        return _arguments(allowed, "a nested object")
    if isinstance(allowed, list) and allowed and all(isinstance(part, dict) for part in allowed):
        return [_arguments(part, "a nested object") for part in allowed]
    return allowed


def _arguments(allowed: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = {}
    for name, values in allowed.items():
        if not isinstance(values, list) or not values:
            raise RowError("malformed ground truth", f"{where}: {name!r:.60} needs a list of values")
        if values[0] != "" or len(values) == 1:
            arguments[name] = _chosen(values[0])
    return arguments


def _calls(truth: Any) -> tuple[ToolCall, ...]:
    if not isinstance(truth, list) or not truth:
        raise RowError("malformed ground truth", "needs a list of calls")
    calls = []
    for index, call in enumerate(truth):
        if not isinstance(call, Mapping) or len(call) != 1:
            raise RowError("malformed ground truth", f"call {index}: needs one name with its arguments")
        ((name, allowed),) = call.items()
        if not isinstance(name, str) or not isinstance(allowed, Mapping):
            raise RowError("malformed ground truth", f"call {index}: needs one name with its arguments")
        calls.append(ToolCall(name, _arguments(allowed, f"call {index}")))
    return tuple(calls)


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of an entry. Raises RowError."""
    if not sniff(row):
        raise RowError("no question with functions", "needs 'question' and 'function'")
    functions = row["function"]
    tools = read_tools(functions if isinstance(functions, list) else [functions])
    messages, truth = _messages(row["question"]), row.get("ground_truth")
    if truth is None and not str(row.get("id")).rpartition("_")[0].startswith(_NO_CALL_DUE):
        raise RowError("no ground truth", "the answers stand in a file apart; join them by id")
    messages.append(action(() if truth is None else _calls(truth)))
    return Dialogue(
        id=row_id(row.get("id"), f"{SOURCE_NAME}-", tools, tuple(messages)),
        source=SOURCE_NAME,
        tools=tools,
        messages=tuple(messages),
        split="test",
    )


SOURCE = Source(SOURCE_NAME, "BFCL's entries (question, function, ground_truth)", sniff, read, version=1)
