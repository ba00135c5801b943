"""Types of flow parameters: what the Prefect UI shows as choices, and the settings of a whole pipeline."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, field_validator

from awpo.config import (
    CorpusConfig,
    EvaluationConfig,
    JudgeConfig,
    PolicyConfig,
    RationaleConfig,
    SftConfig,
)
from awpo.data.settings import DecomposeConfig, SelectConfig
from awpo.data.sources import FORMATS
from awpo.errors import UserError
from awpo.methods import METHODS, get_method
from awpo.models import preset_names, resolve_model
from awpo.settings import Settings, read_yaml
from awpo.types import Split

PRESETS = Path(__file__).resolve().parents[1] / "infra" / "presets" / "pipelines"
STUDY_PRESETS = PRESETS.with_name("studies")

POLICY_METHODS = tuple(name for name, method in METHODS.items() if method.trains)

# Literals made from the registries: plain strings at run time, a list to choose from in the form.
if TYPE_CHECKING:
    MethodName = str
    ModelName = str
    SourceFormat = str
else:
    MethodName = Literal[POLICY_METHODS]
    ModelName = Literal[tuple(preset_names())]
    SourceFormat = Literal[("auto", *FORMATS)]

Init = Literal["base", "sft"]


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
    decomposition: DecomposeConfig = Field(
        default_factory=DecomposeConfig, description="How dialogues become instances"
    )
    selection: SelectConfig = Field(default_factory=SelectConfig, description="What is taken of the instances")
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
        if twice := sorted({name for name in methods if methods.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} more than once: each method has one folder of results")
        return methods

    def check(self) -> PipelineSettings:
        """Raises UserError for a model, source, split or benchmark that is not there, before anything is begun."""
        resolve_model(self.model)
        for split in self.evaluation.splits:
            if split not in get_args(Split):
                near = difflib.get_close_matches(split, get_args(Split), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"splits: {', '.join(get_args(Split))}"
                raise UserError(f"evaluation.splits: no split {split!r}; {hint}")
        from evaluation.benchmarks import identities

        identities(self.evaluation)
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


class StudySettings(Settings):
    """A study as one YAML file (infra/presets/studies); the parameters of the flow `study`."""

    model: str = Field("embedded-1m", description="Preset of infra/presets/models, or a checkpoint's folder")
    methods: tuple[str, ...] = Field(("grpo", "grpo_mixed", "awpo"), min_length=1, description="Methods to train by")
    judges: tuple[JudgeConfig, ...] = Field((JudgeConfig(),), min_length=1, description="Judges of the thoughts")
    seeds: tuple[int, ...] = Field((0, 1, 2, 3, 4), min_length=1, description="Seeds of each cell")
    data: str | None = Field(None, description="Source file or folder; none: the embedded corpus")
    format: str = Field("auto", description="Format of the source")
    decomposition: DecomposeConfig = Field(
        default_factory=DecomposeConfig, description="How dialogues become instances"
    )
    init: Init = Field("sft", description="Where policy training starts")
    corpus: CorpusConfig = Field(default_factory=CorpusConfig, description="The embedded corpus")
    rationales: RationaleConfig = Field(default_factory=RationaleConfig, description="Reference rationales")
    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Policy training")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation")

    def pipeline(self, seed: int) -> PipelineSettings:
        """The settings of one seed's data, model and SFT. Raises UserError for what is not there."""
        shared = {name: getattr(self, name) for name in type(self).model_fields if name not in ("judges", "seeds")}
        return PipelineSettings(**shared, seed=seed).check()

    def common(self) -> dict[str, Any]:
        """What all cells share and their results depend on; keys left at their defaults are left out."""
        run_apart = {"threads", "save_every"}
        stages: dict[str, tuple[Settings, set[str]]] = {
            "corpus": (self.corpus, set()),
            "rationales": (self.rationales, set()),
            "sft": (self.sft, {*run_apart, "seed"}),
            "policy": (self.policy, {*run_apart, "seed", "method", "judge"}),
            "evaluation": (self.evaluation, {*run_apart, "batch_size"}),
        }
        found: dict[str, Any] = {"model": self.model, "init": self.init}
        for name, (settings, left_out) in stages.items():
            found[name] = settings.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
        if decomposition := self.decomposition.model_dump(mode="json", exclude_defaults=True):
            found["decomposition"] = decomposition
        return found

    def quick(self) -> StudySettings:
        """A corner of the study: three methods, the first judge, two seeds."""
        corner = {"methods": ("grpo", "grpo_mixed", "awpo"), "judges": self.judges[:1], "seeds": self.seeds[:2]}
        return self.model_copy(update=corner)


def study_presets() -> list[str]:
    """The names of the study presets, sorted."""
    return sorted(path.stem for path in STUDY_PRESETS.glob("*.yaml"))


def read_study(name_or_path: str) -> StudySettings:
    """The settings of a study preset by name, or of a YAML file by path; UserError where there is none."""
    path = STUDY_PRESETS / f"{name_or_path}.yaml" if name_or_path in study_presets() else Path(name_or_path)
    if not path.exists():
        raise UserError(f"no study {name_or_path!r}; presets: {', '.join(study_presets())}; or a YAML file's path")
    return StudySettings.read(read_yaml(path), str(path))
