"""Signs of collapse in metrics worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from awpo.errors import UserError
from awpo.training.collapse_watch import CollapseWatch, repeated_share

SOUND = {
    "entropy": 0.4,
    "response_length": 40.0,
    "rollout/repeated_share": 0.02,
    "reward/format_only_share": 0.3,
    "reward/outcome": 0.0,
}


def watched(*batches: dict[str, float], **named: Any) -> list[str]:
    said: list[str] = []
    watch = CollapseWatch(said.append, **named)
    for step, changes in enumerate(batches, 1):
        watch.see(step, {**SOUND, **changes})
    return said


@pytest.mark.parametrize(
    ("collapsed", "close", "says"),
    [
        ({"entropy": 0.07}, {"entropy": 0.081}, "entropy was 0.4 and is 0.07 over"),
        ({"response_length": 9.0}, {"response_length": 10.0}, "have shrunk .*was 40 and is 9 over"),
        ({"response_length": 161.0}, {"response_length": 160.0}, "have swollen"),
        ({"rollout/repeated_share": 0.6}, {"rollout/repeated_share": 0.5}, "said repeatedly"),
        ({"reward/format_only_share": 0.95}, {"reward/format_only_share": 0.9}, "right form and nothing right"),
    ],
)
def test_each_sign_is_told_once_after_three_batches(
    collapsed: dict[str, float], close: dict[str, float], says: str
) -> None:
    import re

    assert watched({}, collapsed, collapsed) == []
    [told] = watched({}, *[collapsed] * 9)
    assert re.search(f"^step 4: the policy may have collapsed: .*{says}", told)
    assert watched({}, *[close] * 9) == []


def test_a_start_that_is_so_already_is_no_collapse() -> None:
    poor = {"reward/format_only_share": 0.93, "rollout/repeated_share": 0.6}
    assert watched(*[poor] * 9) == []


def test_one_odd_batch_is_no_collapse() -> None:
    assert watched({}, {}, {}, {"entropy": 0.0}, {}, {}) == []


def test_steps_that_sample_nothing_do_not_count() -> None:
    said: list[str] = []
    watch = CollapseWatch(said.append)
    for step in range(20):
        metrics = {**SOUND, "entropy": 0.4 if step == 0 else 0.0}
        if step % 4:
            del metrics["response_length"]
        watch.see(step + 1, metrics)
        assert bool(said) == (step >= 12)  # the batches of steps 5, 9 and 13


def test_what_was_told_before_a_resume_is_not_told_again_and_what_was_seen_counts() -> None:
    said: list[str] = []
    watch = CollapseWatch(said.append, stop=True)
    for step in range(1, 5):
        watch.see(step, {**SOUND, "entropy": 0.4 if step == 1 else 0.0}, again=True)
    watch.see(5, {**SOUND, "entropy": 0.0})
    short = {**SOUND, "response_length": 1.0}
    watch.see(6, short)
    watch.see(7, short)
    with pytest.raises(UserError, match=r"step 8: .*have shrunk.*ends the run"):
        watch.see(8, short)
    assert said == []


def test_repeated_share_counts_runs_of_sixteen_characters() -> None:
    assert repeated_share("") == repeated_share("a" * 16) == repeated_share("The quick brown fox jumps over it") == 0
    assert repeated_share("a" * 25) == 0.9  # ten runs, one of them different
    assert repeated_share("a  \n b " * 50) == pytest.approx(1 - 4 / 184, abs=0.02)  # four runs, again and again
    once = "0123456789abcdef"
    assert repeated_share(once + once) == pytest.approx(1 / 17)  # the last one
