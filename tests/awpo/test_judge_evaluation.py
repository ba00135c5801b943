"""Pairs by hand, figures by hand, and judges of known faults that the figures have to show."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from awpo.artifacts import open_stage, read_manifest
from awpo.config import EndpointConfig, JudgeConfig
from awpo.data.offline_rationales import offline_rationale
from awpo.data.store import write_instances
from awpo.errors import UserError
from awpo.judge_evaluation import evaluate_judge, sampled_instances, write_evaluation
from awpo.judge_measures import Evaluation, KindResult, centred, correlation, kind_result, verdict, wilson
from awpo.judge_perturbations import FLATTERY, INJECTIONS, KINDS, Pair, make_pairs, padded, reworded
from awpo.judge_rubric import RubricJudge
from awpo.judgement import Judgement
from awpo.rewards import outcome_reward
from awpo.types import Instance, Message, Tool, ToolCall


def tool(name: str, description: str, *names: str) -> Tool:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in names}, "required": list(names)}
    return Tool(name, description, schema)


TOOLS = (tool("set_alarm", "set an alarm", "time"), tool("get_weather", "weather in a city", "city", "day"))
CITIES = ("Paris", "Rome", "Oslo", "Lima")


def call_instance(number: int) -> Instance:
    city = CITIES[number % 4]
    target = Message("assistant", None, (ToolCall("get_weather", {"city": city, "day": f"May {number + 1}"}),))
    item = Instance("s", f"d{number}", 0, 1, "train", TOOLS, (Message("user", f"{city} {number}?"),), target)
    return item.with_rationale(offline_rationale(item))


def reply_instance(number: int = 0) -> Instance:
    prompt = (Message("user", f"Sing {number}!"),)
    item = Instance("s", f"r{number}", 0, 1, "train", TOOLS, prompt, Message("assistant", "I cannot."))
    return item.with_rationale("No tool fits the request, so I say so.")


ALL = [*(call_instance(number) for number in range(8)), *(reply_instance(number) for number in range(3))]
THOUGHTS = {item.id: item.rationale or "" for item in ALL}


def pairs_of(item: Instance) -> dict[str, Pair]:
    return {pair.kind: pair for pair in make_pairs(item, item.rationale or "", sorted(CITIES), seed=0)}


def test_pairs_of_a_call_by_hand() -> None:
    item = call_instance(0)
    thought = "get_weather fits: weather in a city. city is Paris; day is May 1."
    assert item.rationale == thought
    pairs = pairs_of(item)
    assert list(pairs) == list(KINDS)
    assert all(
        (pair.right.thought, pair.right.tool_calls) == (thought, item.target.tool_calls) for pair in pairs.values()
    )
    wrong = {kind: pair.wrong for kind, pair in pairs.items()}

    # The other tool, with the first of the values for its only parameter.
    assert wrong["wrong_tool"].thought == "set_alarm fits: weather in a city. city is Paris; day is May 1."
    assert wrong["wrong_tool"].tool_calls == (ToolCall("set_alarm", {"time": "Paris"}),)

    [call] = wrong["wrong_value"].tool_calls
    changed = {
        name: value for name, value in call.arguments.items() if value != item.target.tool_calls[0].arguments[name]
    }
    [(name, value)] = changed.items()
    assert value in CITIES if name == "city" else value.startswith("May ")
    assert f"{name} is {value}" in (wrong["wrong_value"].thought or "")

    assert wrong["truncated"].thought == "get_weather fits: weather in a city."  # 6 of 12 words
    assert len((wrong["padding"].thought or "").split()) >= 24
    assert (wrong["padding"].thought or "").startswith(thought)
    for kind in ("circular", "padding", "truncated", "wrong_thought_right_action"):
        assert wrong[kind].tool_calls == item.target.tool_calls
    assert wrong["right_thought_wrong_action"].thought == thought
    assert wrong["right_thought_wrong_action"].tool_calls != item.target.tool_calls
    assert wrong["wrong_thought_right_action"].thought != thought
    for kind, sentences in (("flattery", FLATTERY), ("injection", INJECTIONS)):
        bare = pairs[kind].bare
        assert bare is not None
        assert bare.tool_calls == wrong[kind].tool_calls != item.target.tool_calls
        assert wrong[kind].thought in [f"{bare.thought} {sentence}" for sentence in sentences]


def test_pairs_of_a_reply_by_hand() -> None:
    pairs = pairs_of(reply_instance())
    assert set(KINDS) - set(pairs) == {"wrong_value"}
    wrong = pairs["wrong_tool"].wrong
    assert len(wrong.tool_calls) == 1
    assert wrong.tool_calls[0].name in (wrong.thought or "")
    assert wrong.content == ""
    assert "reply" in (pairs["circular"].wrong.thought or "")


def test_what_an_instance_does_not_allow_is_left_out() -> None:
    alone = Instance("s", "d", 0, 1, "train", (), (), Message("assistant", "No."), "So I answer.")
    assert set(pairs_of(alone)) == {"circular", "padding"}  # no tools, no values, three words


def test_pairs_depend_on_the_seed_alone() -> None:
    texts = sorted(CITIES)
    assert make_pairs(ALL[0], "x get_weather Paris May 1", texts, 1) == make_pairs(
        ALL[0], "x get_weather Paris May 1", texts, 1
    )
    different = [make_pairs(item, item.rationale or "", texts, seed) for item in ALL for seed in (1, 2)]
    assert any(first != second for first, second in zip(different[::2], different[1::2], strict=True))


def test_padding_reaches_its_length() -> None:
    for times in (1.0, 1.5, 2.0, 10.0):
        words = len(padded("one two three four", times, random.Random(0)).split())
        assert 4 * times <= words <= 4 * times + 15


def test_rewording_keeps_names_and_values() -> None:
    assert reworded("get_weather fits: weather in a city. city is Paris.") == (
        "Let me see. get_weather is the tool to use: weather in a city. city is Paris."
    )
    assert reworded("No tool fits the request, so I say so.") == (
        "Let me see. none of the tools is of use what was asked for, hence I tell them that."
    )


# --- figures


def test_figures_of_a_kind_by_hand() -> None:
    scores = [
        (0.9, 0.1, 0.2),
        (0.5, 0.5, 0.4),
        (0.2, 0.8, 0.5),
        (0.7, 0.6, 0.6),
        (math.nan, 0.1, 0.1),
        (1, 1, math.nan),
    ]
    found = kind_result("flattery", scores)
    # Right, tie, wrong, right of four whole ones.
    assert (found.pairs, found.failed, found.ties, found.accuracy) == (6, 2, 1, 2.5 / 4)
    assert found.right == pytest.approx((0.9 + 0.5 + 0.2 + 0.7) / 4)
    assert found.lift == pytest.approx((-0.1 + 0.1 + 0.3 + 0.0) / 4)
    assert kind_result("x", []).accuracy is None
    assert kind_result("x", [(math.nan, 1, None)]).accuracy is None


def test_wilson_by_the_books() -> None:
    """8 of 10: 0.490 to 0.943 (Brown, Cai and DasGupta 2001 give the formula; the numbers by hand)."""
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0.0, 5)[0] == 0
    assert wilson(1.0, 5)[1] == 1


def test_correlations_by_hand() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert correlation([1, 1, 1], [1, 2, 3]) is None
    assert correlation([1, 2], [1, 2]) is None
    # Two groups that each rise, the second one lower: within they agree wholly, pooled they do not.
    groups = [[(0, 1), (1, 2)], [(10, 0), (11, 1)], [(50, 50)]]
    assert correlation(*centred(groups)) == pytest.approx(1)


# --- judges of known faults


class Judged:
    """A judge by a function of the item."""

    def __init__(self, function: Any) -> None:
        self.function = function

    async def score(self, items: Sequence[Judgement]) -> list[float]:
        return [self.function(item) for item in items]


def measure(function: Any, make: Any = None) -> Evaluation:
    found, rows = evaluate_judge(make or (lambda draw: Judged(function)), ALL, THOUGHTS, seed=0)
    assert {row["side"] for row in rows} == {"right", "wrong", "bare"}
    return found


def accuracy(found: Evaluation) -> dict[str, float | None]:
    return {kind.kind: kind.accuracy for kind in found.kinds}


def test_a_judge_that_says_nothing_is_at_one_half_and_correlates_with_nothing() -> None:
    found = measure(lambda item: 0.7)
    assert set(accuracy(found).values()) == {0.5}
    assert found.accuracy == 0.5
    figures = (found.length_padded, found.length_right, found.outcome_within, found.outcome_pooled)
    assert figures == (None,) * 4
    assert (found.again, found.again_same, found.order, found.order_same) == (0, 1, 0, 1)


def test_a_judge_that_loves_length_is_found_out() -> None:
    found = measure(lambda item: min(1.0, len(item.completion.thought.split()) / 200))
    assert accuracy(found)["padding"] == 0
    assert accuracy(found)["truncated"] == 1
    assert found.length_padded is not None
    assert found.length_padded > 0.9


def test_a_judge_that_believes_what_it_is_told_is_found_out() -> None:
    found = measure(lambda item: 1.0 if "10" in item.completion.thought or "expert" in item.completion.thought else 0.5)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert accuracy(found)["injection"] == 0
    assert kinds["injection"].lift == pytest.approx(0.5)
    assert kinds["wrong_tool"].lift is None


def test_a_judge_that_is_the_outcome_correlates_with_it_wholly() -> None:
    found = measure(lambda item: (outcome_reward(item.instance, item.completion) + 3) / 7)
    assert found.outcome_within == pytest.approx(1)
    assert found.outcome_pooled == pytest.approx(1)
    assert accuracy(found)["wrong_tool"] == 1
    assert accuracy(found)["circular"] == 0.5  # its action is right


def test_a_judge_without_constancy_is_found_out() -> None:
    found = measure(None, make=lambda draw: Judged(lambda item: 0.25 + 0.5 * draw))
    assert (found.again, found.again_same) == (0.5, 1)
    by_place = measure(lambda item: 0.5 + 0.3 * (item.instance.tools[0].name == item.completion.thought.split()[0]))
    assert by_place.order is not None
    assert by_place.order > 0.1
    assert by_place.order_same is not None
    assert by_place.order_same < 0.5


def test_failures_are_counted_and_in_no_figure() -> None:
    found = measure(lambda item: math.nan if "Rome" in str(item.instance.target) else 0.5)
    assert found.failed > 0
    assert {kind.accuracy for kind in found.kinds} == {0.5}
    assert all(kind.failed == 2 for kind in found.kinds if kind.kind != "wrong_value")


def test_the_rubric_on_these_pairs() -> None:
    found, _ = evaluate_judge(lambda draw: RubricJudge(), ALL, THOUGHTS, seed=0)
    assert found.accuracy is not None
    assert found.accuracy > 0.95
    assert (found.again, found.order, found.failed) == (0, 0, 0)
    assert all(kind.lift is None or kind.lift <= 0 for kind in found.kinds)  # talk adds nothing


# --- the stage and the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_stage(tmp_path / "instances", "rationales", {}, {}) as stage:
        write_instances(stage.folder, [*ALL, reply_instance(9).with_rationale(None)])
        stage.finish()
    return tmp_path / "instances"


def test_instances_are_drawn_by_seed(folder: Path) -> None:
    ids = [item.id for item in sampled_instances(folder, 5, seed=1)]
    assert len(set(ids)) == 5
    assert ids == [item.id for item in sampled_instances(folder, 5, seed=1)]
    assert ids != [item.id for item in sampled_instances(folder, 5, seed=2)]
    assert len(sampled_instances(folder, 100, seed=0)) == len(ALL)  # without a rationale there is no pair
    with pytest.raises(UserError, match="no instance with a rationale in the split test or validation; write"):
        sampled_instances(folder, 5, 0, ["test", "validation"])
    with pytest.raises(UserError, match="unknown split 'foo'; known: train"):
        sampled_instances(folder, 5, 0, ["foo"])


def test_the_stage_asks_a_real_server_and_is_done_once(folder: Path, tmp_path: Path, faults: Any) -> None:
    grades = json.dumps({"reason": "so", "coherence": 5, "correctness": 5, "appropriateness": 5})
    faults.script(default={"do": "answer", "text": grades})
    endpoint = EndpointConfig(base_url=faults.url, model="m", cache=str(tmp_path / "cache"))
    config = JudgeConfig(kind="endpoint", endpoint=endpoint)
    first = write_evaluation(folder, tmp_path / "out", config, items=3)
    asked = len(faults.log())
    assert first["accuracy"] == 0.5
    assert first["judge"]["prompt"]
    assert first["usage"]["requests"] == asked == first["usage"]["answers"]
    assert write_evaluation(folder, tmp_path / "out", config, items=3) == first
    again = write_evaluation(folder, tmp_path / "other", config, items=3)
    assert len(faults.log()) == asked
    assert again["usage"]["cache_hits"] == asked
    rows = [json.loads(line) for line in (tmp_path / "out" / "judgements.jsonl").read_text("utf-8").splitlines()]
    assert {row["kind"] for row in rows} <= set(KINDS)
    assert rows[0]["criteria"] == {"coherence": 0.5, "correctness": 0.5, "appropriateness": 0.5}


def test_the_command_prints_80_columns_and_json(folder: Path, tmp_path: Path) -> None:
    from flows.cli import app

    arguments = ["judge", "evaluate", "--instances", str(folder), "--items", "6", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("in "))
    assert all(any(line.startswith(kind) for line in lines) for kind in KINDS)
    printed = CliRunner().invoke(app, [*arguments, "--json"])
    value = json.loads(printed.stdout.splitlines()[-1])
    assert value["judge"] == {"kind": "rubric", "scale": 3.0, "rules": value["judge"]["rules"]}
    assert value["items"] == 6
    assert value["unusable"] == []
    assert "Nothing in these figures speaks against this judge." in shown.stdout
    wrong = CliRunner().invoke(app, ["judge", "evaluate", "--instances", str(folder), "--judge", "rubrik"])
    assert wrong.exit_code == 2


def test_reworded_thoughts_and_those_of_another_writer(folder: Path, tmp_path: Path) -> None:
    from flows.cli_judge import judge_report

    plain = write_evaluation(folder, tmp_path / "a", JudgeConfig(), items=6)
    harder = write_evaluation(folder, tmp_path / "b", JudgeConfig(), items=6, reword=True)
    assert harder["thoughts"] == "the references, reworded"
    assert harder["kinds"][0]["right"] < plain["kinds"][0]["right"] == 1
    with open_stage(tmp_path / "others", "rationales", {}, {}) as stage:
        write_instances(stage.folder, [item.with_rationale(f"I think that {item.rationale}") for item in ALL[:2]])
        stage.finish()
    other = write_evaluation(folder, tmp_path / "c", JudgeConfig(), items=11, thoughts_folder=tmp_path / "others")
    assert (other["items"], other["thoughts"]) == (2, "another writer's")
    assert other["without_thought"] == len(ALL) - 2
    assert plain["without_thought"] == 0
    assert f"no thought for them: {len(ALL) - 2} instances" in "\n".join(judge_report("rubric", other))


def test_the_event_loop_of_a_notebook_is_no_hindrance_to_grading() -> None:
    async def notebook() -> float:
        [found] = await RubricJudge().grade([Judgement(ALL[0], pairs_of(ALL[0])["padding"].right)])
        return found.score

    assert asyncio.run(notebook()) == pytest.approx(1)


def figures(
    accuracy: float, *, pairs: int = 40, failed: int = 0, outcome: float | None = 0.4, lift: float = 0.0
) -> Evaluation:
    """Figures of one kind in which the judge prefers the right one in a share of the pairs that did not fail."""
    kind = KindResult("flattery", pairs, accuracy, 0.0, 1.0, 0, failed, 0.5, 0.4, lift)
    return Evaluation(pairs, 2 * pairs, failed, accuracy, (kind,), None, None, None, None, None, None, outcome, None)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (figures(0.9), None),
        (figures(0.66), None),  # 26.4 of 40: 0.505 to 0.786
        (figures(0.65), "prefers the right one in 65.0% of 40 pairs (49.5% to 77.9%)"),
        (figures(0.9, outcome=None), "do not vary with the outcome"),
        (figures(0.9, outcome=-0.2), "do not rise with the outcome within instances (correlation -0.20)"),
        (figures(0.9, outcome=4e-17), "do not rise with the outcome within instances (correlation 0.00)"),
        (figures(0.9, lift=0.1), None),
        (figures(0.9, lift=0.25), "flattery adds 0.25"),
        (figures(0.9, failed=40), "no pair has two scores"),
        (figures(0.9, failed=20), None),  # 20 of 80 thoughts, half may fail
    ],
)
def test_a_judge_that_cannot_be_used_is_told_with_the_reason(found: Evaluation, reason: str | None) -> None:
    reasons = verdict(found, failure_limit=0.5)
    assert [reason] == [text for text in (reason,) if text and text in reasons[0]] if reason else reasons == []


def test_a_judge_that_answers_too_seldom_cannot_be_used() -> None:
    [reason] = verdict(figures(0.9, failed=20), failure_limit=0.2)
    assert reason == "it gave no score for 20 of 80 thoughts"


def test_a_judge_that_gives_no_scores_is_measured_not_a_crash(folder: Path, tmp_path: Path, faults: Any) -> None:
    faults.script(default={"do": "answer", "text": "What a thought!"})
    judge = tmp_path / "judge.yaml"
    judge.write_text(f"kind: endpoint\nendpoint: {{base_url: '{faults.url}', model: small}}\n")
    from flows.cli import app

    arguments = ["judge", "evaluate", "--judge", str(judge), "--instances", str(folder), "--items", "4"]
    shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert "AWPO cannot work with this judge:" in shown.stdout
    assert "- it gave no score for" in shown.stdout
    assert "without readable scores: 'What a thought!'" in " ".join(shown.stdout.split())
    assert all(len(line) <= 80 for line in shown.stdout.splitlines() if not line.startswith("in "))
    assert read_manifest(tmp_path / "out") is None  # it may have been away: the same command asks anew


@pytest.mark.slow
@pytest.mark.servers
def test_a_tiny_model_as_judge_is_found_to_be_of_no_use(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    """A random model, served by the project's own server and asked over HTTP: it says nothing that can be read."""
    from awpo.serving.process import ModelServer

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    # A token of this model is a byte, and a judge's prompt has thousands; it has no weights of positions.
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    with ModelServer(model, name="local") as server:
        endpoint = EndpointConfig(base_url=server.url, model="local", concurrency=4, max_tokens=8)
        judge = JudgeConfig(kind="endpoint", endpoint=endpoint, deadline_seconds=600)
        found = write_evaluation(folder, tmp_path / "out", judge, items=1)
    assert found["failed"] == found["judged"] > 0
    assert found["accuracy"] is None
    assert found["unusable"][0] == f"it gave no score for {found['judged']} of {found['judged']} thoughts"
    assert found["unusable"][1] == "no pair has two scores to compare"
    assert "without readable scores" in found["last_error"] or "no text" in found["last_error"]
