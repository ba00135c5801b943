"""The shapes of Qwen3 and Llama models, and what follows from them by counting: parameters, bytes of a cache, operations.

The table is data from the models' config.json; a checkpoint's folder is asked for its own. Tests build each shape on
torch's meta device and compare the number of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from awpo.errors import UserError
from awpo.models import ModelChoice

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
KINDS: Mapping[str, bool] = MappingProxyType({"qwen3": True, "llama": False})
"""The architectures that the formulas are of, by `model_type`, and whether heads have norms there."""


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 or Llama decoder: grouped-query attention, in Qwen3 with a norm on each head of queries and keys
    (`head_norms`), SwiGLU, no biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    head_norms: bool = True

    @property
    def queries(self) -> int:
        """Width of all heads' queries; that of the hidden states need not be the same."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all heads' keys, and of their values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's matrices: q, k, v, o, gate, up, down."""
        hidden, wide = self.hidden, self.intermediate
        attention = ((hidden, self.queries), (hidden, self.keys), (hidden, self.keys), (self.queries, hidden))
        return (*attention, (hidden, wide), (hidden, wide), (wide, hidden))

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: its matrices, two norms of the hidden states, two of a head where it has them."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return sum(inputs * outputs for inputs, outputs in self.linears) + norms

    @property
    def head_parameters(self) -> int:
        """Entries of the output head, which is the embedding where they are tied."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied embeddings once."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of that rank on every matrix but the head: A (rank, inputs) and B (outputs, rank)."""
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def cache_bytes(self, key_bytes: int = 2, value_bytes: int = 2) -> int:
        """Bytes of the cache of keys and values for one token, in all layers."""
        return self.layers * self.keys * (key_bytes + value_bytes)

    def forward_operations(self, context: float, head: bool = True) -> float:
        """Floating-point operations of one token's forward pass that attends to `context` tokens.

        Two per weight of the matrices (the embedding is a look-up), and 4 x context x queries in each layer for
        scores and their sum (Korthikanti et al. 2022, arXiv 2205.05198, appendix A). `head`: with the output head.
        """
        weights = self.layers * sum(inputs * outputs for inputs, outputs in self.linears)
        weights += self.head_parameters if head else 0
        return 2.0 * weights + 4.0 * context * self.queries * self.layers


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, heads, 8, 128, intermediate, 151_936, tied)


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, True),
        "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, True),
        "Qwen/Qwen3-4B-Instruct-2507": _qwen3(36, 2560, 32, 9728, True),
        "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12288, False),
        "Qwen/Qwen3-14B": _qwen3(40, 5120, 40, 17408, False),
        "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 25600, False),
        # Built on the machine that trains; their tokenizers are made from the data, and get no larger.
        "embedded-1m": ModelShape(4, 128, 4, 2, 32, 384, 1536, True),
        "embedded-3m": ModelShape(6, 192, 6, 2, 32, 576, 1536, True),
        # The published one with a token more for each tag.
        "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49_152 + 6, True, head_norms=False),
    }
)


def shape_of(choice: ModelChoice) -> ModelShape:
    """The shape of a preset's model, or of a checkpoint's folder; UserError where neither says it."""
    if choice.kind == "folder":
        return read_shape(Path(choice.location))
    if choice.location in SHAPES:
        return SHAPES[choice.location]
    raise UserError(
        f"the shape of {choice.name!r} is not known before the model is there; give the folder of its checkpoint, or "
        f"one of {', '.join(name.rpartition('/')[2].lower() for name in SHAPES)}"
    )


def read_shape(folder: Path) -> ModelShape:
    """The shape that a checkpoint's config.json tells. Raises UserError where it is of another kind, or lacks something."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; give the folder of a checkpoint") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(
            f"{path} is of a model of type {kind!r}; the plan's formulas are those of {' and '.join(KINDS)}"
        )
    if bias := next((name for name in ("attention_bias", "mlp_bias") if values.get(name)), None):
        raise UserError(f"{path} has {bias}; the plan's formulas are those of layers without")
    if kind == "llama" and {"hidden_size", "num_attention_heads"} <= values.keys():  # older ones leave it out
        values = {"head_dim": values["hidden_size"] // values["num_attention_heads"]} | values
    missing = [key for key in FIELDS.values() if key not in values]
    if missing:
        raise UserError(f"{path} lacks {missing[0]!r}; give the folder of a whole checkpoint")
    return ModelShape(**{name: values[key] for name, key in FIELDS.items()}, head_norms=KINDS[kind])
