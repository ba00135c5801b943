"""Flipped items: which they are, what could not be compared, and that hostile outputs stay text."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from evaluation.compare import EvaluationRun
from evaluation.diff import find_flips, write_html
from evaluation.items import Item

HOSTILE = "<script>alert(1)</script></pre> & <tool_call>"


def item(name: str, correct: bool | None, **fields: object) -> Item:
    made = Item("held_out", "test", name, name, "made", 0, 1, "call", -1, correct, f"{name}: said", 3, False)
    return replace(made, **{"prompt_hash": f"hash of {name}", **fields})  # type: ignore[arg-type]


def run(name: str, *items: Item) -> EvaluationRun:
    return EvaluationRun(Path(name), items, {}, {})


ONE = run(
    "one",
    item("kept", True),
    item("broken", True),
    item("fixed", False, completion=HOSTILE, detail="<b>why</b>"),
    item("never asked", True),
    item("unanswered", True),
    replace(item("kept", False), sample=0),
    replace(item("other part", False), split="validation"),
)
TWO = run(
    "two",
    item("fixed", True),
    item("broken", False, prompt_hash="another"),
    item("kept", True),
    item("unanswered", None),
    replace(item("kept", True), sample=0),
    item("new", True),
    replace(item("other part", True), split="validation"),
)


def test_flips_are_greedy_items_with_another_verdict() -> None:
    found = find_flips(ONE, TWO)
    assert [(flip.first.item_id, flip.change, flip.same_question) for flip in found.flips] == [
        ("broken", "broken", False),
        ("fixed", "fixed", True),
        ("other part", "fixed", True),
    ]
    assert found.counts() == [
        {
            "part": "held_out/test",
            "compared": 3,
            "fixed": 1,
            "broken": 1,
            "unanswered": 1,
            "only_first": 1,
            "only_second": 1,
        },
        {
            "part": "held_out/validation",
            "compared": 1,
            "fixed": 1,
            "broken": 0,
            "unanswered": 0,
            "only_first": 0,
            "only_second": 0,
        },
    ]


def test_the_other_way_round_what_was_fixed_is_broken() -> None:
    there, back = find_flips(ONE, TWO), find_flips(TWO, ONE)
    assert {(flip.first.item_id, flip.change) for flip in back.flips} == {
        (flip.first.item_id, "broken" if flip.change == "fixed" else "fixed") for flip in there.flips
    }
    assert find_flips(ONE, ONE).flips == ()


def test_json_has_both_outputs() -> None:
    flipped = find_flips(ONE, TWO).to_json()["flipped"][1]
    assert flipped["first"] == {
        "correct": False,
        "output": HOSTILE,
        "error_type": "",
        "detail": "<b>why</b>",
        "finish": "stop",
    }
    assert (flipped["id"], flipped["change"], flipped["second"]["output"]) == ("fixed", "fixed", "fixed: said")


class Reader(HTMLParser):
    """Tags, and the text inside of `pre`."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outputs: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "pre":
            self.outputs.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "pre":
            self.outputs[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")


def test_the_page_shows_outputs_as_text_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_html(find_flips(ONE, TWO), tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text("utf-8")
    reader = Reader()
    reader.feed(text)
    assert not {"script", "b", "img", "link"} & set(reader.tags)
    assert HOSTILE in reader.outputs
    assert len(reader.outputs) == 6
    assert "http" not in text
    assert "The two were asked different questions." in text
