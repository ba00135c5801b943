"""Fixtures for every test."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data files that stands beside the project; tests that need it skip where it is absent."""
    named = os.environ.get("AWPO_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data files at {folder}; set AWPO_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def fault_server() -> Iterator[Any]:
    """A chat endpoint that does wrong by script, in a process of its own (tests/fault_server.py)."""
    path = Path(__file__).with_name("fault_server.py")
    specification = importlib.util.spec_from_file_location("fault_server", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["fault_server"] = module
    specification.loader.exec_module(module)
    with module.FaultServer() as server:
        yield server


@pytest.fixture
def faults(fault_server: Any) -> Any:
    """The fault server, with nothing wrong with it yet and nothing asked."""
    fault_server.script()
    return fault_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of a few thousand parameters with a tokenizer of bytes and Qwen3's tags."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
