"""A random Qwen3 of a few thousand parameters with a tokenizer of bytes and Qwen3's tags, and instances to train on."""

import importlib.resources
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from awpo.artifacts import open_stage
from awpo.data.store import write_instances
from awpo.types import Instance, Message, Tool, ToolCall

CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Delhi", "Seoul"]
WEATHER = Tool("get_weather", "weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("get_time", "time in a city", {"type": "object", "properties": {"city": {"type": "string"}}})


def make_instance(city: str, number: int, split: str = "train") -> Instance:
    call = number % 3 != 2
    return Instance(
        source="test",
        dialogue_id=f"{city}-{number}",
        step=0,
        steps=1,
        split=split,  # type: ignore[arg-type]
        tools=(WEATHER, CLOCK),
        prompt=(Message("user", f"weather in {city} now, number {number}"),),
        target=Message("assistant", tool_calls=(ToolCall("get_weather", {"city": city}),))
        if call
        else Message("assistant", "Hello."),
        rationale=f"get_weather fits: weather of a city. city is {city}." if call else "No tool fits, so I say so.",
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens(
        [AddedToken(tag, special=False) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    template = importlib.resources.files("trl").joinpath("chat_templates/qwen3.jinja").read_text("utf-8")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instances") / "data"
    with open_stage(folder, "decompose", {}, {}) as stage:
        rows = [make_instance(city, number) for number in range(4) for city in CITIES]
        rows += [make_instance(city, 9, "validation") for city in CITIES]
        write_instances(folder, rows)
        stage.finish()
    return folder
