"""The embedded corpus: reproducible, valid, copyable, its splits disjoint, its mix as promised."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from awpo.artifacts import read_manifest
from awpo.config import CorpusConfig
from awpo.embedded.catalogue import load_catalogue, slots_of
from awpo.embedded.corpus import DIALOGUES, dialogues, drafts, write_corpus
from awpo.embedded.plans import PLANS, Plan
from awpo.errors import UserError
from awpo.types import Dialogue, Message, canonical_json

CONFIG = CorpusConfig(seed=0, train_dialogues=1500, validation_dialogues=120, test_dialogues=150)
TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float)}


@pytest.fixture(scope="module")
def corpus() -> list[Dialogue]:
    return list(dialogues(CONFIG))


def of_split(corpus: list[Dialogue], *splits: str) -> list[Dialogue]:
    return [dialogue for dialogue in corpus if dialogue.split in splits]


def assistant_steps(dialogue: Dialogue) -> list[Message]:
    return [message for message in dialogue.messages if message.role == "assistant"]


def content_hashes(corpus: list[Dialogue]) -> set[str]:
    return {
        canonical_json([sorted(tool.name for tool in d.tools), [message.to_json() for message in d.messages]])
        for d in corpus
    }


SMALL = {"train_dialogues": 60, "validation_dialogues": 10, "test_dialogues": 10}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_corpus(tmp_path / name, CorpusConfig(seed=seed, **SMALL))
    read = {name: (tmp_path / name / DIALOGUES).read_bytes() for name in "abc"}
    assert read["a"] == read["b"]
    assert read["a"] != read["c"]


def test_a_longer_split_begins_with_the_shorter_one() -> None:
    short = of_split(list(dialogues(CorpusConfig(**SMALL))), "train")
    long = of_split(list(dialogues(CorpusConfig(**{**SMALL, "train_dialogues": 90}))), "train")
    assert long[:60] == short


def test_the_stage_leaves_a_manifest_and_is_not_done_twice(tmp_path: Path) -> None:
    config = CorpusConfig(**SMALL)
    seen: list[tuple[int, int]] = []
    manifest = write_corpus(tmp_path / "out", config, progress=lambda done, total, what="": seen.append((done, total)))
    assert seen[-1] == (90, 90)
    assert manifest.stage == "corpus"
    assert manifest.counts["dialogues"] == 90
    assert manifest.counts["splits"]["test_tools"]["dialogues"] == 10
    assert list(manifest.outputs) == [DIALOGUES]
    lines = (tmp_path / "out" / DIALOGUES).read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [dialogue.to_json() for dialogue in dialogues(config)]
    before = (tmp_path / "out" / DIALOGUES).stat().st_mtime_ns
    assert write_corpus(tmp_path / "out", config).fingerprint == manifest.fingerprint
    assert (tmp_path / "out" / DIALOGUES).stat().st_mtime_ns == before
    assert read_manifest(tmp_path / "out") == manifest


def test_every_call_matches_the_schema_of_a_tool_on_offer(corpus: list[Dialogue]) -> None:
    for dialogue in corpus:
        tools = {tool.name: tool for tool in dialogue.tools}
        assert len(tools) == len(dialogue.tools), "two tools of one name"
        for message in assistant_steps(dialogue):
            for call in message.tool_calls:
                schema = tools[call.name].parameters
                assert list(call.arguments) == schema["required"] == list(schema["properties"])
                for name, value in call.arguments.items():
                    assert isinstance(value, TYPES[schema["properties"][name]["type"]]), (dialogue.id, name, value)
                    assert not isinstance(value, bool)


def test_every_argument_stands_literally_in_what_was_said_before(corpus: list[Dialogue]) -> None:
    for dialogue in corpus:
        said = ""
        for message in dialogue.messages:
            for call in message.tool_calls:
                for value in call.arguments.values():
                    assert (value if isinstance(value, str) else json.dumps(value)) in said, (dialogue.id, value)
            said += f"\n{message.content or ''}"


def test_a_question_says_in_its_thought_what_is_missing(corpus: list[Dialogue]) -> None:
    thoughts = 0
    for dialogue in corpus:
        names = {(name, tool.name) for tool in dialogue.tools for name in tool.parameters["properties"]}
        for message in assistant_steps(dialogue):
            assert bool(message.thought) == (message.content or "").endswith("?")
            if message.thought:
                thoughts += 1
                fitting = [f"The user gave no {name} for {tool}, so I ask for it." for name, tool in names]
                assert message.thought in fitting
    assert thoughts > 100


def test_messages_are_in_order(corpus: list[Dialogue]) -> None:
    for dialogue in corpus:
        assert dialogue.messages[0].role == "user"
        assert dialogue.messages[-1].role == "assistant"
        due = 0  # results that the last calls still wait for
        for message in dialogue.messages:
            if message.role == "tool":
                due -= 1
                assert isinstance(json.loads(message.content or ""), dict)
            else:
                assert due == 0, dialogue.id
            if message.role == "assistant":
                assert bool(message.tool_calls) != bool(message.content)
                due = len(message.tool_calls)


def test_replies_and_offers_have_the_promised_size(corpus: list[Dialogue]) -> None:
    for dialogue in corpus:
        assert 3 <= len(dialogue.tools) <= 4
        assert all(len((message.content or "").split()) <= 10 for message in assistant_steps(dialogue))
        called = {call.name for message in dialogue.messages for call in message.tool_calls}
        assert called < {tool.name for tool in dialogue.tools}, "no tool that is not needed"


def test_splits_share_no_dialogue(corpus: list[Dialogue]) -> None:
    train = of_split(corpus, "train")
    others = [d for d in corpus if d.split != "train"]
    assert len(content_hashes(corpus)) == len(corpus)
    assert content_hashes(train).isdisjoint(content_hashes(others))
    assert len({dialogue.id for dialogue in corpus}) == len(corpus)


def test_no_other_split_opens_with_a_sentence_of_train() -> None:
    openings: dict[bool, set[str | None]] = {True: set(), False: set()}
    for split, draft in drafts(CONFIG):
        if slots_of(draft.templates[0]):  # those without values are the same everywhere
            openings[split == "train"].add(draft.messages[0].content)
    assert openings[True].isdisjoint(openings[False])


def test_phrasings_of_the_phrasings_split_are_never_used_elsewhere() -> None:
    used: dict[str, set[str]] = {}
    for split, draft in drafts(CONFIG):
        used.setdefault(split, set()).update(draft.templates)
    assert len(used["test_phrasings"]) > 100
    assert used["test_phrasings"].isdisjoint(used["train"] | used["validation"] | used["test_tools"])
    assert len(used["validation"] & used["train"]) > 0.8 * len(used["validation"])  # train is a small one here


def test_tools_of_the_tools_split_are_never_shown_elsewhere(corpus: list[Dialogue]) -> None:
    def texts(tools: list[Any]) -> set[str]:
        return {tool.name for tool in tools} | {tool.description for tool in tools}

    known = [tool for d in corpus if d.split != "test_tools" for tool in d.tools]
    unseen = [tool for d in of_split(corpus, "test_tools") for tool in d.tools]
    assert texts(known).isdisjoint(texts(unseen))
    parameters = {name for tool in known for name in tool.parameters["properties"]}
    assert parameters.isdisjoint(name for tool in unseen for name in tool.parameters["properties"])
    assert len({tool.name for tool in unseen}) >= 8


def test_train_shows_every_seen_tool_by_its_usual_name_and_most_by_others(corpus: list[Dialogue]) -> None:
    seen = [spec for spec in load_catalogue().tools if not spec.unseen]
    usual, every = {spec.names[0] for spec in seen}, {name for spec in seen for name in spec.names}
    names = [tool.name for dialogue in of_split(corpus, "train") for tool in dialogue.tools]
    assert usual <= set(names) <= every
    assert len(set(names)) > 0.9 * len(every)
    assert 0.8 < sum(name in usual for name in names) / len(names) < 0.97


@pytest.mark.parametrize("split", ["train", "validation", "test_phrasings", "test_tools"])
def test_the_mix_of_depths_and_kinds(corpus: list[Dialogue], split: str) -> None:
    chosen = of_split(corpus, split)
    depths = Counter(len(assistant_steps(dialogue)) for dialogue in chosen)
    assert set(depths) == {1, 2, 3, 4, 5}
    tolerance = 0.04 if split == "train" else 0.12
    for low, high, share in ((1, 1, 0.45), (2, 2, 0.30), (3, 5, 0.25)):
        assert sum(depths[d] for d in range(low, high + 1)) / len(chosen) == pytest.approx(share, abs=tolerance)
    steps = [message for dialogue in chosen for message in assistant_steps(dialogue)]
    assert sum(bool(step.tool_calls) for step in steps) / len(steps) == pytest.approx(0.66, abs=tolerance)
    sizes = Counter(len(step.tool_calls) for step in steps)
    assert set(sizes) == {0, 1, 2, 3}
    assert 0.05 < (sizes[2] + sizes[3]) / len(steps) < 0.2


def test_replies_that_follow_no_result_are_a_good_part_of_all_replies(corpus: list[Dialogue]) -> None:
    unprompted, replies = 0, 0
    for dialogue in of_split(corpus, "train"):
        for before, message in zip(dialogue.messages, dialogue.messages[1:], strict=False):
            if message.role == "assistant" and not message.tool_calls:
                replies += 1
                unprompted += before.role == "user"
    assert 0.3 < unprompted / replies < 0.7


def test_plans_add_up_to_all_dialogues() -> None:
    assert sum(plan.weight for plan in PLANS) == pytest.approx(100)


def test_a_split_too_large_for_the_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awpo.embedded.plans.PLANS", (Plan(100, 1, ("single",)),))
    monkeypatch.setattr("awpo.embedded.corpus._ATTEMPTS", 1)
    with pytest.raises(UserError, match="ask for fewer"):
        list(dialogues(CorpusConfig(train_dialogues=500, validation_dialogues=300, test_dialogues=1)))
