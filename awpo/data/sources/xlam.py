"""Format `xlam`: rows of `query`, `tools` and `answers` as xLAM's function-calling sets (arXiv 2406.18518) give them.

`tools` and `answers` are JSON text or lists; a tool's parameters are a map from names to `type` ("int, optional"),
`description` and `default`; an answer is `{"name", "arguments"}`. Of each row comes one dialogue of one step.

Empty answers mean that no call is due (xlam-irrelevance-7.5k, by MadeAgents, is all of that kind): the target is
then the reply `NO_CALL_REPLY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awpo.data.sources.base import RowError, Source, action, read_calls, read_split, read_tools, row_id
from awpo.types import Dialogue, Message

SOURCE_NAME = "xlam"


def sniff(row: Any) -> bool:
    """Whether the row has a query, tools and answers."""
    return (
        isinstance(row, Mapping)
        and isinstance(row.get("query"), str)
        and all(isinstance(row.get(key), (str, list)) for key in ("tools", "answers"))
    )


def read(row: Mapping[str, Any]) -> Dialogue:
    """The dialogue of a row. Raises RowError."""
    if not sniff(row):
        raise RowError("no query, tools and answers", "needs 'query', 'tools' and 'answers'")
    tools = read_tools(row["tools"])
    messages = (Message("user", row["query"]), action(read_calls(row["answers"], "answers")))
    return Dialogue(
        id=row_id(row.get("id"), f"{SOURCE_NAME}-", tools, messages),
        source=SOURCE_NAME,
        tools=tools,
        messages=messages,
        split=read_split(row.get("split")),
    )


SOURCE = Source(SOURCE_NAME, "xLAM's rows (query, tools and answers, as JSON text)", sniff, read, version=1)
