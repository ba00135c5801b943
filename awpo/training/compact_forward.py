"""Log-probabilities of padded rows, computed in pieces of rows of similar length without their common padding.

Rollouts of tool-use prompts differ in length by a factor of three or more, and a batch is padded to its longest
prompt and its longest completion. Rows are independent of one another, so the result is the same; on a CPU small
pieces also stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

# Tokens of one piece, padding included. A GPU is given the whole batch: it wants large pieces.
PIECE_TOKENS = 4096


def pieces(attention_mask: Tensor, completion_width: int, most_tokens: int) -> Iterator[Piece]:
    """Cuts rows (B, P + C), prompts padded on the left and completions on the right, into pieces of similar length.

    `completion_width` is C. Each row is in one piece.
    """
    prompts = attention_mask[:, :-completion_width].sum(dim=1)
    completions = attention_mask[:, -completion_width:].sum(dim=1)
    order = torch.argsort(prompts + completions, stable=True).tolist()
    rows: list[int] = []
    prompt, completion = 0, 0
    for row in order:
        wider = max(prompt, int(prompts[row])), max(completion, int(completions[row]))
        if rows and sum(wider) * (len(rows) + 1) > most_tokens:
            yield Piece(rows, prompt, completion)
            rows, wider = [], (int(prompts[row]), int(completions[row]))
        rows.append(row)
        prompt, completion = wider
    yield Piece(rows, prompt, completion)


class Piece:
    """Some rows of a batch and the widths that hold them: `prompt` columns before, `completion` columns after."""

    def __init__(self, rows: list[int], prompt: int, completion: int) -> None:
        # One column at least: a completion may be empty where it was masked.
        self.rows, self.prompt, self.completion = rows, max(prompt, 1), max(completion, 1)

    def cut(self, padded: Tensor, completion_width: int) -> Tensor:
        """The piece's rows of (B, P + C), without padding that none of them needs."""
        start = padded.shape[1] - completion_width
        return padded[self.rows, start - self.prompt : start + self.completion]


def in_pieces(
    forward: Callable[[Tensor, Tensor, int], tuple[Tensor | None, ...]],
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_width: int,
) -> tuple[Tensor | None, ...]:
    """`forward(input_ids, attention_mask, completion_width)` over pieces, its results (B, C) put back together.

    Columns that were cut are 0 in the result; they are masked in every use.
    """
    found: list[tuple[Tensor | None, ...]] = []
    order: list[int] = []
    for piece in pieces(attention_mask, completion_width, PIECE_TOKENS):
        results = forward(
            piece.cut(input_ids, completion_width), piece.cut(attention_mask, completion_width), piece.completion
        )
        gap = completion_width - piece.completion
        found.append(tuple(None if result is None else pad(result, (0, gap)) for result in results))
        order += piece.rows
    back = torch.argsort(torch.tensor(order, device=input_ids.device))
    return tuple(
        None if column[0] is None else torch.cat([part for part in column if part is not None])[back]
        for column in zip(*found, strict=True)
    )
