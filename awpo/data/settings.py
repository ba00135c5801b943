"""The settings of data preparation (see `awpo.config` for what holds for all settings)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat

from awpo.settings import Settings


class MaskingConfig(Settings):
    """Hammer's masking of training dialogues (`awpo.data.masking`); the shares are independent of one another."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed; with a dialogue's id it fixes what is masked and how")
    share: float = Field(2 / 3, ge=0, le=1, description="Share of training dialogues whose names are masked")
    functions: float = Field(1.0, ge=0, le=1, description="Share of those in which functions' names are masked")
    parameters: float = Field(1.0, ge=0, le=1, description="Share of those in which parameters' names are masked")
    defaults: float = Field(1.0, ge=0, le=1, description="Share of those in which defaults are perturbed")
    irrelevance: float = Field(
        0.1, ge=0, le=1, description="Share of training dialogues that lose the right tool, so that no call is due"
    )


class DecomposeConfig(Settings):
    """How dialogues become instances."""

    invalid_calls: Literal["keep", "drop"] = Field(
        "keep",
        description="Dialogues with a call that doesn't fit its tool's schema: keep and count, or drop as rejected",
    )
    masking: MaskingConfig | None = Field(None, description="Masking of training dialogues; none where it is empty")


class NearDuplicatesConfig(Settings):
    """Removal of dialogues that are nearly the same as another (`awpo.data.near_duplicates`)."""

    threshold: float = Field(0.8, gt=0, le=1, description="Jaccard similarity of word n-grams from which on they are")
    words: int = Field(3, ge=1, le=20, description="Words of an n-gram")
    permutations: int = Field(128, ge=16, le=1024, description="Hashes of a signature; more tell more exactly")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the hashes")


class BenchmarkText(Settings):
    """The questions of a benchmark."""

    path: str = Field(description="File or folder of JSON, JSON lines or parquet; bfcl: the installed bfcl-eval's data")
    fields: tuple[str, ...] = Field(
        ("question", "input"), min_length=1, description="Fields of a row that hold what is asked; the first it has"
    )


class DecontaminationConfig(Settings):
    """Comparison with the questions of benchmarks (`awpo.data.contamination`)."""

    benchmarks: dict[str, BenchmarkText] = Field(min_length=1, description="Benchmarks by name")
    words: int = Field(8, ge=3, le=50, description="Words in a row that must be the same")
    shortest: int = Field(5, ge=1, description="Questions of fewer words than this are not looked for")
    found: Literal["drop", "keep"] = Field(
        "drop", description="Training dialogues that overlap: drop, or keep and count"
    )


class LengthConfig(Settings):
    """Token lengths by the tokenizer and chat template that training uses (`awpo.data.lengths`)."""

    tokenizer: str = Field(description="Folder of a tokenizer with a chat template, such as a checkpoint's")
    most: int | None = Field(
        None, ge=1, description="Instances of more tokens, prompt and target, are dropped; none: counted"
    )


class MixtureConfig(Settings):
    """Shares of the training split (`awpo.data.mixture`)."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the choice among dialogues")
    sources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="Weight of each source; all must be named, 0 leaves out; empty: as they are"
    )
    steps: dict[Literal["1", "2-3", "4+"], NonNegativeFloat] = Field(
        default_factory=dict, description="Weight of dialogues of so many steps, within a source; empty: as they are"
    )
    dialogues: int | None = Field(
        None, ge=1, description="Training dialogues at most; none: as many as the shares allow"
    )


class SelectConfig(Settings):
    """What is taken of instances; each part is off where it is empty."""

    near_duplicates: NearDuplicatesConfig | None = Field(None, description="Removal of near-duplicates")
    decontamination: DecontaminationConfig | None = Field(None, description="Comparison with benchmarks")
    lengths: LengthConfig | None = Field(None, description="Token lengths")
    mixture: MixtureConfig | None = Field(None, description="Shares of sources and of difficulty")
