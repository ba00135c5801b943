"""Instances as a person reads them, and counts of what a set of them holds. Nothing is written but what is returned.

Everything is drawn with rich into whatever console the caller has: colours in a terminal, plain text elsewhere, a page
of HTML that needs no other file. Text of a source is never read as markup, and its control characters are shown, not
obeyed.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from awpo.artifacts import read_manifest
from awpo.data.decompose import decompose
from awpo.data.rows import Rows
from awpo.data.sources import Rejected, RowError, detect, get_source, read_row
from awpo.data.store import iterate_instances
from awpo.errors import UserError
from awpo.types import Instance, Message, Tool, ToolCall

LONGEST_TEXT = 1200
LONGEST_LINE = 300
MOST_TOOLS = 12
PAGE_WIDTH = 100
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)


def read_any(path: Path, format: str = "auto") -> Iterator[Instance | Rejected]:
    """The instances of a folder or shard of them, or those that a source's rows would become.

    Rows that cannot be used come as rejected; repetitions are not looked for. Raises UserError where nothing can be
    read.
    """
    if _holds_instances(path):
        yield from iterate_instances(path)
        return
    if path.is_dir() and (made := read_manifest(path)):
        raise UserError(f"{path} is the result of the stage {made.stage!r}, which holds no instances-*.parquet")
    source = get_source(detect(path) if format == "auto" else format)
    for row in Rows(path):
        item = read_row(row, source)
        if isinstance(item, Rejected):
            yield item
            continue
        try:
            yield from decompose(item, last_step_only=source.last_step_only)
        except RowError as error:
            yield Rejected(row.number, error.reason, error.detail, row.file)


def _holds_instances(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("instances-*.parquet"))
    return path.suffix == ".parquet" and path.name.startswith("instances-")


def length_of(instance: Instance) -> int:
    """Characters of tools, prompt and target, as JSON: a measure that needs no tokenizer."""
    tools = json.dumps([tool.to_json() for tool in instance.tools], ensure_ascii=False)
    messages = json.dumps([message.to_json() for message in (*instance.prompt, instance.target)], ensure_ascii=False)
    return len(tools) + len(messages)


@dataclass
class Summary:
    """Counts over instances, gathered one by one."""

    instances: int = 0
    source: Counter[str] = field(default_factory=Counter)
    kind: Counter[str] = field(default_factory=Counter)
    split: Counter[str] = field(default_factory=Counter)
    depth: Counter[int] = field(default_factory=Counter)
    length: Counter[int] = field(default_factory=Counter)
    offered: Counter[int] = field(default_factory=Counter)
    called: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    with_rationale: int = 0

    def add(self, instance: Instance) -> None:
        self.instances += 1
        self.source[instance.source] += 1
        self.kind[instance.kind] += 1
        self.split[instance.split] += 1
        self.depth[instance.step + 1] += 1
        length = length_of(instance)
        self.length[next((bound for bound in _LENGTHS if length <= bound), 0)] += 1
        self.offered[len(instance.tools)] += 1
        self.called.update(call.name for call in instance.target.tool_calls)
        self.with_rationale += bool(instance.rationale)

    def to_json(self) -> dict[str, Any]:
        """The counts, the most frequent first; lengths by their upper bound in characters, steps and tools in order."""
        lengths = {str(bound): self.length[bound] for bound in _LENGTHS if self.length[bound]}
        if self.length[0]:
            lengths["more"] = self.length[0]
        return {
            "instances": self.instances,
            "with_rationale": self.with_rationale,
            "source": dict(self.source.most_common()),
            "kind": dict(self.kind.most_common()),
            "split": dict(self.split.most_common()),
            "depth": dict(sorted(self.depth.items())),
            "length": lengths,
            "offered": dict(sorted(self.offered.items())),
            "called": dict(self.called.most_common()),
            "rejected": dict(self.rejected.most_common()),
        }


def inspect_instances(
    items: Iterable[Instance | Rejected], *, number: int = 3, kind: str | None = None, source: str | None = None
) -> tuple[list[Instance], Summary]:
    """The first `number` instances of a kind and a source (None: of any), and counts over all of those.

    A source is also meant by the beginning of its label, up to the mark of a mask: "xlam" is "xlam+functions", too.
    """
    chosen: list[Instance] = []
    summary = Summary()
    for item in items:
        if isinstance(item, Rejected):
            summary.rejected[item.reason] += 1
            continue
        if kind is not None and item.kind != kind:
            continue
        if source is not None and item.source != source and not item.source.startswith(f"{source}+"):
            continue
        summary.add(item)
        if len(chosen) < number:
            chosen.append(item)
    return chosen, summary


# Drawing


def clean(text: str) -> str:
    """The text with characters that would steer a terminal written out."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def _short(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit].rstrip()} … ({len(text) - limit} more characters)"


def _line(text: str, limit: int | None) -> str:
    return _short(" ".join(text.split()), limit)


def _parameters(tool: Tool) -> str:
    """A tool's parameters in one line: `city: string, days?: integer`; those not required have a question mark."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or []
    parts = []
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
        words = "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)
        parts.append(f"{name}{'' if name in required else '?'}: {words}")
    return ", ".join(parts)


def _draw_tool(tool: Tool, limit: int | None) -> Text:
    text = Text("• ", style="dim")
    text.append(clean(tool.name), style="bold")
    text.append(clean(f"({_line(_parameters(tool), limit)})"), style="dim")
    if tool.description:
        text.append(clean(f"  {_line(tool.description, limit)}"))
    return text


def _draw_call(call: ToolCall, limit: int | None) -> Text:
    text = Text("→ ", style="bold green")
    text.append(clean(call.name), style="bold")
    for name, value in call.arguments.items():
        shown = _short(json.dumps(value, ensure_ascii=False), limit)
        text.append(f"\n    {clean(name)}", style="blue")
        text.append(f" = {clean(shown)}")
    return text


def _draw_message(message: Message, limit: int | None, thought: str | None = None) -> RenderableType:
    parts: list[RenderableType] = []
    if thought:
        parts.append(Text(clean(_short(thought.strip(), limit)), style="italic dim"))
    if message.content:
        parts.append(Text(clean(_short(message.content.strip("\n"), limit))))
    parts += [_draw_call(call, limit) for call in message.tool_calls]
    name = f" {clean(message.name)}" if message.name else ""
    head = Text(f"{message.role}{name}", style=f"bold {_STYLES[message.role]}")
    return Group(head, *(Padding(part, (0, 0, 0, 2), expand=False) for part in parts))


def draw_instance(instance: Instance, *, whole: bool = False) -> RenderableType:
    """One instance: where it is from, its tools, the messages before it, its rationale and its target.

    Long texts and long lists of tools are cut, with what is left out counted, unless `whole`.
    """
    text_limit, line_limit = (None, None) if whole else (LONGEST_TEXT, LONGEST_LINE)
    title = f"{instance.source} · {instance.kind} · step {instance.step + 1} of {instance.steps} · {instance.split}"
    tools = instance.tools if whole else instance.tools[:MOST_TOOLS]
    more = len(instance.tools) - len(tools)
    return Group(
        Rule(Text(clean(title), style="bold"), align="left"),
        Text(clean(f"instance {instance.id} of dialogue {instance.dialogue_id}"), style="dim"),
        Text(f"{len(instance.tools)} tools" if len(instance.tools) != 1 else "1 tool", style="bold"),
        *(Padding(_draw_tool(tool, line_limit), (0, 0, 0, 2), expand=False) for tool in tools),
        *([Text(f"  … {more} more tools", style="dim")] if more else []),
        *(_draw_message(message, text_limit) for message in instance.prompt),
        Rule(Text("target", style="bold green"), align="left", style="green", characters="╌"),
        _draw_message(instance.target, text_limit, instance.rationale),
        Text(""),
    )


def _counts(title: str, counts: Iterable[tuple[Any, int]], total: int) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(overflow="fold", max_width=48)
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for name, count in counts:
        table.add_row(Text(clean(str(name))), f"{count:,}", f"{100 * count / max(total, 1):.1f} %")
    return Group(Text(title, style="bold"), Padding(table, (0, 0, 1, 2), expand=False))


def draw_summary(summary: Summary) -> RenderableType:
    """The counts as tables, one after the other."""
    total = summary.instances
    lengths = [(f"up to {bound:,}", summary.length[bound]) for bound in _LENGTHS if summary.length[bound]]
    if summary.length[0]:
        lengths.append((f"over {_LENGTHS[-1]:,}", summary.length[0]))
    head = f"{total:,} instances, {summary.with_rationale:,} with a rationale"
    parts: list[RenderableType] = [
        Rule(Text(head, style="bold"), align="left"),
        Text(""),
        _counts("source", summary.source.most_common(), total),
        _counts("kind", summary.kind.most_common(), total),
        _counts("split", summary.split.most_common(), total),
        _counts("depth (step in its dialogue)", sorted(summary.depth.items()), total),
        _counts("length (characters of tools, prompt and target)", lengths, total),
        _counts("tools on offer", sorted(summary.offered.items()), total),
    ]
    if summary.called:
        calls = summary.called.total()
        named = f"tools called: {len(summary.called):,} in {calls:,} calls, the most frequent"
        parts.append(_counts(named, summary.called.most_common(10), calls))
    if summary.rejected:
        rows = summary.rejected.total()
        parts.append(_counts(f"rows that cannot be used: {rows:,}", summary.rejected.most_common(), rows))
    return Group(*parts)


def draw(instances: Iterable[Instance], summary: Summary, *, whole: bool = False) -> RenderableType:
    """Instances, then counts."""
    return Group(*(draw_instance(instance, whole=whole) for instance in instances), draw_summary(summary))


def to_html(drawn: RenderableType, title: str) -> str:
    """A page with what was drawn; it needs no other file."""
    console = Console(record=True, width=PAGE_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(drawn)
    page = console.export_html(inline_styles=True)
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    return page.replace("<head>", f"<head>\n<title>{escaped}</title>", 1)
