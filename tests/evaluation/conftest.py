"""A tiny Qwen3 with a byte-level tokenizer, instances to ask it, and a source of reference answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from awpo.chat import render_target
from awpo.data.store import write_instances
from awpo.events import Progress, silent
from awpo.types import Instance, Message, Tool, ToolCall
from evaluation.generate import Finish, Generated, Question, Sampling

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, the three control tokens special, the tags not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _save_checkpoint(folder: Path, **options: Any) -> Path:
    """Random weights, large enough that no two tokens tie and greedy texts differ from prompt to prompt."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "eos_token_id": tokenizer.eos_token_id,
    }
    Qwen3ForCausalLM(Qwen3Config(**(settings | options))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Saves another one: `make_checkpoint(eos_token_id=..)` changes its config; the weights are always the same."""
    return lambda **options: _save_checkpoint(tmp_path / "checkpoint", **options)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


WEATHER = Tool(
    "weather", "Weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)


def _instances(split: str, dialogues: int) -> list[Instance]:
    """Two steps a dialogue: a call, then a reply."""
    found = []
    for number in range(dialogues):
        call = ToolCall("weather", {"city": f"{split} {number}"})
        asked = (Message("user", f"Weather in {split} {number}?"),)
        told = (*asked, Message("assistant", tool_calls=(call,)), Message("tool", "sunny", name="weather"))
        for step, (prompt, target) in enumerate(
            [(asked, Message("assistant", tool_calls=(call,))), (told, Message("assistant", "Sunny."))]
        ):
            found.append(Instance("made", f"{split}-{number}", step, 2, split, (WEATHER,), prompt, target))
    return found


@pytest.fixture
def instances() -> list[Instance]:
    return _instances("test_tools", 6)


@pytest.fixture
def instances_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "instances"
    write_instances(folder, [*_instances("test_phrasings", 4), *_instances("test_tools", 3)])
    return folder


@functools.cache
def _known() -> dict[str, Instance]:
    """Every instance above, by the hash of its question."""
    made = [instance for split in ("test_phrasings", "test_tools") for instance in _instances(split, 6)]
    return {Question.of(instance).hash: instance for instance in made}


class Answering:
    """A source of answers that is told what to say: `say(question, sample)`, sample -1 for greedy."""

    identity: Mapping[str, Any] = {"model": "told what to say"}

    def __init__(self, say: Callable[[Question, int], str], finish: Finish = "stop") -> None:
        self.say, self.finish = say, finish

    def answer(
        self, questions: Sequence[Question], sampling: Sampling, *, progress: Progress = silent
    ) -> list[list[Generated]]:
        numbers = range(-1 if sampling.with_greedy else 0, sampling.samples)
        return [[Generated(self.say(question, n), 5, self.finish) for n in numbers] for question in questions]

    def room(self, question: Question) -> None:
        return None


@pytest.fixture
def answering() -> Callable[..., Answering]:
    return lambda say, finish="stop": Answering(say, finish)


@pytest.fixture
def reference() -> Callable[..., str]:
    """The reference answer to an instance's question, as a model would write it."""
    return lambda question, sample=0: render_target(_known()[question.hash].target, "I think.")
