"""prefect.yaml: every deployment names a flow that loads as Prefect loads it, with a form that a person understands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest
import yaml
from prefect.flows import Flow, load_flow_from_entrypoint

from flows.environment import DEFAULTS

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


@pytest.mark.parametrize(("name", "field"), [("pipeline", "methods"), ("sweep", "methods"), ("sweep", "models")])
def test_a_form_takes_no_empty_list(name: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(name, monkeypatch).parameters.properties[field]["minItems"] == 1


def flow_defaults(flow: Flow[..., Any]) -> dict[str, Any]:
    """The defaults as the API hands them to a worker: JSON."""
    return {key: value["default"] for key, value in flow.parameters.properties.items() if "default" in value}


def fields(flow: Flow[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a form by its place, and every kind of value that it may have; nested settings once each."""
    schema, seen = flow.parameters, set()

    def walk(place: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name not in seen:
                seen.add(name)
                for key, value in schema.definitions[name]["properties"].items():
                    yield f"{name}.{key}", value
                    yield from walk(f"{name}.{key}", value)
        for part in (*node.get("anyOf", []), *node.get("allOf", []), *node.get("prefixItems", [])):
            yield from walk(place, part)
        for inner in ("items", "additionalProperties"):
            if isinstance(node.get(inner), dict):
                yield from walk(f"{place}[]", node[inner])
        if "type" in node:
            yield f"{place}:", node

    for key, value in schema.properties.items():
        yield key, value
        yield from walk(key, value)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_field_of_the_form_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(fields(load(name, monkeypatch)))
    assert len(found) > 10
    silent = [place for place, node in found.items() if not place.endswith(":") and not node.get("description")]
    assert silent == []


LIMITS = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
SHARES = re.compile(r"share|rate\b|_rate|accuracy|margin|drop|dropout|temperature|threads|correlation|threshold|seed")


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_number_of_the_form_has_its_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest, highest = LIMITS
    numbers = {p: node for p, node in fields(load(name, monkeypatch)) if node.get("type") in ("integer", "number")}
    assert numbers
    assert [place for place, node in numbers.items() if not lowest & node.keys()] == []
    # Counts have no natural end; what does (shares, rates, temperatures, seeds) has one in its form.
    ended = {place: node for place, node in numbers.items() if SHARES.search(place.rpartition(".")[2])}
    assert [place for place, node in ended.items() if not highest & node.keys()] == []


# What is a person's own word, and can be no list to choose from.
FREE = {
    *("out", "data", "source", "instances", "checkpoint", "candidate", "cells"),  # paths; models:/NAME@ALIAS
    *("model", "models[]", "launch"),  # a path, where it is no preset: those are listed beside
    *("name", "alias"),  # names of the registry
    *("EndpointConfig.base_url", "EndpointConfig.model", "EndpointConfig.api_key_variable", "EndpointConfig.cache"),
    "RolloutSettings.url",  # the address of a vLLM server
    *("LengthConfig.tokenizer", "BenchmarkText.path", "BenchmarkText.fields[]", "EvaluationConfig.benchmark_data"),
    "AdapterConfig.target_modules[]",  # names of a model's layers
}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_choice_of_the_form_is_a_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {p.removesuffix(":"): node for p, node in fields(load(name, monkeypatch)) if node.get("type") == "string"}
    free = {place for place, node in texts.items() if not {"enum", "const"} & node.keys()}
    assert free - FREE == set()


@pytest.mark.parametrize("name", sorted(WANTED))
def test_the_parameters_are_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = DEPLOYMENTS[name].get("parameters", {})
    assert len(json.dumps({**flow_defaults(load(name, monkeypatch)), **given})) < 20_000


FIRST = {
    "train": ["model", "method", "seed"],
    "pipeline": ["model", "methods", "seed"],
    "sweep": ["models", "methods", "seeds"],
    "study": ["model", "methods", "judges", "seeds"],
    "evaluate": ["checkpoint"],
    "promote": ["candidate"],
    "nightly-regression": ["instances"],
    "prepare-data": ["source", "format", "out"],
    "synthesize-rationales": ["instances", "out"],
}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_what_is_changed_first_comes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = load(name, monkeypatch).parameters.properties
    placed = sorted(properties, key=lambda key: properties[key]["position"])
    assert placed[: len(FIRST[name])] == FIRST[name]
    nested = [key for key in placed if "$ref" in str(properties[key])]
    assert placed[len(placed) - len(nested) :] == nested or name == "study"


@pytest.mark.parametrize("name", ["train", "pipeline", "sweep", "study"])
def test_method_and_seed_are_asked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = load(name, monkeypatch).parameters
    assert not {"method", "seed"} & schema.definitions["PolicySettings"]["properties"].keys()
    assert "seed" not in schema.definitions["SftSettings"]["properties"]
    assert not {"method", "seed"} & schema.properties["policy"]["default"].keys()


@pytest.mark.parametrize(
    ("name", "key"),
    [("train", "method"), ("train", "init"), ("train", "format"), ("sweep", "format"), ("prepare-data", "format")],
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
    policy = schema.definitions["PolicySettings"]["properties"]
    assert policy["learning_rate"]["description"]
    assert policy["reward_mode"]["enum"] == ["strict", "compat"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("train", {"method": "no-such-method"}),
        ("train", {"policy": {"no_such_key": 1}}),
        ("train", {"policy": {"method": "grpo"}}),
        ("train", {"seed": -1}),
        ("sweep", {"seeds": [0, -1]}),
        ("sweep", {"seeds": []}),
        ("promote", {"minimum_accuracy": 1.5}),
        ("evaluate", {"evaluation": {"splits": ["no-such-split"]}}),
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


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_run_has_prefects_settings_before_its_flow_is_loaded(name: str) -> None:
    """What the module of a flow sets comes too late for those: Prefect reads its settings when it is imported."""
    given = DEPLOYMENTS[name]["work_pool"]["job_variables"]["env"]
    read_early = ("PREFECT_CLIENT_", "PREFECT_FLOWS_")
    assert {key: given.get(key) for key in DEFAULTS if key.startswith(read_early)} == {
        key: value for key, value in DEFAULTS.items() if key.startswith(read_early)
    }
