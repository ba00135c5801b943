"""What a form's parameters may name: an attacker fills the forms of all deployments."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import pytest
import yaml
from prefect.client.schemas import FlowRun
from prefect.context import FlowRunContext
from prefect.flows import load_flow_from_entrypoint

from awpo.config import EndpointConfig, JudgeConfig
from awpo.config_training import PolicySettings
from awpo.errors import UserError
from flows.form_parameters import ENDPOINTS, ROOTS, Allowed, check, check_parameters

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))["deployments"]}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a worker, with its runs folder elsewhere."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv(ROOTS, raising=False)
    monkeypatch.delenv(ENDPOINTS, raising=False)
    return folder


def run_of(parameters: dict[str, Any], deployment: uuid.UUID | None) -> FlowRunContext:
    """A flow run as Prefect's engine makes it known to the flow's code."""
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), deployment_id=deployment)
    return FlowRunContext.model_construct(parameters=parameters, flow_run=run, flow=None)


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_every_deployment_refuses_a_folder_outside_before_anything_is_done(
    name: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"], use_placeholder_flow=False)
    monkeypatch.chdir(work)
    before = sorted(os.listdir(tmp_path))
    refused = pytest.raises(UserError, match=r"out = /etc/awpo-results lies outside .*AWPO_ROOTS")
    with run_of({"out": "/etc/awpo-results"}, uuid.uuid4()), refused:
        flow.fn(out="/etc/awpo-results")
    assert sorted(os.listdir(tmp_path)) == before
    assert not Path("/etc/awpo-results").exists()


def test_on_the_command_line_a_person_may_name_any_folder(work: Path) -> None:
    with run_of({"out": "/etc/x"}, None):
        check_parameters()


OUTSIDE = {
    "absolute": {"out": "/etc/cron.d"},
    "up": {"out": "runs/../../../elsewhere"},
    "home": {"data": "~/.ssh/id_ed25519"},
    "list": {"models": ["embedded-1m", "/root/.aws/credentials"]},
    "nested": {"selection": {"lengths": {"tokenizer": "/root/model"}}},
    "a path object": {"instances": Path("/var/lib/secrets")},
    "cache of answers": {"endpoint": EndpointConfig(base_url="http://localhost:1/v1", model="m", cache="/etc/passwd")},
    "the runs folder's name is only the beginning": {"out": "{runs}-of-others/x"},
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_paths_outside_are_refused(case: str, work: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = OUTSIDE[case]
    if case.startswith("the runs folder"):
        given = {"out": f"{tmp_path / 'runs'}-of-others/x"}
    with pytest.raises(UserError, match=r"lies outside|begins with ~"):
        check(given, Allowed.here())


def test_a_link_inside_leads_nowhere_outside(work: Path, tmp_path: Path) -> None:
    (work / "data").symlink_to(tmp_path)
    with pytest.raises(UserError, match="lies outside"):
        check({"out": "data/stolen"}, Allowed.here())


def test_what_lies_inside_and_what_is_no_path_is_taken(work: Path, tmp_path: Path, monkeypatch: Any) -> None:
    given = {
        "out": "runs/x",
        "data": f"hub:owner/name@{'0' * 40}",
        "checkpoint": "models:/awpo@champion",
        "instances": str(tmp_path / "runs" / "data"),
        "methods": ["grpo", "awpo"],
        "seeds": [0, 1],
        "reason": "accuracy 3/4\nbetter",
        "words": "x" * 5000,
        "policy": PolicySettings(),
        "model": "embedded-1m",
        "none": None,
    }
    check(given, Allowed.here())
    monkeypatch.setenv(ROOTS, f"{tmp_path / 'shared'}:/srv/data")
    check({"out": str(tmp_path / "shared" / "x"), "data": "/srv/data/rows.json"}, Allowed.here())
    with pytest.raises(UserError, match="lies outside"):
        check({"data": "/srv/data/../secret"}, Allowed.here())


def judge(base_url: str, variable: str = "OPENAI_API_KEY") -> dict[str, Any]:
    endpoint = EndpointConfig(base_url=base_url, model="m", api_key_variable=variable)
    return {"policy": PolicySettings(judge=JudgeConfig(kind="endpoint", endpoint=endpoint))}


@pytest.mark.parametrize(
    ("address", "variable"),
    [
        ("https://evil.example/v1", "OPENAI_API_KEY"),
        ("https://api.openai.com.evil.example/v1", "OPENAI_API_KEY"),
        ("https://api.openai.com@evil.example/v1", "OPENAI_API_KEY"),
        ("http://api.openai.com/v1", "OPENAI_API_KEY"),  # the right host, but in the clear
        ("https://api.openai.com/v1", "AWS_SECRET_ACCESS_KEY"),
        ("https://api.openai.com/v1", "ZAI_API_KEY"),  # another provider's
        ("http://localhost:9999/v1", "AWS_SECRET_ACCESS_KEY"),
        ("http://169.254.169.254/latest", "OPENAI_API_KEY"),
    ],
)
def test_a_form_sends_no_key_to_a_host_of_its_choice(address: str, variable: str, work: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.judge\.endpoint.*AWPO_ENDPOINTS"):
        check(judge(address, variable), Allowed.here())


def test_endpoints_of_presets_of_this_machine_and_of_the_owner_are_taken(work: Path, monkeypatch: Any) -> None:
    for address, variable in (
        ("https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("https://api.z.ai/api/paas/v4", "ZAI_API_KEY"),
        ("http://127.0.0.1:8000/v1", "OPENAI_API_KEY"),
        ("http://localhost:8000/v1", "VLLM_API_KEY"),
    ):
        check(judge(address, variable), Allowed.here())
    monkeypatch.setenv(ENDPOINTS, "https://llm.example:8443=TEAM_KEY, https://other.example")
    check(judge("https://llm.example:8443/v1", "TEAM_KEY"), Allowed.here())
    check(judge("https://other.example/v1"), Allowed.here())
    with pytest.raises(UserError, match="TEAM_KEY is not for"):
        check(judge("https://other.example/v1", "TEAM_KEY"), Allowed.here())


def test_other_addresses_are_those_of_known_servers(work: Path) -> None:
    check({"rollouts": {"url": "http://127.0.0.1:8000"}}, Allowed.here())
    with pytest.raises(UserError, match=r"rollouts\.url: http://10\.0\.0\.7 is no server"):
        check({"rollouts": {"url": "HTTP://10.0.0.7/x"}}, Allowed.here())


@pytest.mark.parametrize("name", ["rollouts", "policy.judge.endpoint"])
def test_an_address_that_is_none_is_refused_in_a_line(name: str, work: Path) -> None:
    parameters = {"rollouts": {"url": "http://[1"}} if name == "rollouts" else judge("http://[1")
    with pytest.raises(UserError, match=rf"{name}.* is no address"):
        check(parameters, Allowed.here())


def test_whatever_a_form_holds_is_told_in_one_line_of_some_length(work: Path) -> None:
    deep: dict[str, Any] = {"out": "a"}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        check(deep, Allowed.here())
    for parameters in (
        {"a\nb" * 5000: "/etc/x"},
        {"out": "/etc/\nx" + "y" * 9000},
        {"out": "~\n" + "y" * 9000},
        {"url": "https://" + "y" * 9000},
        judge("https://" + "y" * 9000 + ".example/v1", "KEY\n" * 9000),
        judge("http://localhost/v1", "KEY\n" * 9000),
    ):
        with pytest.raises(UserError) as caught:
            check(parameters, Allowed.here())
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("entry", ["llm.example=TEAM_KEY", "https://[bad=KEY", "https://=KEY", "ftp://llm.example=KEY"])
def test_an_entry_of_the_owner_that_names_no_server_is_refused(entry: str, monkeypatch: Any) -> None:
    """One without a scheme would let through every address without one."""
    monkeypatch.setenv(ENDPOINTS, entry)
    with pytest.raises(UserError, match="in AWPO_ENDPOINTS names no server"):
        Allowed.here()
