"""Promotions with a real registry and a real Prefect server: what the alias stands for, however the run ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import mlflow
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from awpo.config import EvaluationConfig
from awpo.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.servers]

ROOT = Path(__file__).resolve().parents[2]
SMOKE = EvaluationConfig(
    benchmarks=("held_out",), splits=("test",), instances_per_split=10, samples=1, max_completion_length=8
)


def nightly() -> Any:
    """The module with the checkpoint that answers and the one with broken weights."""
    spec = importlib.util.spec_from_file_location("test_nightly_parts", Path(__file__).with_name("test_nightly.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Registry:
    """A store whose champion, version 1, is `good`; `other` answers likewise, `broken` does not."""

    folder: Path
    client: mlflow.MlflowClient
    other: str
    broken: str

    def champion(self) -> str | None:
        found = self.client.get_registered_model("awpo").aliases.get("champion")
        return None if found is None else str(found)

    def versions(self) -> list[Any]:
        """All versions, the newest last."""
        found = self.client.search_model_versions("name='awpo'")
        return sorted(found, key=lambda version: int(version.version))

    def reset(self) -> None:
        self.client.set_registered_model_alias("awpo", "champion", "1")

    def tags(self) -> dict[str, str]:
        return dict(self.client.get_registered_model("awpo").tags)

    def given(self, **changes: Any) -> dict[str, Any]:
        """Parameters of the flow. Of the items of a call and of a reply it has the half right, so 0.2 passes."""
        checkpoint = changes.get("candidate", self.other)
        common = {"candidate": checkpoint, "instances": str(self.folder / "instances"), "minimum_accuracy": 0.2}
        return common | {"out": str(self.folder / "out" / Path(checkpoint).name), "smoke": SMOKE} | changes

    def begin(self, **changes: Any) -> subprocess.Popen[bytes]:
        """Starts a promotion in a process of its own."""
        parameters = self.given(**changes)
        parameters["smoke"] = parameters["smoke"].model_dump(mode="json")
        code = "import json, sys; from flows.promote import promote; promote(**json.loads(sys.argv[1]))"
        environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value(), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", code, json.dumps(parameters)], env=environment, cwd=ROOT)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("promote")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWPO_RUNS", str(folder / "runs"))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setenv("OMP_NUM_THREADS", "1")
    before = mlflow.get_tracking_uri()
    parts = nightly()
    with prefect_test_harness(server_startup_timeout=300):
        from tasks.registry import Candidate, register
        from tasks.tracking_store import connect

        patch.setattr("flows.promote.ASK_SECONDS", 1)
        tracking = connect()
        good = parts.answering_checkpoint(folder / "good")
        other = parts.answering_checkpoint(folder / "other")
        (other / "card.md").write_text("another one")
        broken = parts.damaged(good, folder / "broken")
        parts.instances(folder / "instances")
        register(Candidate(good), tracking)
        found = Registry(folder, tracking.client(), str(other), str(broken))
        found.reset()
        yield found
    patch.undo()
    mlflow.set_tracking_uri(before)


@pytest.fixture
def registry(store: Registry) -> Registry:
    store.reset()
    return store


def paused_runs() -> list[Any]:
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["PAUSED"]}}})
        )
    return [run for run in runs if run.name.startswith("promote")]


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 300
    while not (found := what()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.5)
    return found


def answer(**form: Any) -> threading.Thread:
    """Answers the next paused promotion as the UI does, in a thread."""

    def act() -> None:
        [run] = wait_for(paused_runs)
        with get_client(sync_client=True) as client:
            schema = client.request("GET", f"/flow_runs/{run.id}/input/paused-1-schema").json()
            assert schema["required"] == ["approve", "reason"]
            assert all(field["description"] for field in schema["properties"].values())
            client.resume_flow_run(run.id, run_input=form)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_candidate_that_passes_is_the_champion(registry: Registry) -> None:
    from flows.promote import promote

    found = promote(**registry.given())
    assert 0.2 <= found["accuracy"] < 1
    assert registry.champion() == str(found["version"]) != "1"
    assert registry.tags() == {}


def test_one_that_fails_leaves_the_champion(registry: Registry) -> None:
    from flows.promote import SmokeFailed, promote

    with pytest.raises(SmokeFailed, match="champion is unchanged"):
        promote(**registry.given(candidate=registry.broken))
    assert registry.champion() == "1"
    assert registry.tags() == {}


def test_an_alias_that_stood_for_nothing_is_gone_again(registry: Registry) -> None:
    from flows.promote import SmokeFailed, promote

    with pytest.raises(SmokeFailed):
        promote(**registry.given(candidate=registry.broken, alias="candidate"))
    assert registry.client.get_registered_model("awpo").aliases.keys() == {"champion"}


def test_an_evaluation_that_cannot_be_done_leaves_the_champion(registry: Registry) -> None:
    from flows.promote import promote

    missing = SMOKE.model_copy(update={"benchmarks": ("mmlu_pro",), "benchmark_data": registry.folder / "nowhere"})
    with pytest.raises(Exception, match="nowhere"):
        promote(**registry.given(smoke=missing, out=str(registry.folder / "out" / "missing")))
    assert registry.champion() == "1"
    assert registry.tags() == {}


def test_a_person_says_yes(registry: Registry) -> None:
    from flows.promote import promote

    thread = answer(approve=True, reason="better on our own requests")
    found = promote(**registry.given(approval=True))
    thread.join()
    assert registry.champion() == str(found["version"]) != "1"
    assert registry.tags() == {}


def test_a_person_says_no_and_why(registry: Registry) -> None:
    from flows.promote import promote

    thread = answer(approve=False, reason="not before the release")
    state = promote(**registry.given(approval=True), return_state=True)
    thread.join()
    assert state.name == "Refused"
    assert "refused: not before the release" in state.message
    assert registry.champion() == "1"
    assert registry.tags() == {}
    newest = registry.versions()[-1]
    assert newest.tags["awpo.refused"] == "refused: not before the release"


def test_nobody_answers(registry: Registry) -> None:
    from flows.promote import NotApproved, promote

    with pytest.raises(NotApproved, match="nobody approved"):
        promote(**registry.given(approval=True, approval_hours=2 / 3600))
    assert registry.champion() == "1"
    assert registry.tags() == {}


def test_a_cancelled_promotion_puts_the_alias_back(registry: Registry) -> None:
    process = registry.begin(approval=True)
    wait_for(paused_runs)
    assert registry.champion() != "1", "until the answer the alias stands for the candidate"
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert registry.champion() == "1"
    assert registry.tags() == {}
    with get_client(sync_client=True) as client:
        for run in paused_runs():
            client.delete_flow_run(run.id)


def test_what_a_killed_promotion_left_is_found_and_mended_by_the_next_one(registry: Registry) -> None:
    from flows.doctor import check_promotions
    from flows.promote import promote
    from tasks.promotion import promoted, unfinished_promotions
    from tasks.tracking_store import connect

    process = registry.begin(approval=True)
    [run] = wait_for(paused_runs)
    [left] = unfinished_promotions(connect())
    assert not left.abandoned
    assert left.before == "1"
    assert registry.champion() == left.after
    with pytest.raises(UserError, match="is under way"):
        promote(**registry.given())
    process.kill()
    process.wait()
    assert registry.champion() == left.after, "nobody could put it back"
    [left] = unfinished_promotions(connect())
    assert left.abandoned
    [told] = check_promotions()
    assert (told.state, "its process is gone" in told.found) == ("mend", True)
    version = registry.client.get_model_version("awpo", left.after)
    with promoted(version, connect(), "champion"):
        [now] = unfinished_promotions(connect())
        assert now.before == "1", "it had been put back first"
    assert registry.champion() == left.after
    assert unfinished_promotions(connect()) == []
    with get_client(sync_client=True) as client:
        client.delete_flow_run(run.id)


def test_a_store_that_is_away_is_told_and_mended_later(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import promotion
    from tasks.promotion import NotPutBack, mend_promotions, promoted, unfinished_promotions
    from tasks.tracking_store import connect

    def away(*_: Any) -> None:
        raise OSError("the store is away")

    newest = registry.versions()[-1]
    with monkeypatch.context() as patch:
        patch.setattr(promotion, "put_back", away)
        with pytest.raises(
            NotPutBack, match=r"no; and models:/awpo@champion could not be put back \(the store is away"
        ):
            with promoted(newest, connect(), "champion"):
                raise ValueError("no")
    assert registry.champion() == str(newest.version)
    assert [left.abandoned for left in unfinished_promotions(connect())] == [True]
    mend_promotions(connect(), "awpo", "champion")
    assert registry.champion() == "1"


def test_an_alias_that_a_person_moved_on_meanwhile_stays(registry: Registry) -> None:
    from tasks.promotion import promoted
    from tasks.tracking_store import connect

    versions = registry.versions()
    with pytest.raises(ValueError, match="no"), promoted(versions[-1], connect(), "champion"):  # noqa: PT012
        registry.client.set_registered_model_alias("awpo", "champion", versions[1].version)
        raise ValueError("no")
    assert registry.champion() == str(versions[1].version)
    assert registry.tags() == {}
