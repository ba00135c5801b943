"""Types of flow parameters: what the Prefect UI shows as choices, and the settings of a whole pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from awpo.config import CorpusConfig, EvaluationConfig, JudgeConfig, RationaleConfig
from awpo.config_training import PolicySettings, SftSettings
from awpo.data.settings import DecomposeConfig, SelectConfig
from awpo.data.sources import FORMATS
from awpo.errors import UserError
from awpo.launch import DEFAULT, launch_presets, read_launch
from awpo.methods import METHODS, get_method
from awpo.models import preset_names, resolve_model
from awpo.settings import SEEDS, Settings, preset_path, read_yaml

PRESETS = Path(__file__).resolve().parents[1] / "infra" / "presets" / "pipelines"
STUDY_PRESETS = PRESETS.with_name("studies")

POLICY_METHODS = tuple(name for name, method in METHODS.items() if method.trains)

# Literals made from the registries: plain strings at run time, a list to choose from in the form.
if TYPE_CHECKING:
    MethodName = str
    ModelName = str
    LaunchName = str
    SourceFormat = str
else:
    MethodName = Literal[POLICY_METHODS]
    ModelName = Annotated[Literal[tuple(preset_names())], Field(title="preset")]
    LaunchName = Annotated[Literal[tuple(launch_presets())], Field(title="preset")]
    SourceFormat = Literal[("auto", *FORMATS)]

ModelFolder = Annotated[str, Field(title="folder")]
"""A model that is no preset; the form tells the two apart by these titles."""
LaunchFile = Annotated[str, Field(title="file")]
"""A launch that is no preset."""

Init = Literal["base", "sft"]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""A share that is not 0."""
Seeds = Annotated[list[Seed], Field(min_length=1)]
MethodNames = Annotated[list[MethodName], Field(min_length=1)]
Models = Annotated[list[ModelName | ModelFolder], Field(min_length=1)]


def check_policy_method(name: str) -> str:
    """The name of a method that trains a policy. Raises UserError naming the nearest one otherwise."""
    if not get_method(name).trains:
        raise UserError(
            f"method {name!r} trains no policy: it is evaluated in every pipeline; choose one of {', '.join(POLICY_METHODS)}"
        )
    return name


def said_once(values: Any, methods: Sequence[str], seeds: Sequence[int]) -> Any:
    """The settings of a pipeline without the method and the seeds that files may also have under policy and sft.

    `methods` and `seeds` are the defaults of what stands at the top; no `seeds`: one seed stands there. Raises
    ValueError where those contradict the ones at the top, which decide.
    """
    if not isinstance(values, dict):
        return values
    decides: dict[str, tuple[str, Sequence[Any]]] = {
        "method": ("methods", values.get("methods") or methods),
        "seed": ("seeds", values.get("seeds", seeds)) if seeds else ("seed", [values.get("seed", 0)]),
    }
    found = dict(values)
    for section, names in (("policy", ("method", "seed")), ("sft", ("seed",))):
        inner = values.get(section)
        if isinstance(inner, Settings):
            given = {name: getattr(inner, name) for name in inner.model_fields_set}
        elif isinstance(inner, dict):
            given = inner
        else:
            continue
        for name in names:
            place, allowed = decides[name]
            if name in given and given[name] not in allowed:
                raise ValueError(
                    f"{section}.{name} = {given[name]!r} contradicts {place} = {', '.join(map(str, allowed))}, which "
                    f"decides; leave {section}.{name} out"
                )
        if inner is given:
            found[section] = {name: value for name, value in given.items() if name not in names}
    return found


class PipelineSettings(Settings):
    """A whole pipeline as one YAML file (infra/presets/pipelines); the parameters of the flow `pipeline`."""

    model: str = Field("embedded-1m", description="Preset of infra/presets/models, or a checkpoint's folder")
    methods: tuple[str, ...] = Field(("grpo", "grpo_mixed", "awpo"), min_length=1, description="Methods to train by")
    seed: Seed = Field(0, description="Seed of model, SFT, policy training and sampling")
    init: Init = Field("sft", description="Where policy training starts")
    data: str | None = Field(None, description="Source file or folder; none: the embedded corpus")
    format: SourceFormat = Field("auto", description="Format of the source")
    decomposition: DecomposeConfig = Field(
        default_factory=DecomposeConfig, description="How dialogues become instances"
    )
    selection: SelectConfig = Field(default_factory=SelectConfig, description="What is taken of the instances")
    corpus: CorpusConfig = Field(default_factory=CorpusConfig, description="The embedded corpus")
    rationales: RationaleConfig = Field(default_factory=RationaleConfig, description="Reference rationales")
    sft: SftSettings = Field(default_factory=SftSettings, description="Supervised fine-tuning")
    policy: PolicySettings = Field(default_factory=PolicySettings, description="Policy training")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation")
    launch: str = Field(DEFAULT, description="In how many processes is trained: a preset of infra/presets/launch")

    @model_validator(mode="before")
    @classmethod
    def _said_once(cls, values: Any) -> Any:
        return said_once(values, cls.model_fields["methods"].default, ())

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
        """Raises UserError for a model, launch, source or benchmark that is not there, before anything is begun.

        Likewise for settings of policy training that one of the methods can't have.
        """
        resolve_model(self.model)
        processes = read_launch(self.launch).total
        for method in self.methods:
            try:
                self.policy.with_method(method, self.seed)
            except ValidationError as error:
                raise UserError(f"policy: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        if processes > 1:
            self._check_shared(processes)
        from evaluation.benchmarks import identities

        identities(self.evaluation)
        if self.data is not None and not os.path.exists(self.data):
            raise UserError(f"{self.data} does not exist; give the path of a source file or folder")
        return self

    def _check_shared(self, processes: int) -> None:
        """Raises UserError where the steps of the trainings can't be shared out among so many processes."""
        from awpo.training.hardware import accumulation_steps

        policy, sft = self.policy, self.sft
        micro_batch = policy.micro_batch_on(processes)
        accumulation_steps(policy.rollouts_per_step, micro_batch, processes, "policy.micro_batch_size")
        if self.init == "sft":
            accumulation_steps(sft.batch_size, sft.micro_batch_on(processes), processes, "sft.micro_batch_size")

    def fitted(self, left_as: PipelineSettings) -> PipelineSettings:
        """These settings for a model that a form's defaults, `left_as`, are not made for.

        The defaults suit the embedded models. For another one that has a preset, the sections and the launch that were
        left as they are become those of its preset; what was changed stays as it is.
        """
        choice = resolve_model(self.model)
        raw = self.model_dump()
        for section, own in ({} if choice.kind == "embedded" else choice.settings or {}).items():
            if getattr(self, section) == getattr(left_as, section):
                raw[section] |= own
        if choice.launch and self.launch == left_as.launch:
            raw["launch"] = choice.launch
        return type(self).read(raw, f"the preset of {self.model}")

    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of the flow `pipeline`."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def pipeline_presets() -> list[str]:
    """The names of the pipeline presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_pipeline(name_or_path: str) -> PipelineSettings:
    """The settings of a preset by name, or of a YAML file by path; UserError where there is none, or it is wrong."""
    path = preset_path(PRESETS, name_or_path, "pipeline")
    return PipelineSettings.read(read_yaml(path), str(path))


class StudySettings(Settings):
    """A study as one YAML file (infra/presets/studies); the parameters of the flow `study`."""

    model: str = Field("embedded-1m", description="Preset of infra/presets/models, or a checkpoint's folder")
    methods: tuple[str, ...] = Field(("grpo", "grpo_mixed", "awpo"), min_length=1, description="Methods to train by")
    judges: tuple[JudgeConfig, ...] = Field((JudgeConfig(),), min_length=1, description="Judges of the thoughts")
    seeds: tuple[Seed, ...] = Field((0, 1, 2, 3, 4), min_length=1, description="Seeds of each cell")
    data: str | None = Field(None, description="Source file or folder; none: the embedded corpus")
    format: SourceFormat = Field("auto", description="Format of the source")
    decomposition: DecomposeConfig = Field(
        default_factory=DecomposeConfig, description="How dialogues become instances"
    )
    init: Init = Field("sft", description="Where policy training starts")
    corpus: CorpusConfig = Field(default_factory=CorpusConfig, description="The embedded corpus")
    rationales: RationaleConfig = Field(default_factory=RationaleConfig, description="Reference rationales")
    sft: SftSettings = Field(default_factory=SftSettings, description="Supervised fine-tuning")
    policy: PolicySettings = Field(default_factory=PolicySettings, description="Policy training")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation")

    @model_validator(mode="before")
    @classmethod
    def _said_once(cls, values: Any) -> Any:
        return said_once(values, cls.model_fields["methods"].default, cls.model_fields["seeds"].default)

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
    path = preset_path(STUDY_PRESETS, name_or_path, "study")
    return StudySettings.read(read_yaml(path), str(path))
