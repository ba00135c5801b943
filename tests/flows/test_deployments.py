"""prefect.yaml: every deployment names a flow that loads as Prefect loads it, with a form that a person understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest
import yaml
from prefect.flows import Flow, load_flow_from_entrypoint

ROOT = Path(__file__).resolve().parents[2]
PREFECT_YAML = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))
DEPLOYMENTS = {deployment["name"]: deployment for deployment in PREFECT_YAML["deployments"]}
WANTED = {
    "prepare-data",
    "synthesize-rationales",
    "train",
    "evaluate",
    "pipeline",
    "sweep",
    "study",
    "promote",
    "nightly-regression",
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Flow[..., Any]:
    monkeypatch.chdir(ROOT)
    return load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"], use_placeholder_flow=False)


def test_all_are_there() -> None:
    assert set(DEPLOYMENTS) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_the_entrypoint_loads_and_the_defaults_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = load(name, monkeypatch)
    assert flow.name == name
    given = DEPLOYMENTS[name].get("parameters", {})
    flow.validate_parameters({**flow_defaults(flow), **given})


def flow_defaults(flow: Flow[..., Any]) -> dict[str, Any]:
    """The defaults as the API hands them to a worker: JSON."""
    return {key: value["default"] for key, value in flow.parameters.properties.items() if "default" in value}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_field_of_the_form_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = load(name, monkeypatch).parameters.properties
    assert properties
    for key, value in properties.items():
        assert value.get("description"), f"{key} of {name} has no description in the form"


@pytest.mark.parametrize(
    ("name", "key"), [("train", "method"), ("train", "init"), ("pipeline", "init"), ("prepare-data", "format")]
)
def test_choices_are_lists_in_the_form(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(name, monkeypatch).parameters.properties[key]
    assert len(found["enum"]) >= 2


def test_methods_of_the_form_are_those_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from awpo.methods import METHODS

    wanted = {name for name, method in METHODS.items() if method.trains}
    assert set(load("train", monkeypatch).parameters.properties["method"]["enum"]) == wanted
    items = load("pipeline", monkeypatch).parameters.properties["methods"]["items"]
    assert set(items["enum"]) == wanted


def test_nested_settings_keep_their_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = load("pipeline", monkeypatch).parameters
    policy = schema.definitions["PolicyConfig"]["properties"]
    assert policy["learning_rate"]["description"]
    assert policy["reward_mode"]["enum"] == ["strict", "compat"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("train", {"method": "no-such-method"}),
        ("train", {"policy": {"no_such_key": 1}}),
        ("pipeline", {"methods": ["sft"]}),
        ("pipeline", {"seed": "many"}),
        ("evaluate", {"evaluation": {"benchmarks": ["no-such-benchmark"]}}),
    ],
)
def test_wrong_parameters_are_refused(name: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.exceptions import ParameterTypeError

    flow = load(name, monkeypatch)
    with pytest.raises(ParameterTypeError):
        flow.validate_parameters({**flow_defaults(flow), **wrong})


def test_the_nightly_run_is_in_a_named_time_zone() -> None:
    [schedule] = DEPLOYMENTS["nightly-regression"]["schedules"]
    ZoneInfo(schedule["timezone"])
    assert len(schedule["cron"].split()) == 5


def test_no_path_of_one_machine() -> None:
    text = (ROOT / "prefect.yaml").read_text("utf-8")
    assert not any(f"{start}/" in text for start in ("/home", "/root", "/work", "/opt", "/Users"))
