"""infra/compose.yaml is what the Compose Specification says, has no default password, and its services fit together."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.environment import DEFAULTS

compose_spec = pytest.importorskip("compose_spec", reason="no compose-spec: make install")

INFRA = Path(__file__).resolve().parents[2] / "infra"
ROOT = INFRA.parent
TEXT = (INFRA / "compose.yaml").read_text("utf-8")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:[?-])([^{}]*))?\}")
SET = {
    "AWPO_POSTGRES_PASSWORD": "one",
    "AWPO_PREFECT_DB_PASSWORD": "two",
    "AWPO_MLFLOW_DB_PASSWORD": "three",
    "AWPO_S3_ACCESS_KEY": "four",
    "AWPO_S3_SECRET_KEY": "five",
}


def interpolated(environment: dict[str, str]) -> str:
    """As Compose fills in variables; ValueError for one that is required and not set."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if found := environment.get(name):
            return found
        if operator == ":?" or operator is None:
            raise ValueError(f"{name}: {rest}")
        return str(rest)

    return VARIABLE.sub(value, TEXT)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load(interpolated(SET))["services"])


def merged() -> str:
    """With YAML's anchors and merges resolved."""
    whole = yaml.safe_load(interpolated(SET))
    return yaml.safe_dump({key: value for key, value in whole.items() if not key.startswith("x-")})


def test_it_is_a_compose_file() -> None:
    compose_spec.PyCompose.from_yaml(merged()).validate()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("healthcheck:", "healthchek:"),
        ("condition: service_healthy", "condition: service_healty"),
        ("4200:4200", "4200:x"),
    ],
)
def test_a_slip_would_be_noticed(right: str, wrong: str) -> None:
    assert right in merged()
    with pytest.raises(ValueError, match=r"services\."):
        compose_spec.PyCompose.from_yaml(merged().replace(right, wrong, 1))


@pytest.mark.parametrize("name", SET)
def test_nothing_secret_has_a_default(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: set it in infra/.env"):
        interpolated({key: value for key, value in SET.items() if key != name})


def test_the_example_names_every_variable_and_sets_no_secret() -> None:
    lines = (INFRA / "compose.env.example").read_text("utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert example.keys() == {match[1] for match in VARIABLE.finditer(TEXT)}
    assert {example[name] for name in SET} == {""}
    assert "infra/.env" not in (ROOT / ".gitignore").read_text()
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_images_are_pinned_to_a_release(services: dict[str, Any]) -> None:
    for name, service in services.items():
        image, _, tag = service["image"].rpartition(":")
        if image == "awpo":
            assert service["build"]["dockerfile"] == f"infra/docker/Dockerfile.{tag}"
        else:
            assert re.search(r"\d+\.\d+", tag), name


def test_ports_are_open_on_this_machine_alone(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_who_is_waited_for_can_say_that_it_is_ready(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], f"{name} waits for {needed}"
            else:
                assert services[needed]["restart"] == "on-failure", f"{name} waits for the end of {needed}"
    assert all("healthcheck" in service for service in services.values() if service["restart"] == "unless-stopped")


def test_volumes_and_files_are_there(services: dict[str, Any]) -> None:
    named = set(yaml.safe_load(TEXT)["volumes"])
    used = set()
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (INFRA / source).is_file()
            else:
                used.add(source)
    assert used == named
    assert (INFRA / "docker" / "databases.sh").stat().st_mode & stat.S_IXOTH


def test_addresses_name_services(services: dict[str, Any]) -> None:
    text = yaml.safe_dump(services)
    hosts = set(re.findall(r"//(?:[^/@\s]*@)?([a-z0-9]+):\d+", text)) - {"127"}
    assert hosts == {"postgres", "prefect", "mlflow", "s3"}
    assert hosts <= services.keys()
    allowed = services["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    assert services["worker"]["environment"]["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert "mlflow:5000" in allowed.split(",")


def test_commands_are_installed_programs(services: dict[str, Any]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    for service in services.values():
        if command := service.get("command"):
            assert command[0] in {*scripts, "prefect", "mlflow", "python"}
            assert not (command[0] == "python" and not (ROOT / command[1]).is_file())


def test_the_s3_store_is_reached_as_it_listens(services: dict[str, Any]) -> None:
    store, mlflow, bucket = services["s3"]["environment"], services["mlflow"]["environment"], services["bucket"]
    assert mlflow["MLFLOW_S3_ENDPOINT_URL"] == f"http://s3{store['VGW_PORT']}"
    assert mlflow["AWS_SECRET_ACCESS_KEY"] == store["ROOT_SECRET_KEY"]
    assert mlflow["MLFLOW_ARTIFACTS_DESTINATION"].split("/")[2] == bucket["command"][-1]


def test_servers_and_workers_have_prefects_settings(services: dict[str, Any]) -> None:
    """`awpo serve` sets them; here nobody else would."""
    for name in (
        "PREFECT_CLIENT_MAX_RETRIES",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES",
        "PREFECT_WORKER_ENABLE_CANCELLATION",
    ):
        assert services["worker"]["environment"][name] == DEFAULTS[name]
    leases = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    assert services["prefect"]["environment"][leases] == DEFAULTS[leases]
