"""Kubernetes's templates are what its API takes, by its own schemas; Prefect renders the base job template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import flows.prefect_home  # noqa: F401 - before Prefect is imported

# isort: split
import jsonschema
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.workers.base import BaseJobConfiguration

from awpo.launch import launch_presets, read_launch
from awpo.models import resolve_model

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: make install")

FOLDER = Path(__file__).resolve().parents[2] / "infra" / "kubernetes"
TEMPLATE: dict[str, Any] = json.loads((FOLDER / "base-job-template.json").read_text("utf-8"))
# The oldest release that is still maintained somewhere, and the newest whose schemas are there.
RELEASES = ("1.31", "1.37")
NOBODY = "http://127.0.0.1:9/api"  # a server is asked only where a template names its blocks or variables


def check(manifest: dict[str, Any]) -> None:
    for release in RELEASES:
        kubernetes_validate.validate(manifest, release, strict=True)


def manifests() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        found += [(f"{path.name}-{one['kind']}", one) for one in yaml.safe_load_all(path.read_text("utf-8"))]
    return found


@pytest.mark.parametrize("manifest", [one for _, one in manifests()], ids=[name for name, _ in manifests()])
def test_manifests_are_kubernetes_own(manifest: dict[str, Any]) -> None:
    check(manifest)


def test_a_slip_would_be_noticed() -> None:
    job = next(one for name, one in manifests() if name == "train.yaml-Job")
    job["spec"]["template"]["spec"]["completions"] = 1  # belongs one level up
    with pytest.raises(kubernetes_validate.ValidationError):
        check(job)


def test_the_training_job_finds_its_first_node_and_its_storage() -> None:
    found = dict(manifests())
    job, service, claim = (
        found["train.yaml-Job"],
        found["train.yaml-Service"],
        found["storage.yaml-PersistentVolumeClaim"],
    )
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    name = job["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert environment["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert environment["AWPO_MACHINES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]} >= {
        claim["metadata"]["name"]
    }
    options = dict(zip(container["command"][2::2], container["command"][3::2], strict=True))
    assert container["command"][:2] == ["awpo", "train"]
    assert options["--launch"] in launch_presets()
    assert read_launch(options["--launch"]).processes == container["resources"]["limits"]["nvidia.com/gpu"]
    resolve_model(options["--model"])


class JobConfiguration(BaseJobConfiguration):
    """What a worker of the type kubernetes reads of the template, as far as it is rendered."""

    namespace: str
    job_manifest: dict[str, Any]
    pod_watch_timeout_seconds: int
    stream_output: bool


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    async def render() -> JobConfiguration:
        async with PrefectClient(NOBODY) as client:
            return await JobConfiguration.from_template_and_values(TEMPLATE, values, client=client)

    return asyncio.run(render()).job_manifest


def filled(manifest: dict[str, Any]) -> dict[str, Any]:
    """With what the worker fills in when it starts a run: a name, and the environment as a list."""
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    container["args"] = ["prefect", "flow-run", "execute"]
    manifest["metadata"]["generateName"] = "awpo-"
    return manifest


def test_prefect_renders_the_template_with_its_defaults_into_a_job() -> None:
    job = filled(rendered({}))
    check(job)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "64Gi"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_prefect_renders_the_template_with_what_a_deployment_says() -> None:
    job = filled(rendered({"image": "registry.example/awpo:7", "gpus": 8, "node_selector": {}, "tolerations": []}))
    check(job)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/awpo:7"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert not pod.get("nodeSelector")


def test_every_variable_is_used_and_described() -> None:
    jsonschema.Draft202012Validator.check_schema(TEMPLATE["variables"])
    text = json.dumps(TEMPLATE["job_configuration"])
    for name, variable in TEMPLATE["variables"]["properties"].items():
        assert f"{{{{ {name} }}}}" in text, name
        if "default" in variable:
            jsonschema.validate(variable["default"], variable)


def test_prefects_own_kubernetes_worker_takes_the_template() -> None:
    worker = pytest.importorskip(
        "prefect_kubernetes.worker",
        reason="no prefect-kubernetes: pip install prefect-kubernetes in an environment of its own",
    )

    async def render() -> Any:
        async with PrefectClient(NOBODY) as client:
            return await worker.KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, {}, client=client)

    assert asyncio.run(render()).job_manifest["spec"]["template"]["spec"]["containers"][0]["image"] == "awpo:gpu"
