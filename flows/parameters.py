"""Types of flow parameters: what the Prefect UI shows as choices, and the settings of a whole pipeline."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from awpo.config import CorpusConfig, EvaluationConfig, PolicyConfig, RationaleConfig, Settings, SftConfig, read_yaml
from awpo.errors import UserError
from awpo.methods import METHODS, get_method
from awpo.models import preset_names, resolve_model

PRESETS = Path(__file__).resolve().parents[1] / "infra" / "presets" / "pipelines"

POLICY_METHODS = tuple(name for name, method in METHODS.items() if method.trains)

# Literals made from the registries: plain strings at run time, a list to choose from in the form.
if TYPE_CHECKING:
    MethodName = str
    ModelName = str
else:
    MethodName = Literal[POLICY_METHODS]
    ModelName = Literal[tuple(preset_names())]

Init = Literal["base", "sft"]
SourceFormat = str


def check_policy_method(name: str) -> str:
    """The name of a method that trains a policy. Raises UserError naming the nearest one otherwise."""
    if not get_method(name).trains:
        raise UserError(
            f"method {name!r} trains no policy: it is evaluated in every pipeline; choose one of {', '.join(POLICY_METHODS)}"
        )
    return name


class PipelineSettings(Settings):
    """A whole pipeline as one YAML file (infra/presets/pipelines); the parameters of the flow `pipeline`."""

    data: str | None = Field(None, description="Source file or folder; none: the embedded corpus")
    format: str = Field("auto", description="Format of the source")
    model: str = Field("embedded-1m", description="Preset of infra/presets/models, or a checkpoint's folder")
    methods: tuple[str, ...] = Field(("grpo", "grpo_mixed", "awpo"), min_length=1, description="Methods to train by")
    init: Init = Field("sft", description="Where policy training starts")
    seed: int = Field(0, ge=0, description="Seed of model, SFT, policy training and sampling")
    corpus: CorpusConfig = Field(default_factory=CorpusConfig, description="The embedded corpus")
    rationales: RationaleConfig = Field(default_factory=RationaleConfig, description="Reference rationales")
    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Policy training")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation")

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for name in methods:
            try:
                check_policy_method(name)
            except UserError as error:
                raise ValueError(str(error)) from None
        return methods

    def check(self) -> PipelineSettings:
        """Raises UserError for a model, source or benchmark that is not there, before anything is begun."""
        resolve_model(self.model)
        if "bfcl" in self.evaluation.benchmarks:
            from evaluation.bfcl.data import installed_version

            installed_version()
        if self.data is not None and not Path(self.data).exists():
            raise UserError(f"{self.data} does not exist; give the path of a source file or folder")
        return self

    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of the flow `pipeline`."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def pipeline_presets() -> list[str]:
    """The names of the pipeline presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_pipeline(name_or_path: str) -> PipelineSettings:
    """The settings of a preset by name, or of a YAML file by path; UserError where there is none, or it is wrong."""
    path = PRESETS / f"{name_or_path}.yaml" if name_or_path in pipeline_presets() else Path(name_or_path)
    if not path.exists():
        near = difflib.get_close_matches(name_or_path, pipeline_presets(), n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(pipeline_presets())}; or a YAML file's path"
        )
        raise UserError(f"no pipeline {name_or_path!r}; {hint}")
    return PipelineSettings.read(read_yaml(path), str(path))
