"""Initial weights from which a small Qwen3 learns to copy at once.

Calling tools is mostly copying: names from schemas, values from sentences and results. A transformer copies with
an induction circuit (Olsson et al. 2022, "In-context Learning and Induction Heads"): a head of the first layer that
attends to the previous token and writes which one it was, and heads of the second that look for the place whose
previous token is the current one and write the token found there. A randomly initialised model spends most of a
few minutes' training before the circuit appears; here it is laid out from the start, in part of the heads, and
everything stays trainable. All other weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.08  # about 1 / sqrt(hidden_size): the usual 0.02 is for models ten times as wide
QUIET = (
    0.05  # of the standard deviation, for what layers add to the hidden state: at first the circuit is not disturbed
)
CONSTANT = 3.0  # of the embeddings' constant coordinate, in standard deviations
WRITTEN = 2.0  # gain of the previous token in the hidden state, relative to an embedding
COPIED = 6.0  # gain of the token that is copied
POSITION_PAIRS = 3  # rotary pairs, the fastest, by which the first head finds the previous token
POSITION_SHARPNESS = 3.0  # its q and k norm weights on them
MATCH_SHARPNESS = 1.5  # q and k norm weights of the second layer
SLOW_ANGLE = 0.003  # radians a token: rotary pairs slower than this compare contents at a distance


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """(rows, columns) with orthonormal rows; rows <= columns."""
    return torch.linalg.qr(torch.randn(columns, rows, generator=generator)).Q.T


@torch.no_grad()
def initialise(model: Any, seed: int) -> None:
    """Sets all weights of a `Qwen3ForCausalLM` in place; the same seed gives the same weights.

    Layout of the hidden state at the start: coordinate 0 is the same for every token, the last `head_dim` are
    empty in embeddings and hold the previous token after layer 0, the rest is the token itself.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = QUIET if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.normal_(0.0, scale * STANDARD_DEVIATION, generator=generator)
        else:
            parameter.fill_(1.0)
    size, hidden = config.head_dim, config.hidden_size
    own, previous = slice(1, hidden - size), slice(hidden - size, hidden)
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = CONSTANT * STANDARD_DEVIATION
    embeddings[:, previous] *= 0.1

    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)  # radians a token, by pair
    _attend_to_previous_token(model.model.layers[0].self_attn, angles, own, previous, generator)
    _copy_what_followed(
        model.model.layers[1].self_attn, model.model.layers[0].self_attn, angles, own, previous, generator
    )


def _attend_to_previous_token(
    attention: Any, angles: Tensor, own: slice, previous: slice, generator: torch.Generator
) -> None:
    """Head 0: a constant key, and as query the same key turned back by one position."""
    size, half = attention.head_dim, attention.head_dim // 2
    key, query = torch.zeros(size), torch.zeros(size)
    pairs = torch.arange(POSITION_PAIRS)
    key[pairs] = 1.0
    # transformers pairs coordinate m with m + half; a turn by -angle takes (1, 0) to (cos, -sin).
    query[pairs], query[pairs + half] = torch.cos(angles[pairs]), -torch.sin(angles[pairs])
    for weight, vector in ((attention.k_proj.weight, key), (attention.q_proj.weight, query)):
        weight[:size] *= 0.1
        weight[:size, 0] = vector
    for norm in (attention.q_norm.weight, attention.k_norm.weight):
        norm[pairs] = norm[pairs + half] = POSITION_SHARPNESS
    read = _orthonormal(size, own.stop - own.start, generator)
    attention.v_proj.weight[:size].zero_()
    attention.v_proj.weight[:size, own] = read
    attention.o_proj.weight[previous, :size] = WRITTEN * STANDARD_DEVIATION * torch.eye(size)


def _copy_what_followed(
    attention: Any, first: Any, angles: Tensor, own: slice, previous: slice, generator: torch.Generator
) -> None:
    """One head per key-value head: the current token is the query, the previous token the key."""
    size, half = attention.head_dim, attention.head_dim // 2
    slow = torch.nonzero(angles < SLOW_ANGLE).flatten()
    slow = torch.cat((slow, slow + half))
    groups = attention.k_proj.weight.shape[0] // size
    per_group = attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]
    for group in range(groups):
        keys = slice(group * size, (group + 1) * size)
        queries = slice(group * per_group * size, (group * per_group + 1) * size)
        mix = _orthonormal(len(slow), size, generator)  # of the coordinates that layer 0 wrote
        attention.k_proj.weight[keys] *= 0.1
        attention.q_proj.weight[queries] *= 0.1
        attention.k_proj.weight[(keys.start + slow)[:, None], torch.arange(previous.start, previous.stop)] = mix
        attention.q_proj.weight[(queries.start + slow)[:, None], torch.arange(own.start, own.stop)] = (
            mix @ first.v_proj.weight[:size, own]
        )
        copied = _orthonormal(size, own.stop - own.start, generator)
        attention.v_proj.weight[keys] *= 0.1
        attention.v_proj.weight[keys, own] = copied
        attention.o_proj.weight[own, queries] = COPIED * STANDARD_DEVIATION * copied.T
    attention.q_norm.weight.fill_(MATCH_SHARPNESS)
    attention.k_norm.weight.fill_(MATCH_SHARPNESS)
