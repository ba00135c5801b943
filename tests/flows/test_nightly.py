"""Nights on a temporary Prefect server and a real store: a champion that answers, and a candidate with broken weights.

The champion is a Qwen3 whose weights are set by hand so that it writes "S." and ends, whatever it is asked: it has the
half of the items right in which a reply is due.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import mlflow
import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from awpo.config import EvaluationConfig
from awpo.data.store import write_instances
from awpo.types import Instance, Message, ToolCall

pytestmark = pytest.mark.slow

SMALL = EvaluationConfig(benchmarks=("held_out",), splits=("test",), samples=1, max_completion_length=8)


def _tokenizer() -> Any:
    """The byte-level tokenizer of the evaluation tests."""
    place = Path(__file__).resolve().parents[1] / "evaluation" / "conftest.py"
    spec = importlib.util.spec_from_file_location("evaluation_conftest", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_tokenizer(), module.WEATHER


def answering_checkpoint(folder: Path) -> Path:
    """Attention and MLPs add nothing, so that a token alone decides the next: newline, S, full stop, end of turn."""
    tokenizer, _ = _tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    newline, letter, stop = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("\n", "S", "."))
    with torch.no_grad():
        table = torch.nn.functional.normalize(torch.randn(len(tokenizer), 32), dim=1)
        model.model.embed_tokens.weight.copy_(table)
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, following in ((newline, letter), (letter, stop), (stop, tokenizer.eos_token_id)):
            model.lm_head.weight[following] += 10 * table[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def damaged(checkpoint: Path, folder: Path) -> Path:
    """The same with noise on its output layer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.add_(5 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)
    _tokenizer()[0].save_pretrained(folder)
    return folder


def instances(folder: Path) -> Path:
    """Forty dialogues of a call and a reply."""
    weather = _tokenizer()[1]
    found = []
    for number in range(40):
        call = ToolCall("weather", {"city": str(number)})
        asked = (Message("user", f"Weather in {number}?"),)
        told = (*asked, Message("assistant", tool_calls=(call,)), Message("tool", "sunny", name="weather"))
        for step, (prompt, target) in enumerate(
            [(asked, Message("assistant", tool_calls=(call,))), (told, Message("assistant", "Sunny."))]
        ):
            found.append(Instance("made", f"d{number}", step, 2, "test", (weather,), prompt, target))
    write_instances(folder, found)
    return folder


@dataclass
class Registry:
    out: Path
    night: dict[str, Any]
    client: mlflow.MlflowClient
    broken: Path


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A store in which the champion answers and nobody is candidate yet."""
    folder = tmp_path_factory.mktemp("nights")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWPO_RUNS", str(folder / "runs"))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setenv("OMP_NUM_THREADS", "1")
    before = mlflow.get_tracking_uri()
    with prefect_test_harness(server_startup_timeout=300):
        from tasks.registry import Candidate, register
        from tasks.tracking_store import connect

        tracking = connect()
        good = answering_checkpoint(folder / "good")
        broken = damaged(good, folder / "broken")
        first = register(Candidate(good), tracking)
        tracking.client().set_registered_model_alias("awpo", "champion", first.version)
        night = {"instances": str(instances(folder / "instances")), "out": str(folder / "out"), "evaluation": SMALL}
        yield Registry(folder / "out", night, tracking.client(), broken)
    patch.undo()
    mlflow.set_tracking_uri(before)


def test_without_a_candidate_the_champion_is_held_against_its_accepted_scores(registry: Registry) -> None:
    from flows.nightly_regression import nightly_regression

    found = nightly_regression(**registry.night)
    assert found["candidate"] is None
    assert found["scores"] == found["accepted"]
    assert found["scores"]["held_out/test/greedy"] == 0.5
    left = json.loads((Path(found["out"]) / "night.json").read_text())
    assert (left["state"], left["candidate"], left["scores"]) == ("passed", None, found["scores"])


def test_a_damaged_candidate_fails_the_night_and_leaves_the_champion(registry: Registry) -> None:
    from flows.nightly_regression import Regression, nightly_regression
    from tasks.registry import Candidate, register
    from tasks.tracking_store import connect

    tracking = connect()
    version = register(Candidate(registry.broken), tracking)
    tracking.client().set_registered_model_alias("awpo", "candidate", version.version)
    state = nightly_regression(**registry.night, return_state=True)
    assert state.is_failed()
    with pytest.raises(
        Regression, match=r"candidate models:/awpo/2 is worse than the champion models:/awpo/1"
    ) as caught:
        state.result()
    assert "all 0.500 -> 0.000" in str(caught.value)
    assert "40 items broken" in str(caught.value)
    assert str(registry.client.get_model_version_by_alias("awpo", "champion").version) == "1"

    night = max(path for path in registry.out.iterdir() if path.is_dir() and not path.name.startswith("."))
    flipped = json.loads((night / "flips.json").read_text())["flipped"]
    assert {row["change"] for row in flipped} == {"broken"}
    assert {row["first"]["output"] for row in flipped} == {"S."}
    assert all(row["second"]["output"] != "S." for row in flipped)
    assert flipped[0]["id"] in str(caught.value)

    async def told() -> tuple[dict[str, Any], list[Any]]:
        async with get_client() as client:
            artifacts = await client.read_artifacts()
            wanted = {"filter": {"event": {"name": ["awpo.nightly.regressed"]}}}
            for _ in range(60):  # the server writes events down every few seconds
                response = await client._client.post("/events/filter", json=wanted)
                if events := response.json()["events"]:
                    break
                await asyncio.sleep(2)
        run = state.state_details.flow_run_id
        mine = {found.key: found.data for found in artifacts if (found.type, found.flow_run_id) == ("table", run)}
        read = {key: json.loads(data) if isinstance(data, str) else data for key, data in mine.items()}
        return read, events

    from prefect.events.worker import EventsWorker

    EventsWorker.instance().drain()  # a process that ends does this by itself
    tables, events = asyncio.run(told())
    assert {"nightly-decision", "nightly-flipped-items", "nightly-trend", "nightly-awpo"} <= tables.keys()
    assert [row["state"] for row in tables["nightly-trend"]] == ["regressed", "passed"]
    assert tables["nightly-decision"][0]["regression"] == "yes"
    assert len(tables["nightly-flipped-items"]) == 40
    [event] = events
    assert event["resource"]["prefect.resource.id"] == "awpo.model.awpo"
    assert event["payload"]["candidate"] == "models:/awpo/2"
    assert flipped[0]["id"] in event["payload"]["flipped"][0]


def test_a_candidate_becomes_champion_only_through_promote(registry: Registry) -> None:
    """By its name in the registry; the smoke evaluation refuses the damaged one."""
    from flows.promote import SmokeFailed, promote

    smoke = SMALL.model_copy(update={"instances_per_split": 8})
    place = {"instances": registry.night["instances"], "out": str(registry.out.parent / "promote"), "smoke": smoke}
    with pytest.raises(SmokeFailed, match="champion is unchanged"):
        promote(candidate="models:/awpo@candidate", **place)
    found = promote(candidate="models:/awpo/1", alias="candidate", **place)
    assert str(found["version"]) == "1"  # no new version for what is one already
    assert str(registry.client.get_model_version_by_alias("awpo", "candidate").version) == "1"
