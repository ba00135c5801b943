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
from awpo.data.mixture import Draw, numbers_to_take, stratum
from awpo.data.near_duplicates import (
    Sketches,
    bands_for,
    buckets_of,
    duplicates_of,
    similar_pairs,
    words_of,
    write_part,
)
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


def grouped(texts: dict[int, list[str]], folder: Path, cuts: list[int] | None = None, **changes: Any) -> set[int]:
    """The keys of those that stay; the texts are cut into parts at `cuts`."""
    folder.mkdir()
    config, items = NearDuplicatesConfig(**changes), list(texts.items())
    sketches = Sketches(config)
    bounds = [0, *(cuts or []), len(items)]
    for part, (start, end) in enumerate(itertools.pairwise(bounds)):
        inside = items[start:end]
        write_part(folder, part, [sketches.of(words) for _, words in inside], [key for key, _ in inside], config)
    sizes = np.diff(bounds).tolist()
    pairs = [similar_pairs(folder, sizes, bucket, config) for bucket in buckets_of(sizes, config)]
    gone = set(duplicates_of(folder, sizes, pairs).tolist())
    return {key for index, key in enumerate(texts) if index not in gone}


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
    assert grouped(texts, tmp_path / "seed", seed=5) == expected
    assert grouped(texts, tmp_path / "exact", threshold=1.0) == set(texts)
    monkeypatch.setattr(near_duplicates, "BUCKET_RECORDS", 20)  # many small buckets
    monkeypatch.setattr(near_duplicates, "PAIRS_AT_ONCE", 3)
    for number in range(6):
        shuffled = list(texts.items())
        draw.shuffle(shuffled)
        cuts = sorted(draw.sample(range(len(texts) + 1), number))
        assert grouped(dict(shuffled), tmp_path / str(number), cuts) == expected


def test_groups_hang_together_by_pairs_whatever_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains in which each text is like the next, and the last not like the first: what is joined is the same."""
    draw = random.Random(2)
    texts: dict[int, list[str]] = {}
    for chain in range(12):
        words = draw.choices(WORDS, k=120)
        for link in range(8):
            words = [*words[: link * 8], "link", str(link), *words[link * 8 + 2 :]]
            texts[draw.randrange(2**62)] = words
        assert jaccard(words, list(texts.values())[chain * 8]) < 0.8
    monkeypatch.setattr(near_duplicates, "BUCKET_RECORDS", 16)
    expected = grouped(texts, tmp_path / "first")
    assert 12 <= len(expected) < 60
    for number in range(8):
        shuffled = list(texts.items())
        draw.shuffle(shuffled)
        assert grouped(dict(shuffled), tmp_path / str(number), [number * 11]) == expected


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


def test_a_benchmark_that_nothing_would_be_compared_with_is_an_error(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", [{"question": "", "input": ""}, {"question": "Hi there."}])
    with pytest.raises(UserError, match="'mine' has no question of 5 words or more in question or input"):
        Contamination(DecontaminationConfig(benchmarks={"mine": BenchmarkText(path=path)}))
    with open(path, "a") as file:
        file.write('\n{"question": "What is pi to six digits?"}\n{"question": "What is\n')
    with pytest.raises(UserError, match="of benchmark 'mine': row 3 cannot be read"):
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


ranks_of_cells = st.lists(
    st.tuples(st.integers(-1, 3), st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1))), max_size=30
)


@given(st.lists(ranks_of_cells, min_size=1, max_size=3), st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_the_lowest_ranks_are_taken(parts: list[list[tuple[int, int]]], take: list[int]) -> None:
    arrays = [(np.array([p[0] for p in part], "i8"), np.array([p[1] for p in part], "u8")) for part in parts]
    draw = Draw()
    for cells, ranks in arrays:
        draw.count(cells, ranks)
    available = draw.available()
    draw.cut(take[: len(available)])
    for cells, ranks in arrays:
        draw.gather(cells, ranks)
    taken = [draw.taken(cells, ranks) for cells, ranks in arrays]
    pairs = [pair for part in parts for pair in part]
    chosen = [pair for part, mask in zip(parts, taken, strict=True) for pair in itertools.compress(part, mask)]
    for cell, count in enumerate(take):
        inside = sorted(rank for own, rank in pairs if own == cell)
        assert len(inside) == (available[cell] if cell < len(available) else 0)
        assert sorted(rank for own, rank in chosen if own == cell) == inside[:count]
    assert all(cell >= 0 for cell, _ in chosen)


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


def test_segments_have_the_tokens_of_the_whole(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from awpo.chat import render_prompt, render_target
    from awpo.data import lengths
    from awpo.data.inspect import read_any
    from awpo.embedded.tokenizer import train_tokenizer

    found = read_any(shared_data / "glaive" / "glaive_first200.json")
    instances = [item for item in found if isinstance(item, Instance)][:250]
    tokenizer = train_tokenizer(instances)
    texts = [render_prompt(tokenizer, item) + render_target(item.target, item.rationale) for item in instances]
    texts += [
        "",
        "<|im_end|>",
        "a<|im_start|><|im_start|> b",
        "<|im_start",
        "<think> no <|im_end|> \n",
        "é\u0301 \U0001f600",
    ]
    wanted = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    for kept in (lengths.CHARACTERS_KEPT, 0):
        monkeypatch.setattr(lengths, "CHARACTERS_KEPT", kept)
        segments = lengths.Segments.of(tokenizer)
        assert segments is not None
        for at in range(0, len(texts), 9):
            assert segments.count(texts[at : at + 9]) == wanted[at : at + 9]


def test_segments_are_not_counted_apart_where_they_are_not_independent() -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from awpo.data.lengths import Segments

    for strips, splitter, apart in (
        (False, pre_tokenizers.ByteLevel(), True),
        (True, pre_tokenizers.ByteLevel(), False),
        (False, pre_tokenizers.Metaspace(), False),
    ):
        backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        backend.pre_tokenizer = splitter
        backend.add_special_tokens([AddedToken("<s>", lstrip=strips, normalized=False)])
        assert (Segments.of(PreTrainedTokenizerFast(tokenizer_object=backend)) is not None) == apart


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
    none = SelectConfig(lengths=LengthConfig(tokenizer=str(tmp_path / "tokenizer"), most=1))
    with pytest.raises(UserError, match="nothing is left"):
        select_instances([folder], tmp_path / "none", none)
    assert not (tmp_path / "none").exists()
    # A tokenizer that has changed asks for other work.
    tokenizer.chat_template += " some more words"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    again = select_instances([folder], tmp_path / "out", config)
    assert again.counts["lengths"]["a"]["tokens"] > table["a"]["tokens"]
