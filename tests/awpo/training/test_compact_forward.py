import torch

from awpo.training.compact_forward import in_pieces, pieces


def padded(lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows of given prompt and completion lengths: ids count up from 1 in each row, 0 is padding; mask; C."""
    longest, width = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids = torch.zeros(len(lengths), longest + width, dtype=torch.long)
    for row, (prompt, completion) in enumerate(lengths):
        count = prompt + completion
        ids[row, longest - prompt : longest - prompt + count] = 100 * (row + 1) + torch.arange(count)
    return ids, ids.ne(0).long(), width


LENGTHS = [(3, 2), (9, 1), (1, 5), (3, 3), (8, 4)]


def test_every_row_is_in_one_piece_with_all_its_tokens() -> None:
    ids, mask, width = padded(LENGTHS)
    seen: list[int] = []
    for piece in pieces(mask, width, most_tokens=14):
        cut = piece.cut(ids, width)
        for row, columns in zip(piece.rows, cut, strict=True):
            assert columns[columns.ne(0)].tolist() == ids[row][ids[row].ne(0)].tolist()
        seen += piece.rows
        assert cut.numel() <= 14 or len(piece.rows) == 1
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_results_come_back_in_place() -> None:
    ids, mask, width = padded(LENGTHS)

    def forward(piece_ids: torch.Tensor, _: torch.Tensor, columns: int) -> tuple[torch.Tensor | None, ...]:
        return piece_ids[:, -columns:] * 2, None

    import awpo.training.compact_forward as module

    for most in (1, 14, 10_000):
        module_limit, module.PIECE_TOKENS = module.PIECE_TOKENS, most
        try:
            doubled, nothing = in_pieces(forward, ids, mask, width)
        finally:
            module.PIECE_TOKENS = module_limit
        assert nothing is None
        assert doubled is not None
        assert doubled.tolist() == (ids[:, -width:] * 2).tolist()


def test_a_completion_that_is_masked_as_a_whole_is_computed_all_the_same() -> None:
    ids, mask, width = padded([(4, 3), (4, 3)])
    mask[0, -width:] = 0
    (result,) = in_pieces(lambda i, m, c: (i[:, -c:].float(),), ids, mask, width)
    assert result is not None
    assert result.shape == (2, 3)
    assert result[1].tolist() == ids[1, -3:].tolist()
