"""The embedded model's tokenizer: byte-level BPE in which a value has the same tokens wherever it stands.

Most tokenizers write " Paris" and "Paris" as different tokens, so that copying a value from a sentence into
`{"city": "Paris"}` takes a dictionary. Here a space is a token of its own, except before frequent words that begin
no value ("the", "in", "for"), which keep it. Encoding loses nothing: there is no normalisation, and every
byte is in the vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from awpo import chat
from awpo.embedded.scaffolding import CONTROL_TOKENS, TAGS, scaffolding
from awpo.errors import UserError
from awpo.types import Instance

VOCABULARY = 1536
MOST_PIECES = 96
LEAST_SHARE = 0.005  # of the instances, for a piece of scaffolding to become a token
ATTACHED_WORDS = 96
LEAST_SPACED_SHARE = 0.8  # of a word's occurrences, for it to keep its space
LONGEST_TEXT = 16384  # tokens

_WORD = re.compile(r"[^\W\d_]+")
_SPACED_WORD = re.compile(r"(?<= )[^\W\d_]+")
# Qwen3's splitting, with three changes: a word does not take the sign before it along but an underscore after it
# ("get_", "weather": a name is copied word by word, and its last word is that of the sentence), and see `_splitting`.
_QWEN3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{L}+_?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s"


def chat_template(name: str = "qwen3") -> str:
    """Qwen3's own chat template, from TRL's package files. Raises UserError where TRL has no such file."""
    spec = importlib.util.find_spec("trl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / "chat_templates" / f"{name}.jinja"
        if path.exists():
            return path.read_text("utf-8")
    raise UserError(f"trl has no chat template {name}.jinja; install the trl version that this project pins")


def _wrap(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST_TEXT,
        padding_side="left",
    )
    wrapped.chat_template = template
    return wrapped


def _texts(instances: Iterable[Instance], tokenizer: Any) -> Iterator[str]:
    for instance in instances:
        yield chat.render_prompt(tokenizer, instance) + chat.render_target(instance.target, instance.rationale or "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from _strings(member)
    elif isinstance(value, str):
        yield value


def value_openings(instances: Iterable[Instance]) -> set[str]:
    """The first words of the string values in calls and in tool results."""
    openings: set[str] = set()
    for instance in instances:
        values: list[Any] = [call.arguments for call in instance.target.tool_calls]
        for message in instance.prompt:
            values += [call.arguments for call in message.tool_calls]
            if message.role == "tool":
                try:
                    values.append(json.loads(message.content or ""))
                except ValueError:
                    continue
        for text in _strings(values):
            word = _WORD.match(text)
            if word:
                openings.add(word[0])
    return openings


def attached_words(texts: Iterable[str], openings: set[str], most: int = ATTACHED_WORDS) -> list[str]:
    """The words most frequent after a space that begin no value and seldom stand elsewhere; they keep their space.

    "Seldom" leaves out the words that tools and parameters are named by, which also have to be recognised in
    running text.
    """
    spaced: Counter[str] = Counter()
    everywhere: Counter[str] = Counter()
    for text in texts:
        spaced.update(_SPACED_WORD.findall(text))
        everywhere.update(_WORD.findall(text))
    fitting = [
        (-count, word)
        for word, count in spaced.items()
        if word not in openings and count >= LEAST_SPACED_SHARE * everywhere[word]
    ]
    return sorted(word for _, word in sorted(fitting)[:most])


def _splitting(attached: Sequence[str]) -> Regex:
    if not attached:
        return Regex(_QWEN3)
    return Regex(rf" (?:{'|'.join(attached)})(?!\p{{L}})|{_QWEN3}")


def train_tokenizer(instances: Sequence[Instance]) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `VOCABULARY` tokens from the rendered instances; the same instances give the same one.

    Only `<|im_start|>`, `<|im_end|>` and `<|endoftext|>` are special; tags and scaffolding are ordinary text that
    happens to be one token, so that decoding for the rewards keeps them.
    """
    template = chat_template()
    bare = _wrap(Tokenizer(models.BPE()), template)
    pieces = scaffolding(instances, bare, most=MOST_PIECES, least_share=LEAST_SHARE)
    kept = [*TAGS, *pieces]
    cut = re.compile("|".join(re.escape(text) for text in sorted({*CONTROL_TOKENS, *kept}, key=len, reverse=True)))
    texts = [part for text in _texts(instances, bare) for part in cut.split(text) if part]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_splitting(attached_words(texts, value_openings(instances))), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(kept) - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in kept])
    return _wrap(tokenizer, template)
