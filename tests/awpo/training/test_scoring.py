"""Scoring of rollouts: judged once, beside other work where an endpoint is asked, and written down for people."""

import asyncio
import json
import math
import threading
from pathlib import Path

import pytest

from awpo.config import JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_prompts import judge_messages
from awpo.judgement import Grades, JudgeAnswer, Judgement
from awpo.methods import get_method
from awpo.training.scoring import Scorer, Scores, check_ranges, of_all_judges
from awpo.types import Completion, ToolCall

THOUGHT = "<think>\nget_weather fits: weather of a city. city is Paris.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ENDPOINT = JudgeConfig.read(
    {"kind": "endpoint", "endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "judge", "cache": "off"}}, "x"
)


class PatientJudge(EndpointJudge):
    """Answers when it is let; an endpoint judge in all but its endpoint."""

    def __init__(self) -> None:
        super().__init__(ENDPOINT)
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    async def grade(self, items: list[Judgement]) -> list[Grades]:  # type: ignore[override]
        self.asked.set()
        await asyncio.to_thread(self.may_answer.wait, 30)
        if self.failure:
            raise self.failure
        answer = JudgeAnswer(True, 1.5, "well", {"coherence": 0.25}, seconds=0.1, prompt_tokens=30, completion_tokens=4)
        criteria = {"coherence": 0.25, "correctness": math.nan}
        return [Grades(0.5, criteria, (0.4, math.nan), (answer,)) for _ in items]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scorer:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    scorer = Scorer(get_method("awpo"), PolicyConfig(judge=ENDPOINT), tmp_path / "samples.jsonl")
    scorer.judge = PatientJudge()
    return scorer


def test_an_endpoint_is_asked_while_other_work_goes_on(patient: Scorer, instances: Path) -> None:
    chosen = read_instances(instances, {"train"})[:1]
    begun = patient.begin(chosen, [THOUGHT + CALL], [30])
    judge = patient.judge
    assert isinstance(judge, PatientJudge)
    assert judge.asked.wait(30)
    assert not begun.done()  # this line is the other work
    judge.may_answer.set()
    scores = begun.result(timeout=30)
    assert scores.reasoning == [1.5]  # scale 3
    patient.write_samples(7, chosen, [THOUGHT + CALL], scores)
    assert patient.samples_file is not None
    [row] = [json.loads(line) for line in patient.samples_file.read_text().splitlines()]
    [answer] = row["judgement"].pop("answers")
    assert row["judgement"] == {"score": 0.5, "coherence": 0.25, "correctness": None, "samples": [0.4, None]}
    assert (answer["text"], answer["seconds"], answer["prompt_tokens"]) == ("well", 0.1, 30)
    [request] = row["requests"]
    judged = Completion(
        "get_weather fits: weather of a city. city is Paris.", (ToolCall("get_weather", {"city": "Paris"}),), ""
    )
    assert request == {
        "with_reference": True,
        "messages": judge_messages(chosen[0], judged, with_reference=True),
    }
    assert {"judge/judged", "judge/failures", "judge/requests"} <= patient.metrics().keys()


def test_what_went_wrong_beside_is_raised_where_the_scores_are_wanted(patient: Scorer, instances: Path) -> None:
    judge = patient.judge
    assert isinstance(judge, PatientJudge)
    judge.failure = UserError("the judge failed on 9 of 10 thoughts")
    judge.may_answer.set()
    begun = patient.begin(read_instances(instances, {"train"})[:1], [THOUGHT + CALL], [30])
    with pytest.raises(UserError, match="9 of 10"):
        begun.result(timeout=30)


def test_the_rubrics_criteria_are_kept_beside_the_score(instances: Path, tmp_path: Path) -> None:
    chosen = read_instances(instances, {"train"})[:1]
    scorer = Scorer(get_method("awpo"), PolicyConfig(), tmp_path / "samples.jsonl")
    scores = scorer.begin(chosen, [THOUGHT + CALL], [30]).result()
    scorer.write_samples(0, chosen, [THOUGHT + CALL], scores)
    judgement = json.loads((tmp_path / "samples.jsonl").read_text())["judgement"]
    assert judgement.keys() == {"score", "coherence", "correctness", "appropriateness"}
    assert scores.reasoning[0] == pytest.approx(3 * judgement["score"])
    assert scorer.metrics() == {}


def test_every_rollout_can_become_a_sample(instances: Path, tmp_path: Path) -> None:
    """Not the first of each group alone; the same step of the same run gives the same ones."""
    chosen = read_instances(instances, {"train"})[:1] * 16
    texts = [f"answer {index}" for index in range(16)]
    seen = {}
    for name in ("one", "two"):
        scorer = Scorer(get_method("grpo"), PolicyConfig(), tmp_path / name)
        scores = scorer.score(chosen, texts, [3] * 16)
        for step in range(1, 31):
            scorer.write_samples(step, chosen, texts, scores)
        seen[name] = (tmp_path / name).read_text()
    assert seen["one"] == seen["two"]
    rows = [json.loads(line) for line in seen["one"].splitlines()]
    assert len(rows) == 30 * 4
    assert {row["completion"] for row in rows} == set(texts)
    assert [row["step"] for row in rows] == [step for step in range(1, 31) for _ in range(4)]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("format", 1.5, r"'format' .* is 1.5, outside of its range \[0, 1\]"),
        ("format", math.nan, "'format' .* is nan"),
        ("correct", 3.5, r"'outcome' .* is 4.5, outside of its range \[-3, 4\]"),
        ("correct", -5.0, r"'outcome' .* is -4, outside"),
        ("correct", -math.inf, "'outcome' .* is -inf"),
        ("overlong", 0.5, r"'overlong' .* is 0.5, outside of its range \[-1, 0\]"),
        ("reasoning", 3.01, r"'reasoning' .* is 3.01, outside of its range \[0, 3\]"),
        ("reasoning", -0.1, "'reasoning' .* is -0.1"),
        ("reasoning", math.inf, "'reasoning' .* is inf"),
    ],
)
def test_a_reward_outside_of_its_range_is_refused_by_name(instances: Path, name: str, value: float, told: str) -> None:
    chosen = read_instances(instances, {"train"})[:2]
    good = Scores([1.0, 1.0], [3.0, 3.0], [0.0, -1.0], [math.nan, 3.0], [-3.0, -3.0], [4.0, 4.0])
    check_ranges(good, chosen, 3.0)
    getattr(good, name)[1] = value
    with pytest.raises(UserError, match=told) as caught:
        check_ranges(good, chosen, 3.0)
    assert chosen[1].id in str(caught.value)


class GenerousJudge:
    """Scores out of ten, where a judge's scores are in [0, 1]."""

    async def score(self, items: list[Judgement]) -> list[float]:
        return [8.0 for _ in items]


def test_a_judge_of_another_scale_ends_the_run_before_a_step(instances: Path) -> None:
    scorer = Scorer(get_method("awpo"), PolicyConfig(), None)
    scorer.judge = GenerousJudge()
    with pytest.raises(UserError, match=r"'reasoning' .* is 24, outside of its range \[0, 3\]"):
        scorer.score(read_instances(instances, {"train"})[:1], [THOUGHT + CALL], [30])


def test_what_judges_of_several_processes_cost_is_summed() -> None:
    one = {"judge/requests": 3.0, "judge/answers": 3.0, "judge/seconds": 6.0, "judge/latency": 2.0, "judge/cost": 0.5}
    other = {
        "judge/requests": 2.0,
        "judge/answers": 1.0,
        "judge/seconds": 6.0,
        "judge/latency": 6.0,
        "judge/cost": 0.25,
    }
    silent = {"judge/requests": 1.0, "judge/answers": 0.0, "judge/seconds": 0.0}
    assert of_all_judges([one, other, silent]) == {
        "judge/requests": 6.0,
        "judge/answers": 4.0,
        "judge/seconds": 12.0,
        "judge/latency": 3.0,
        "judge/cost": 0.75,
    }
    assert of_all_judges([{}, {}]) == {}
