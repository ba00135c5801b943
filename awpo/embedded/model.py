"""The embedded model: a real Qwen3 small enough to be trained on one laptop core in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from awpo.artifacts import Manifest, input_identity, open_stage
from awpo.data import store
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.types import Instance

VERSION = 1
MOST_INSTANCES = 3000  # that the tokenizer is trained on
POSITIONS = 16384

SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "embedded-1m": {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
        },
        "embedded-3m": {
            "hidden_size": 192,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 576,
        },
    }
)


def training_instances(folder: Path, most: int = MOST_INSTANCES) -> list[Instance]:
    """At most `most` instances of the split train, evenly spaced. Raises UserError where there is none."""
    instances = store.read_instances(folder, splits=["train"])
    if not instances:
        raise UserError(f"{folder} has no instances of the split 'train'; give the folder of a stage with that split")
    step = max(1, -(-len(instances) // most))
    return instances[::step]


def _new_model(size: str, tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from awpo.embedded.initialisation import initialise

    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
        **SIZES[size],
    )
    with torch.random.fork_rng(devices=[]):  # the random weights that `initialise` replaces
        model = Qwen3ForCausalLM(config)
    initialise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    return model


def build_model(size: str, instances: Path, out: Path, *, seed: int = 0, progress: Progress = silent) -> Manifest:
    """Stage "model": an untrained model and its tokenizer, made from the instances' split train, as an HF folder.

    `size` is one of `SIZES`. The manifest counts parameters, vocabulary and the mean tokens of prompts and targets.
    Raises UserError for an unknown size, or where there is nothing to train the tokenizer on.
    """
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
    settings = {"version": VERSION, "size": size, "seed": seed}
    with open_stage(out, "model", {"instances": input_identity(instances)}, settings) as stage:
        if stage.finished:
            return stage.manifest
        from awpo import chat
        from awpo.embedded.tokenizer import train_tokenizer

        progress(0, 2, "tokenizer")
        examples = training_instances(instances)
        tokenizer = train_tokenizer(examples)
        progress(1, 2, "model")
        model = _new_model(size, tokenizer, seed)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        sample = examples[:: max(1, len(examples) // 200)]
        prompts = [tokenizer(chat.render_prompt(tokenizer, item))["input_ids"] for item in sample]
        targets = [tokenizer(chat.render_target(item.target, item.rationale or ""))["input_ids"] for item in sample]
        progress(2, 2, "model")
        return stage.finish(
            {
                "parameters": model.num_parameters(),
                "vocabulary": len(tokenizer),
                "mean_prompt_tokens": round(sum(map(len, prompts)) / len(sample), 1),
                "mean_target_tokens": round(sum(map(len, targets)) / len(sample) + 1, 1),  # and <|im_end|>
            }
        )
