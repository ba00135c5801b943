"""docs/metrics.md names what runs log: all of it, and nothing else of training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from awpo.config import EndpointConfig
from awpo.config_training import PolicyConfig, SftConfig
from awpo.endpoint_limits import Usage
from awpo.events import METRICS, Tail
from awpo.training.policy import OWN, RENAMED, train_policy
from awpo.training.sft import train_sft
from tasks.evaluation import score_metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def names_of(section: str) -> list[str]:
    """The names in a section's table, in order; one cell may hold several."""
    text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def is_told(name: str, section: str) -> bool:
    """Whether a table names it; words in capitals, and the Q of a quantile, stand for any."""
    patterns = (re.sub(r"[A-Z]+", "[^/]+", re.escape(told)) for told in names_of(section))
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def test_each_name_stands_once_with_a_meaning_and_a_unit() -> None:
    for section in ("Policy training", "Supervised fine-tuning", "Once for each run of a stage", "Evaluation"):
        names = names_of(section)
        assert names
        assert len(names) == len(set(names))
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    assert all(line.count("|") == 5 for line in rows)


def test_what_the_trainer_passes_on_is_told() -> None:
    told = names_of("Policy training")
    assert set(RENAMED.values()) <= set(told)
    for prefix in OWN:
        assert any(name.startswith(prefix) for name in told), prefix


def test_what_an_endpoint_counts_is_told() -> None:
    config = EndpointConfig(base_url="http://127.0.0.1:1/v1", model="m", input_price=1, output_price=1)
    usage = Usage(answers=1).metrics(config)
    usage["failed_requests"] = usage.pop("failures")  # as the judge that asks the endpoint does
    names = {f"judge/{name}" for name in usage} | {"judge/judged", "judge/failures"}
    assert {name for name in names if not is_told(name, "Policy training")} == set()


@pytest.mark.parametrize("group", ["all", "step=1"])
def test_scores_are_told(group: str) -> None:
    row = {"benchmark": "held_out", "split": "test", "mode": "greedy", "group": group, "accuracy": 0.5}
    row |= {"low": 0.4, "high": 0.6, "empty_rate": 0.0, "response_tokens": 9.0}
    assert all(is_told(name, "Evaluation") for name in score_metrics([row]))
    assert is_told("pass@8", "Evaluation")
    assert not is_told("held_out/test/greedy/other", "Evaluation")


def logged(out: Path) -> set[str]:
    return {name for row in Tail(out / METRICS) for name in row["metrics"]}


def test_what_training_logs_is_told_and_what_is_told_is_logged(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """Real runs: dapo has the penalty and the draws that others lack, awpo a gate and a judge."""
    config = PolicyConfig(
        steps=2, prompts_per_rollout=4, group_size=4, steps_per_rollout=2, micro_batch_size=8, max_completion_length=12
    )
    found: set[str] = set()
    for method in ("dapo", "awpo"):
        train_policy(str(tiny_model), instances, tmp_path / method, config.model_copy(update={"method": method}))
        found |= logged(tmp_path / method)
    assert {name for name in found if not is_told(name, "Policy training")} == set()
    of_endpoints = {f"judge/{name}" for name in Usage().metrics()} | {"judge/judged", "judge/failures"}
    of_endpoints |= {"judge/failed_requests", "judge/cost", "judge/latency"}
    told = set(names_of("Policy training")) - of_endpoints - {"kl"}  # a penalty that no entry of the registry has
    told -= {name for name in told if name.startswith(("rollout/", "sampling/"))}  # of vLLM: test_vllm.py
    unseen = {name for name in told if not any(re.fullmatch(re.sub("[A-Z]+", "[^/]+", name), one) for one in found)}
    assert unseen - {"judge/outcome_correlation"} == set()  # undefined where a random model thinks nothing

    train_sft(str(tiny_model), instances, tmp_path / "sft", SftConfig(steps=2, batch_size=4))
    assert logged(tmp_path / "sft") == set(names_of("Supervised fine-tuning"))
