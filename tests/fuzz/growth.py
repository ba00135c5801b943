"""Texts that make careless readers slow, at any size; as a script, how time grows with size.

    python tests/fuzz/growth.py [TARGET ..]

prints, for each shape, the seconds for 10 kB, 100 kB and 1 MB and the exponent of growth from the second to the third
(1: in proportion; 2: quadratic), and exits with 1 where an exponent exceeds 1.5 in more than a second.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_EXPONENT, WORTH_A_LOOK = 1.5, 1.0

REPEATED = {
    "open brackets": "[",
    "open braces": '{"a":',
    "open round brackets": "(",
    "nested objects": '[{"a": ',
    "quotes": '"',
    "single quotes": "'",
    "backslashes": "\\",
    "escapes": "\\u",
    "high surrogates": "\\ud800",
    "lone surrogates": "\ud800",
    "NUL": "\0",
    "digits": "1",
    "digits and points": "1.",
    "exponents": "1e",
    "colons": ":59",
    "blanks": " ",
    "line breaks": "\n",
    "commas": "1,",
    "equals signs": "a=",
    "closing": "]})",
    "open tags": "<tool_call>",
    "thoughts": "<think></think>",
    "tags of ToolRL": "<user></user>x",
    "fences": "```json\n{",
    "empty objects": "{}",
    "anchors": "&a [*a, ",
    "comments": "#",
    "dashes": "- ",
}
START = {
    "completion": ("", "<think>", "<tool_call>\n{", "<response>"),
    "calls": ("", "[", "[get(", "[get(a=", '[get(a="', '{"a": '),
    "judge": ("", "</think>", '{"coherence": ', '{"reason": "'),
    "settings": ("", "a: ", "[", "steps: 1", 'model: "', "? "),
    "rows": ("", "[", '[{"a": ', '{"messages": "'),
    "endpoint": (
        "200\n\n",
        '200\n\n{"choices": [{"message": {"content": "',
        "429\nRetry-After: ",
        '500\n\n{"error": "',
    ),
    "answers": ("", "<tool_call>\n{", "[get(a=", "The answer is ("),
    "records": ("", '{"time": ', '{"uri": "'),
    "forms": ("", '{"out": "', '{"settings": ', '{"settings": {"judge": {"endpoint": {"base_url": "'),
    "requests": ("", '{"messages": ', '{"messages": [{"role": "user", "content": "', '{"tools": '),
}
END = ("", "x", "\n", '"]})')


def repeated(target: str, size: int) -> dict[str, bytes]:
    """Each shape, after each start and before each end of a target: name -> `size` bytes."""
    texts = {}
    for name, piece in REPEATED.items():
        for start in START[target]:
            for end in END:
                texts[f"{start!r} {name} {end!r}"] = (
                    start + piece * (size // len(piece.encode("utf-8", "surrogatepass"))) + end
                )
    return {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}


def _row(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _apibank(dialogue: str, tools: str = '{"name": "F", "input_parameters": {}}') -> bytes:
    return _row(instruction=f"API descriptions:\n{tools}", input=dialogue, expected_output="API-Request: [F()]")


def _toolrl(history: str) -> bytes:
    system = 'Help.\n\n**Available Tools**\n1. Name: t\nDescription: d\nParameters: {"a": {"type": "str"}}'
    return _row(instruction=system, input=history, output="<response> Hello </response>")


def _toolace(said: str, tools: list[dict[str, object]]) -> bytes:
    turns = [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": said}]
    return _row(system=f"Here is a list of functions in JSON format:\n{json.dumps(tools)}.", conversations=turns)


def _tool(kind: object) -> bytes:
    return _row(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"name": "t", "parameters": {"type": "object", "properties": {"a": {"type": kind}}}}],
    )


def _sealtools(query: str) -> bytes:
    turns = [f"api_list = []\ntask_instruction = {query}", "[]"]
    return _row(conversations=[{"from": "human", "value": turn} for turn in turns])


def rows_of_formats(size: int) -> dict[str, bytes]:
    """Rows of the formats that keep whoever reads them long."""
    many = [{"name": f"name {number}"} for number in range(size // 40)]
    return {
        "apibank, lines without a speaker": _apibank("User: Hi\n" + "\n" * size),
        "apibank, replies in a row": _apibank("User: Hi\n" + "AI:\n" * (size // 4)),
        "apibank, requests": _apibank("User: Hi\n" + "API-Request: [F()]->1\n" * (size // 22)),
        "apibank, tools and requests": _apibank(
            "User: Hi\n" + "API-Request: [F()]->1\n" * (size // 44),
            "\n".join(json.dumps({**tool, "input_parameters": {}}) for tool in [{"name": "F"}, *many]),
        ),
        "apibank, quotes": _apibank("User: Hi\nAPI-Request: [F(a='" + "'," * (size // 2)),
        "apibank, digits": _apibank("User: Hi\nAPI-Request: [F(a=" + "1" * size + "x)]"),
        "toolrl, replies": _toolrl("<user> Hi </user>\n" + "<response>a</response>\n" * (size // 23)),
        "toolrl, tags that close nothing": _toolrl("<user>" + "</user>x" * (size // 8)),
        "toolrl, calls and results": _toolrl(
            "<user> Hi </user>\n<tool_call>"
            + '{"name": "t", "parameters": {}}\n' * (size // 64)
            + "</tool_call>\n"
            + "<obs> 1 </obs>\n" * (size // 30)
        ),
        "toolrl, blanks": _toolrl("<user>" + "</user>" + " " * size + "x"),
        "toolace, equals signs and brackets": _toolace("[f(" + "=" * (size // 2) + ")" * (size // 2) + "x", many[:1]),
        "toolace, names and brackets": _toolace("a" + "[" * (size // 2), many),
        "toolace, names begun": _toolace("a" + "[name " * (size // 12), many),
        "toolace, blanks": _toolace("[" + " " * size, many[:1]),
        "toolace, many turns": _row(
            system=f"Here is a list of functions in JSON format:\n{json.dumps(many)}.",
            conversations=[{"from": "user", "value": "Hi"}, *({"from": "assistant", "value": "x[1]"},) * (size // 80)],
        ),
        "toolace, lists": _row(
            system="Here is a list of functions" + "[{" * (size // 2), conversations=[{"from": "user", "value": "Hi"}]
        ),
        "sealtools, blanks": _sealtools(" " * size + "x"),
        "sealtools, marks": _sealtools("\ntask_instruction = " * (size // 20) + "x"),
        "hammer, marks": _row(instruction="[BEGIN OF AVAILABLE TOOLS][BEGIN OF QUERY]" * (size // 42), output=""),
        "a tool of many types": _tool(["str"] * (size // 7)),
        "a tool of many other types": _tool([f"Literal['{number}']" for number in range(size // 20)]),
        "a type in brackets": _tool("List[" * (size // 10) + "int" + "]" * (size // 10)),
        "a type of many": _tool("Union[" + "int, " * (size // 5) + "str]"),
        "a schema in a schema": _tool("int").replace(b'"int"', b'"array", "items": ' + b'{"items": ' * (size // 20)),
        "rows of nothing": b"{}\n" * (size // 3),
        "an integer before what is nested": b'{"a": ' + b"1" * 5000 + b', "b": ' + b"[" * size + b"]" * size + b"}\n",
    }


def bombs(size: int) -> dict[str, bytes]:
    """Settings that are short and mean much."""
    levels = max(2, int(math.log2(size)))
    return {
        "aliases of aliases": b"a0: &a0 [1]\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, levels * 3)),
        "merged mappings": b"a0: &a0 {x: 1}\n"
        + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n, n, n - 1, n - 1) for n in range(1, levels * 3)),
        "an alias of itself": b"steps: &a [*a]\n" * 1,
        "aliases of one": b"a: &a [" + b"1," * (size // 4) + b"]\nb: [" + b"*a," * (size // 6) + b"]\n",
        "a long key": b"a" * size + b": 1\n",
        "a huge number": b"steps: 0x" + b"F" * size + b"\n",
        "sixties": b"steps: 1" + b":59" * (size // 3) + b"\n",
        "keys": b"".join(b"k%d: 1\n" % n for n in range(size // 10)),
    }


def texts(target: str, size: int) -> dict[str, bytes]:
    """All of a target."""
    further = {"rows": rows_of_formats, "settings": bombs}.get(target, lambda size: {})
    return {**repeated(target, size), **further(size)}


def _seconds(target: Callable[[bytes], None], data: bytes) -> float:
    start = time.process_time()
    target(data)
    return time.process_time() - start


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    bad = 0
    for name in sys.argv[1:] or TARGETS:
        small, middle, large = (texts(name, size) for size in (10_000, 100_000, 1_000_000))
        worst = 0.0
        for shape in small:
            took = [_seconds(TARGETS[name], data[shape]) for data in (small, middle)]
            took.append(_seconds(TARGETS[name], large[shape]) if took[1] < 5 else math.inf)
            growth = math.log10(max(took[2], 1e-6) / max(took[1], 1e-6))
            worst = max(worst, took[2])
            is_bad = growth > MOST_EXPONENT and took[2] > WORTH_A_LOOK
            bad += is_bad
            if is_bad or took[2] > WORTH_A_LOOK:
                print(
                    f"{name:10} {shape[:60]:60} {took[0]:8.3f} {took[1]:8.3f} {took[2]:8.3f} s  {growth:5.2f}",
                    flush=True,
                )
        print(f"{name:10} {len(small)} shapes, the slowest {worst:.2f} s for 1 MB", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
