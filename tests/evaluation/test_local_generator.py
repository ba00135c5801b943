"""Generation: against a plain loop over the model, independent of batches, repeatable, and honest about its ends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import awpo.decoding
import awpo.prompt_memory
from awpo.decoding import choose
from awpo.endpoint_cache import EndpointCache
from awpo.errors import UserError
from awpo.types import Message
from evaluation.generate import Question, Sampling
from evaluation.local_generator import LocalGenerator

PROMPTS = ["a", "Weather in Oslo?", "xyz " * 30, "Call <tool_call> me", "Weather in Oslo? " * 9, "é€ß", "b"]


@pytest.fixture(scope="module")
def generator(checkpoint: Path) -> LocalGenerator:
    return LocalGenerator(checkpoint, threads=1)


def greedy_by_hand(checkpoint: Path, ids: list[int], count: int) -> list[int]:
    """`count` tokens by the largest logit of a forward pass over the whole text: no cache, padding or batch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    text = list(ids)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_greedy_in_a_padded_batch_is_what_the_bare_model_says(checkpoint: Path, generator: LocalGenerator) -> None:
    answers = generator.generate(PROMPTS, Sampling(max_tokens=12))
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        expected = greedy_by_hand(checkpoint, generator.tokenizer(prompt)["input_ids"], 12)
        ends = [place for place, token in enumerate(expected) if token in generator.end_ids]
        expected = expected[: ends[0] + 1] if ends else expected
        assert answer.tokens == len(expected)
        assert answer.text == generator._text(expected)
    assert len({answer.text for (answer,) in answers}) == len(PROMPTS)  # the prompts matter


def test_layers_with_a_sliding_window_see_their_window_alone(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    generator = LocalGenerator(folder, threads=1)
    assert set(generator.model.config.layer_types) == {"full_attention", "sliding_attention"}
    answers = generator.generate(PROMPTS, Sampling(max_tokens=12))
    expected = [greedy_by_hand(folder, generator.tokenizer(prompt)["input_ids"], 12) for prompt in PROMPTS]
    for row, (answer,) in zip(expected, answers, strict=True):
        assert answer.text == generator._text(row[: answer.tokens])
        assert answer.tokens == 12 or row[answer.tokens - 1] in generator.end_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_size_and_order_change_nothing(generator: LocalGenerator, temperature: float) -> None:
    sized = copy(generator)

    def run(prompts: list[str], size: int) -> list[list[object]]:
        sized.batch_size = size
        found = sized.generate(prompts, Sampling(samples=3, temperature=temperature, max_tokens=16))
        return [list(samples) for samples in found]

    together = run(PROMPTS, 64)
    assert run(PROMPTS, 1) == together
    assert run(PROMPTS, 5) == together
    assert run(PROMPTS[::-1], 4)[::-1] == together


def test_memory_set_aside_changes_nothing(generator: LocalGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    free = generator.generate(PROMPTS, Sampling(samples=2, temperature=1.0, max_tokens=8))
    monkeypatch.setattr(awpo.decoding, "CACHE_BYTES", 1)
    monkeypatch.setattr(awpo.prompt_memory, "PREFILL_TOKENS", {"cpu": 1, "cuda": 1})
    sizes = [len(batch) for batch in generator.decoder._batches(generator._rows(PROMPTS, Sampling(2, 1.0, 8))[0], 64)]
    assert set(sizes) == {1}
    assert generator.generate(PROMPTS, Sampling(samples=2, temperature=1.0, max_tokens=8)) == free


def test_the_seed_decides(generator: LocalGenerator) -> None:
    def run(seed: int) -> list[str]:
        found = generator.generate(PROMPTS, Sampling(samples=4, temperature=1.0, max_tokens=16, seed=seed))
        return [answer.text for samples in found for answer in samples]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_samples_differ_from_each_other_and_between_equal_prompts(generator: LocalGenerator) -> None:
    first, second = generator.generate(["same", "same"], Sampling(samples=4, temperature=1.0, max_tokens=16))
    assert len({answer.text for answer in [*first, *second]}) == 8


def test_greedy_beside_samples_is_greedy(generator: LocalGenerator) -> None:
    alone = generator.generate(PROMPTS, Sampling(max_tokens=16))
    sampled = generator.generate(PROMPTS, Sampling(samples=2, temperature=1.0, max_tokens=16))
    both = generator.generate(PROMPTS, Sampling(samples=2, temperature=1.0, max_tokens=16, with_greedy=True))
    assert both == [[*greedy, *samples] for greedy, samples in zip(alone, sampled, strict=True)]


def test_sampling_follows_the_model_at_the_temperature() -> None:
    """60,000 draws from three tokens; a token of probability zero is never drawn."""
    count, temperature = 60_000, 0.5
    logits = torch.tensor([[0.0, -float("inf"), 1.0, 0.5]]).expand(count, -1)
    uniform = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = choose(logits, uniform, torch.ones(count, dtype=torch.bool), temperature)[0][:, 0]
    shares = torch.bincount(drawn, minlength=4) / count
    expected = (logits[0] / temperature).softmax(-1)
    assert shares[1] == 0
    assert torch.allclose(shares, expected, atol=0.01)  # five standard deviations
    edges = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert choose(logits[:2], edges, torch.ones(2, dtype=torch.bool), 1.0)[0][:, 0].tolist() == [0, 3]


def test_an_end_token_ends_its_row_and_no_other(checkpoint: Path, make_checkpoint: Callable[..., Path]) -> None:
    """With a token declared as the end that only some answers hold, those are cut there and the others go on."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    expected = [greedy_by_hand(checkpoint, tokenizer(prompt)["input_ids"], 16) for prompt in PROMPTS]
    counts = Counter(token for row in expected for token in set(row))
    end = next(token for token, rows in counts.most_common() if rows < len(PROMPTS))
    generator = LocalGenerator(make_checkpoint(eos_token_id=end), threads=1)
    answers = [answer for (answer,) in generator.generate(PROMPTS, Sampling(max_tokens=16))]
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for row, answer in zip(expected, answers, strict=True):
        place = row.index(end) if end in row else None
        assert answer.finish == ("length" if place is None else "stop")
        assert answer.tokens == (16 if place is None else place + 1)
        assert answer.text == generator._text(row[:place])


def test_tags_stay_and_control_tokens_go(generator: LocalGenerator) -> None:
    text = "<think>\nso\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = generator.tokenizer(text + "<|im_end|><|endoftext|>")["input_ids"]
    assert generator._text(ids) == text


def test_a_prompt_near_the_context_is_answered_short_and_a_longer_one_not_at_all(
    make_checkpoint: Callable[..., Path],
) -> None:
    generator = LocalGenerator(make_checkpoint(max_position_embeddings=20), threads=1)
    (full,), (near,), (fits,) = generator.generate(["x" * 20, "x" * 17, "x" * 4], Sampling(max_tokens=6))
    assert (full.text, full.tokens, full.finish) == ("", 0, "no_room")
    assert near.tokens <= 3
    assert fits.tokens == 6 or fits.finish == "stop"


def test_progress_counts_every_completion(generator: LocalGenerator) -> None:
    calls: list[tuple[int, int]] = []
    sized = copy(generator)
    sized.batch_size = 4
    sized.generate(
        PROMPTS,
        Sampling(samples=3, max_tokens=4),
        progress=lambda done, total, what="": calls.append((done, total)),
    )
    assert calls[0] == (0, 21)
    assert calls[-1] == (21, 21)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_question_is_rendered_by_the_template_and_answered(generator: LocalGenerator) -> None:
    question = Question((Message("user", "Weather in Oslo?"),))
    prompt = generator.render(question)
    assert prompt == "<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n"
    ((answer,),) = generator.answer([question], Sampling(max_tokens=8))
    assert [[answer]] == generator.generate([prompt], Sampling(max_tokens=8))
    size = len(generator.tokenizer(prompt)["input_ids"])
    assert (answer.prompt_tokens, generator.room(question)) == (size, 4096 - size)
    assert answer.seconds > 0


def test_a_stop_text_ends_an_answer_and_is_cut_off(generator: LocalGenerator) -> None:
    ((whole,),) = generator.generate(["a"], Sampling(max_tokens=12))
    stop = whole.text[3:5]
    ((cut,),) = generator.generate(["a"], Sampling(max_tokens=12, stop=("never there", stop)))
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(stop)], "stop")
    assert cut.tokens < whole.tokens  # nothing is generated behind it


def test_an_empty_prompt_is_refused(generator: LocalGenerator) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generator.generate(["a", ""], Sampling())
    assert generator.generate([], Sampling()) == []


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "cannot load"),
        (without_a_weight, r"lacks 1 weights of its model \(model\.norm\.weight"),
    ],
)
def test_a_damaged_checkpoint_is_a_user_error(
    make_checkpoint: Callable[..., Path], damage: Callable[[Path], None], message: str
) -> None:
    folder = make_checkpoint()
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        LocalGenerator(folder)
    assert "\n" not in str(caught.value)


class Interrupted(Exception):
    pass


def test_an_interrupted_run_goes_on_with_the_answers_that_are_missing(checkpoint: Path, tmp_path: Path) -> None:
    """Cut off after the first batches, then run again: what was finished is not computed anew."""
    sampling = Sampling(samples=2, temperature=1.0, max_tokens=8, with_greedy=True)
    whole = LocalGenerator(checkpoint, threads=1).generate(PROMPTS, sampling)

    def stop(done: int, total: int, what: str = "") -> None:
        if done >= 8:
            raise Interrupted

    with EndpointCache(tmp_path / "answers.sqlite") as cache:
        generator = LocalGenerator(checkpoint, threads=1, batch_size=4, cache=cache)
        with pytest.raises(Interrupted):
            generator.generate(PROMPTS, sampling, progress=stop)
        kept = len(cache)
        assert 8 <= kept < 21
        computed: list[int] = []
        complete = generator.decoder.complete

        def counted(rows: list[Any], *arguments: Any) -> Iterator[int]:
            computed.append(len(rows))
            return complete(rows, *arguments)

        generator.decoder.complete = counted  # type: ignore[method-assign]
        assert generator.generate(PROMPTS, sampling) == whole
        assert generator.generate(PROMPTS, sampling) == whole
        assert computed == [21 - kept, 0]


@pytest.mark.parametrize(
    "other",
    [
        Sampling(temperature=1.0, max_tokens=6, seed=1),
        Sampling(temperature=0.5, max_tokens=6),
        Sampling(temperature=1.0, max_tokens=7),
        Sampling(temperature=1.0, max_tokens=6, stop=("e",)),
        Sampling(max_tokens=6),
    ],
)
def test_kept_answers_are_those_of_the_same_sampling_alone(checkpoint: Path, tmp_path: Path, other: Sampling) -> None:
    with EndpointCache(tmp_path / "answers.sqlite") as cache:
        generator = LocalGenerator(checkpoint, threads=1, cache=cache)
        generator.generate(PROMPTS, Sampling(temperature=1.0, max_tokens=6))
        assert generator.generate(PROMPTS, other) == LocalGenerator(checkpoint, threads=1).generate(PROMPTS, other)
        assert len(cache) == 2 * len(PROMPTS)


def test_kept_answers_are_those_of_the_same_model_alone(
    checkpoint: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_checkpoint(rope_theta=100.0)
    with EndpointCache(tmp_path / "answers.sqlite") as cache:
        first = LocalGenerator(checkpoint, threads=1, cache=cache).generate(PROMPTS, Sampling(max_tokens=8))
        second = LocalGenerator(other, threads=1, cache=cache).generate(PROMPTS, Sampling(max_tokens=8))
    assert first != second
    assert second == LocalGenerator(other, threads=1).generate(PROMPTS, Sampling(max_tokens=8))
