from pathlib import Path

import pytest

from awpo.errors import UserError
from awpo.training.step_benchmark import SIDES, Shape, Side, _own_micro_batch, measure


def test_stock_trl_is_tried_with_whole_micro_batches() -> None:
    assert Shape(10, 4, 8).micro_batches() == [4, 8, 32]
    assert Shape(10, 4, 3, prompts=2).micro_batches() == [1, 3, 6]


def test_a_shape_without_a_group_is_refused() -> None:
    with pytest.raises(UserError, match="at least two rows"):
        measure(Shape(10, 4, 1), 1)


@pytest.mark.slow
def test_both_sides_take_a_step_and_ours_computes_the_same(tmp_path: Path) -> None:
    shape = Shape(16, 8, 2, prompts=2)
    for name in SIDES:
        with Side(name, shape, 2, tmp_path) as side:
            step = side.ask("step")
            assert 0 < step["rollout_seconds"] < step["processor_seconds"]
            if name == "ours":
                compared = side.ask("compare")
    assert compared["max_logprob_difference"] < 1e-5
    assert compared["gradient_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("most_memory", "size"), [(2**50, 4), (2**20, 2)])
def test_half_a_group_is_taken_where_a_whole_one_needs_too_much_memory(
    most_memory: int, size: int, tmp_path: Path
) -> None:
    assert _own_micro_batch(Shape(8, 8, 4, prompts=1), most_memory, tmp_path) == size


@pytest.mark.study
def test_a_step_is_no_slower_than_stock_trl_and_computes_the_same() -> None:
    found = measure(Shape(512, 32, 8), 3)
    assert found["ratio_min"] > 0.95
    assert found["max_logprob_difference"] < 1e-5
    assert found["gradient_difference"] < 1e-4
    assert found["ours"]["peak_memory"] <= found["stock"]["peak_memory"]
    for side in ("stock", "ours"):
        parts = found[side]["rollout_seconds"] + found[side]["update_seconds"]
        assert parts == pytest.approx(found[side]["processor_seconds"], rel=0.2)
