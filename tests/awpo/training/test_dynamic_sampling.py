import torch

from awpo.training.dynamic_sampling import replace_groups, varying_groups


def batch(advantages: list[float], width: int, first: int) -> dict:
    count = len(advantages)
    ids = first + torch.arange(count)[:, None].expand(count, width)
    return {
        "prompt_ids": ids.clone(),
        "completion_ids": ids.clone(),
        "completion_mask": torch.ones(count, width, dtype=torch.long),
        "advantages": torch.tensor(advantages),
        "clip_low": torch.full((count,), first / 1000),
        "num_items_in_batch": torch.tensor(count * width),
    }


def test_groups_without_variance_are_replaced_in_order_and_others_kept() -> None:
    old = batch([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], width=2, first=100)
    new = batch([0.0, 0.0, 2.0, -2.0, 0.0, 0.0], width=3, first=200)
    assert varying_groups(old, 2).tolist() == [True, False, False]
    merged = replace_groups(old, new, 2, pad_id=7)
    assert merged["advantages"].tolist() == [1.0, -1.0, 2.0, -2.0, 0.0, 0.0]
    # Prompts are padded on the left, completions on the right; what could not be filled stays as it was.
    assert merged["prompt_ids"].tolist() == [
        [7, 100, 100],
        [7, 101, 101],
        [202] * 3,
        [203] * 3,
        [7, 104, 104],
        [7, 105, 105],
    ]
    assert merged["completion_ids"][0].tolist() == [100, 100, 7]
    assert merged["completion_mask"][0].tolist() == [1, 1, 0]
    assert merged["clip_low"].tolist() == [0.1, 0.1, 0.2, 0.2, 0.1, 0.1] or torch.allclose(
        merged["clip_low"], torch.tensor([0.1, 0.1, 0.2, 0.2, 0.1, 0.1])
    )


def test_nothing_useful_drawn_changes_nothing() -> None:
    old = batch([0.0, 0.0, 1.0, -1.0], width=2, first=100)
    new = batch([0.0] * 4, width=2, first=200)
    merged = replace_groups(old, new, 2, pad_id=7)
    assert all(torch.equal(merged[key], old[key]) for key in old)
