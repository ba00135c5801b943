import torch

from awpo.training.group_order import shuffled


def batch(rows: int) -> dict[str, object]:
    number = torch.arange(rows)
    return {
        "advantages": number.float(),
        "completion_ids": number[:, None].expand(-1, 3),
        "count": torch.tensor(7.0),
        "text": "x",
    }


def test_groups_stay_together_and_every_row_is_there() -> None:
    torch.manual_seed(0)
    found = shuffled(batch(24), 4)
    order = found["advantages"]
    assert sorted(order.tolist()) == list(range(24))
    assert all(group.tolist() == list(range(int(group[0]), int(group[0]) + 4)) for group in order.view(-1, 4))
    assert order.tolist() != list(range(24))
    assert torch.equal(found["completion_ids"][:, 1].float(), order)
    assert found["count"] == 7
    assert found["text"] == "x"


def test_where_a_group_is_shared_by_processes_single_rows_change_places() -> None:
    torch.manual_seed(0)
    order = shuffled(batch(6), 4)["advantages"].tolist()
    assert sorted(order) == list(range(6))
    assert order != list(range(6))


def test_the_seed_decides() -> None:
    torch.manual_seed(3)
    first = shuffled(batch(40), 2)["advantages"]
    torch.manual_seed(3)
    assert torch.equal(shuffled(batch(40), 2)["advantages"], first)
