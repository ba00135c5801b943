"""Log-probabilities of completions, each group's prompt computed once: no copies of it, no padding.

A micro-batch of rollouts holds each prompt G times, and is padded to its longest prompt and its longest completion. Here
its rows are packed into one row of tokens: the prompts, each once, then the completions. Attention follows the layout
(`awpo.prefix_attention`); everything else in a transformer works on each token alone. Gradients of a prompt are the sums
of those of its G copies, so that loss and gradients are those of the padded batch up to rounding.

A prompt's last token stands before each of its completions, as their first input, and the last token of a completion
predicts nothing, so it is no input. The language model's head sees completions only.

Shapes: B rows, P prompt tokens padded on the left, C completion tokens padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from awpo.model_attention import arguments, attend_by_layout
from awpo.prefix_attention import Layout

# Tokens of one pass. On a CPU what is computed then stays in its cache; elsewhere a pass has a mask of the square of its
# tokens. A prompt's rows are never split for it.
PASS_TOKENS = 8192
# How far log-probabilities may be from those of TRL's own pass, on the mean over tokens, by the type of the passes. In
# bfloat16 two right ways of attending differed by 0.005, and scores scaled by 1.2 made 0.05.
MEAN_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.02}


def take_packed_rows(model: Any) -> None:
    """Makes `model` take packed rows beside padded ones; TRL's head has been put on it before."""
    attend_by_layout(model)

    def completions_only(module: Any, positional: Any, named: dict[str, Any], output: Any) -> Any:
        if isinstance(layout := named.get("packed"), Layout):
            output.last_hidden_state = output.last_hidden_state[:, layout.groups[0].start :]
        return output

    model.base_model.register_forward_hook(completions_only, with_kwargs=True)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch in one row of T tokens: `input_ids` and `position_ids` (1, T), `labels` (1, completion tokens),
    and for each of these which row of the batch and which completion column it is of."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    layout: Layout


def packed_rows(
    input_ids: Tensor, attention_mask: Tensor, completion_width: int, most_tokens: int | None
) -> Iterator[PackedRows]:
    """Packs the rows of a padded batch (B, P + C); C is `completion_width`. Every row is in one of the packed rows.

    Rows of one prompt are together. `most_tokens` bounds the tokens of a packed row where several prompts are in it;
    None puts all into one.
    """
    prompts = input_ids.shape[1] - completion_width
    known = attention_mask[:, :prompts].sum(dim=1).tolist()
    # One token at least: a completion may be empty where it was masked.
    lengths = attention_mask[:, prompts:].sum(dim=1).clamp(min=1).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, length in enumerate(known):
        groups.setdefault(tuple(input_ids[row, prompts - length : prompts].tolist()), []).append(row)
    pack: list[tuple[tuple[int, ...], list[int]]] = []
    tokens = 0
    for prompt, rows in groups.items():
        more = len(prompt) + sum(lengths[row] for row in rows)
        if pack and most_tokens is not None and tokens + more > most_tokens:
            yield _pack(pack, input_ids, prompts, lengths)
            pack, tokens = [], 0
        pack.append((prompt, rows))
        tokens += more
    yield _pack(pack, input_ids, prompts, lengths)


def _pack(
    groups: list[tuple[tuple[int, ...], list[int]]], input_ids: Tensor, start: int, lengths: list[int]
) -> PackedRows:
    device = input_ids.device
    layout = Layout.of(
        [len(prompt) - 1 for prompt, _ in groups], [[lengths[row] for row in rows] for _, rows in groups], device
    )
    ids = [torch.tensor(prompt[:-1], dtype=torch.long, device=device) for prompt, _ in groups]
    positions = [torch.arange(len(prompt) - 1) for prompt, _ in groups]
    members = [(row, len(prompt)) for prompt, rows in groups for row in rows]
    for row, known in members:
        # The prompt's last token, then the completion without its last.
        ids.append(input_ids[row, start - 1 : start + lengths[row] - 1])
        positions.append(torch.arange(known - 1, known + lengths[row] - 1))
    return PackedRows(
        torch.cat(ids)[None],
        torch.cat(positions).to(device)[None],
        torch.cat([input_ids[row, start : start + lengths[row]] for row, _ in members])[None],
        torch.cat([torch.full((lengths[row],), row) for row, _ in members]).to(device),
        torch.cat([torch.arange(lengths[row]) for row, _ in members]).to(device),
        layout,
    )


def log_probabilities(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_width: int, most_tokens: int | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies (B, C) of the completions of a padded batch (B, P + C), in nats.

    `model` may be wrapped (DDP, PEFT, DeepSpeed); see `take_packed_rows`. Entropies are None where TRL's head has been
    told to leave them out, as on a reference model. Columns that are padding are 0; they are masked in every use.
    """
    found: list[tuple[Tensor, Tensor | None]] = []
    rows, columns = [], []
    for packed in packed_rows(input_ids, attention_mask, completion_width, most_tokens):
        output = model(
            **arguments(packed.layout, packed.input_ids, packed.position_ids),
            shift_labels=packed.labels,
            fused_lm_head=True,
        )
        found.append((output.log_probs[0], None if output.entropy is None else output.entropy[0]))
        rows.append(packed.rows)
        columns.append(packed.columns)
    place = torch.cat(rows), torch.cat(columns)
    shape = (len(input_ids), completion_width)

    def padded(parts: list[Tensor]) -> Tensor:
        values = torch.cat(parts)
        return values.new_zeros(shape).index_put(place, values)

    entropies = [entropy for _, entropy in found if entropy is not None]
    return padded([values for values, _ in found]), padded(entropies) if entropies else None


def idle_apart(
    compute: Callable[[Tensor], tuple[Tensor, Tensor | None]], count: int, idle: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`compute(rows)` for all `count` rows, those that are `idle` (count,) without gradients: their loss is a constant.

    At least one row has gradients, so that a backward pass is there, as the other processes expect.
    """
    if idle is None or not bool(idle.any()):
        return compute(torch.arange(count))
    idle = idle.cpu().clone()
    idle[0] &= not bool(idle.all())
    busy, resting = (~idle).nonzero()[:, 0], idle.nonzero()[:, 0]
    parts = [compute(busy)]
    if len(resting):
        with torch.no_grad():
            parts.append(compute(resting))
    back = torch.argsort(torch.cat([busy, resting]))
    logps, entropies = joined(parts)
    return logps[back], None if entropies is None else entropies[back]


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies of several sets of rows as one."""
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return torch.cat([logps for logps, _ in parts]), torch.cat(entropies) if entropies else None


def padded_rows(rows: Sequence[Sequence[float]], width: int, device: torch.device) -> Tensor:
    """Numbers of each row as (rows, width), 0 behind them."""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32, device=device)
