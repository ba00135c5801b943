"""Names of endpoints and judges: what a person may write where one is asked for.

A preset is a YAML file of `infra/presets/endpoints` (EndpointConfig) or `infra/presets/judges` (JudgeConfig). A
judge's `endpoint` may be the name of an endpoint's preset. Presets hold names of keys' variables, never keys.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from awpo.config import EndpointConfig, JudgeConfig
from awpo.errors import UserError
from awpo.settings import read_yaml

PRESETS = Path(__file__).resolve().parents[1] / "infra" / "presets"
ENDPOINTS, JUDGES = PRESETS / "endpoints", PRESETS / "judges"


def endpoint_presets() -> list[str]:
    """The names of the endpoint presets, sorted."""
    return sorted(path.stem for path in ENDPOINTS.glob("*.yaml"))


def judge_presets() -> list[str]:
    """The names of the judge presets, sorted."""
    return sorted(path.stem for path in JUDGES.glob("*.yaml"))


def read_endpoint(name_or_path: str) -> EndpointConfig:
    """An endpoint by its preset's name or a YAML file's path. Raises UserError where there is none, or it is wrong."""
    path = _find(name_or_path, ENDPOINTS, "endpoint")
    return EndpointConfig.read(read_yaml(path), str(path))


def read_judge(name_or_path: str) -> JudgeConfig:
    """A judge by its preset's name or a YAML file's path. Raises UserError where there is none, or it is wrong."""
    path = _find(name_or_path, JUDGES, "judge")
    values: dict[str, Any] = read_yaml(path)
    if isinstance(values.get("endpoint"), str):
        values["endpoint"] = read_endpoint(values["endpoint"]).model_dump()
    return JudgeConfig.read(values, str(path))


def _find(name_or_path: str, folder: Path, what: str) -> Path:
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    path = folder / f"{name_or_path}.yaml" if name_or_path in names else Path(name_or_path)
    if os.path.isfile(path):  # unlike Path.is_file, also where a name is too long to be one
        return path
    near = difflib.get_close_matches(name_or_path, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(names)}; or a YAML file's path"
    raise UserError(f"no {what} {name_or_path!r}; {hint}")
