"""What is taken of instances: near-duplicates, overlap with benchmarks, lengths, mixtures."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awpo.artifacts import open_stage
from awpo.data import near_duplicates
from awpo.data.contamination import Contamination, asked_in
from awpo.data.mixture import choose, numbers_to_take, stratum
from awpo.data.near_duplicates import NearDuplicates, bands_for, words_of
from awpo.data.selection import select_instances
from awpo.data.settings import (
    BenchmarkText,
    DecontaminationConfig,
    MixtureConfig,
    NearDuplicatesConfig,
    SelectConfig,
)
from awpo.data.store import read_instances, write_instances
from awpo.errors import UserError
from awpo.types import Dialogue, Instance, Message, Tool, ToolCall

WORDS = [f"word{number}" for number in range(500)]


def jaccard(one: list[str], other: list[str], size: int = 3) -> float:
    first, second = ({tuple(words[at : at + size]) for at in range(len(words) - size + 1)} for words in (one, other))
    return len(first & second) / len(first | second)


def grouped(texts: dict[int, list[str]], folder: Path, **changes: Any) -> set[int]:
    """The keys of those that stay."""
    near = NearDuplicates(NearDuplicatesConfig(**changes), folder, len(texts))
    for key, words in texts.items():
        near.add(words, key)
    return set(itertools.compress(texts, ~near.duplicates()))


def test_near_duplicates_are_found_whatever_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    texts: dict[int, list[str]] = {}
    for number in range(60):
        words = draw.choices(WORDS, k=100)
        texts[1000 + number] = words
        near = [*words[:50], "changed", *words[51:]]
        assert jaccard(words, near) > 0.93
        texts[2000 + number] = near
        far = [*words[:55], *draw.choices(WORDS, k=45)]
        assert jaccard(words, far) < 0.5
        texts[3000 + number] = far
    expected = {key for key in texts if not 2000 <= key < 3000}
    assert grouped(texts, tmp_path / "a") == expected
    shuffled = list(texts.items())
    draw.shuffle(shuffled)
    monkeypatch.setattr(near_duplicates, "BUFFER", 7)
    monkeypatch.setattr(near_duplicates, "BUCKET_RECORDS", 20)  # many small files
    assert grouped(dict(shuffled), tmp_path / "b") == expected
    assert grouped(dict(shuffled), tmp_path / "c", seed=5) == expected
    assert grouped(texts, tmp_path / "d", threshold=1.0) == set(texts)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_the_bands_let_similar_pairs_meet(threshold: float) -> None:
    bands, rows = bands_for(threshold, 128)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands > 0.5
    assert 1 - (1 - min(1, threshold + 0.05) ** rows) ** bands > 0.7


def write_questions(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_overlap_is_words_in_a_row(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten"
    path = write_questions(
        tmp_path / "q.jsonl", [{"question": long}, {"question": "What is pi to six digits?"}, {"question": "Hi."}]
    )
    config = DecontaminationConfig(benchmarks={"mine": BenchmarkText(path=path)})
    found = Contamination(config)
    assert found.questions == {"mine": 2}
    assert found.find(["Zero, ONE two-three four five six (seven) eight!"]) == ["mine"]
    assert found.find(["two three four five six seven eight nine"]) == ["mine"]
    assert found.find(["two three four five six seven eight", "nine ten"]) == []
    assert found.find(["Tell me: what is pi to six digits, please"]) == ["mine"]
    assert found.find(["what is pi to six"]) == []
    assert found.find([]) == []


def test_what_is_asked_in_a_benchmarks_row() -> None:
    turns = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
    ]
    assert list(asked_in(turns)) == ["a", "b"]
    assert [text.strip() for text in asked_in("User: one\nAI: two\nUser: three\n")] == ["one", "three"]
    assert list(asked_in("plain")) == ["plain"]


def test_the_real_benchmarks_are_read(shared_data: Path) -> None:
    benchmarks = {
        "bfcl": BenchmarkText(path="bfcl"),
        "api-bank": BenchmarkText(path=str(shared_data / "api-bank" / "level-1-api.json")),
        "mmlu-pro": BenchmarkText(path=str(shared_data / "mmlu-pro" / "test.jsonl.gz")),
    }
    found = Contamination(DecontaminationConfig(benchmarks=benchmarks))
    assert all(found.questions.values())
    assert found.find(["Find the area of a triangle with a base of 10 units and height of 5 units."]) == ["bfcl"]
    mmlu = "Typical advertising regulatory bodies suggest, for example that adverts must not: encourage"
    assert found.find([mmlu]) == ["mmlu-pro"]
    assert found.find(["Please book me a table for seven people at the harbour next Tuesday evening."]) == []


def test_a_benchmark_without_its_field(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match="no row with question or input"):
        Contamination(DecontaminationConfig(benchmarks={"mine": BenchmarkText(path=path)}))


def test_strata() -> None:
    assert [stratum(steps) for steps in (1, 2, 3, 4, 9)] == ["1", "2-3", "2-3", "4+", "4+"]


def test_shares_are_those_asked_for() -> None:
    available = {("a", "1"): 100, ("a", "4+"): 300, ("b", "1"): 50}
    take = numbers_to_take(available, MixtureConfig(sources={"a": 3, "b": 1}))
    assert take == {("a", "1"): 37, ("a", "4+"): 112, ("b", "1"): 50}  # of 37.5, 112.5 and 50
    take = numbers_to_take(available, MixtureConfig(steps={"1": 1, "4+": 1}, sources={"a": 1, "b": 0}))
    assert take == {("a", "1"): 100, ("a", "4+"): 100, ("b", "1"): 0}
    take = numbers_to_take(available, MixtureConfig(dialogues=45))
    assert take == {("a", "1"): 10, ("a", "4+"): 30, ("b", "1"): 5}
    assert sum(numbers_to_take(available, MixtureConfig()).values()) == 450
    with pytest.raises(UserError, match="no weight of b"):
        numbers_to_take(available, MixtureConfig(sources={"a": 1}))
    with pytest.raises(UserError, match="leaves nothing"):
        numbers_to_take(available, MixtureConfig(steps={"2-3": 1}))


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), max_size=30))
def test_the_lowest_ranks_are_taken(pairs: list[tuple[int, int]]) -> None:
    cells, ranks = np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], int)
    taken = choose(cells, ranks, [1, 2, 0, 50])
    for cell, count in enumerate([1, 2, 0, 50]):
        inside = sorted(rank for own, rank in pairs if own == cell)
        assert sorted(ranks[taken & (cells == cell)].tolist()) == inside[:count]
    assert taken[cells == -1].all()


TOOLS = (Tool("f", "", {"type": "object", "properties": {}}),)


def instances_of(number: int, steps: int, source: str, split: Any, text: str) -> list[Instance]:
    from awpo.data.decompose import decompose

    messages: list[Message] = []
    for step in range(steps):
        messages += [Message("user", f"{text} {step}"), Message("assistant", f"Answer {number} {step} " + text[::-1])]
    messages[1] = Message("assistant", None, (ToolCall("f", {}),))
    if steps > 1:
        messages.insert(2, Message("tool", "ok"))
    return decompose(Dialogue(f"d{number}", source, TOOLS, tuple(messages), split))


def folder_of(path: Path, dialogues: list[list[Instance]]) -> Path:
    with open_stage(path, "decompose", {}, {"n": len(dialogues)}) as stage:
        write_instances(path, [instance for found in dialogues for instance in found])
        stage.finish()
    return path


def test_the_stage(tmp_path: Path) -> None:
    draw = random.Random(0)
    dialogues = []
    for number in range(40):
        text = " ".join(draw.choices(WORDS, k=40))
        dialogues.append(
            instances_of(number, 1 + number % 4, "ab"[number % 2], "test" if number < 4 else "train", text)
        )
    copied = dialogues[1][0].prompt[0].content or ""
    dialogues.append(instances_of(1, 2, "c", "train", copied.removesuffix(" 0")))  # as number 1, of the test split
    asked = dialogues[9][0].prompt[0].content or ""
    path = write_questions(tmp_path / "q.jsonl", [{"question": " ".join(asked.split()[3:15])}])
    decontamination = DecontaminationConfig(benchmarks={"mine": BenchmarkText(path=path)})
    folder = folder_of(tmp_path / "in", dialogues)
    config = SelectConfig(near_duplicates=NearDuplicatesConfig(), decontamination=decontamination)
    manifest = select_instances([folder], tmp_path / "out", config)
    left = {instance.dialogue_id + instance.source for instance in read_instances(tmp_path / "out")}
    assert left == {f"d{number}{'ab'[number % 2]}" for number in range(40) if number != 9}
    assert manifest.counts["near_duplicates"] == {"c": 1}
    assert manifest.counts["contaminated"] == {"b": {"mine": 1}}
    [line] = (tmp_path / "out" / "contaminated.jsonl").read_text().splitlines()
    assert json.loads(line) == {"dialogue": "d9", "source": "b", "split": "train", "benchmarks": ["mine"]}
    # The order is that of the input, and whole rows are left out, nothing else.
    everything = [instance for found in dialogues for instance in found]
    assert read_instances(tmp_path / "out") == [i for i in everything if i.dialogue_id + i.source in left]
    assert not (tmp_path / "out" / ".select").exists()


def test_the_stage_takes_a_mixture_of_several_folders(tmp_path: Path) -> None:
    def some(source: str, numbers: range) -> list[list[Instance]]:
        return [
            instances_of(n, 1 + n % 2, source, "validation" if n < 3 else "train", f"{source}{n} text") for n in numbers
        ]

    one, two = folder_of(tmp_path / "1", some("a", range(33))), folder_of(tmp_path / "2", some("b", range(13)))
    config = SelectConfig(mixture=MixtureConfig(sources={"a": 2, "b": 1}))
    counts = select_instances([one, two], tmp_path / "out", config).counts
    assert counts["mixture"] == {"a · 1": 10, "a · 2-3": 10, "b · 1": 5, "b · 2-3": 5}
    read = read_instances(tmp_path / "out")
    assert sum(instance.split == "validation" for instance in read) == 4 + 4  # 3 dialogues each, of 1, 2 and 1 steps
    # The same dialogues whatever the order of folders; another seed takes others.
    select_instances([two, one], tmp_path / "turned", config)
    assert {i.id for i in read_instances(tmp_path / "turned")} == {i.id for i in read}
    other = SelectConfig(mixture=MixtureConfig(sources={"a": 2, "b": 1}, seed=1))
    select_instances([one, two], tmp_path / "other", other)
    assert {i.id for i in read_instances(tmp_path / "other")} != {i.id for i in read}


def test_words() -> None:
    assert words_of("Don't  stop, É-1!") == ["don", "t", "stop", "é", "1"]


def test_instances_that_are_too_long_go(tmp_path: Path) -> None:
    from awpo.chat import render_prompt, render_target
    from awpo.data.settings import LengthConfig
    from awpo.embedded.tokenizer import train_tokenizer

    dialogues = [instances_of(n, 2, "ab"[n % 2], "train", " ".join(WORDS[: 3 * n + 1])) for n in range(12)]
    everything = [instance for found in dialogues for instance in found]
    tokenizer = train_tokenizer(everything)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    # Counted another way: token by token as the model would be given them.
    lengths = [
        len(tokenizer(render_prompt(tokenizer, item) + render_target(item.target, item.rationale)).input_ids)
        for item in everything
    ]
    most = sorted(lengths)[15]
    folder = folder_of(tmp_path / "in", dialogues)
    config = SelectConfig(lengths=LengthConfig(tokenizer=str(tmp_path / "tokenizer"), most=most))
    counts = select_instances([folder], tmp_path / "out", config).counts
    fitting = [item for item, length in zip(everything, lengths, strict=True) if length <= most]
    assert read_instances(tmp_path / "out") == fitting
    assert 0 < len(fitting) < 24
    table = counts["lengths"]
    assert table["a"]["tokens"] + table["b"]["tokens"] == sum(lengths)
    assert max(table["a"]["longest"], table["b"]["longest"]) == max(lengths)
    assert table["a"]["too_long"] + table["b"]["too_long"] == 24 - len(fitting)
    assert sum(table["a"]["up_to"].values()) == table["a"]["instances"] == 12
    with pytest.raises(UserError, match="is no folder"):
        select_instances([folder], tmp_path / "no", SelectConfig(lengths=LengthConfig(tokenizer="nowhere")))
