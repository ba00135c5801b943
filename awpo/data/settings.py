"""The settings of data preparation (see `awpo.config` for what holds for all settings)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from awpo.settings import Settings


class MaskingConfig(Settings):
    """Hammer's masking of training dialogues (`awpo.data.masking`); the shares are independent of one another."""

    seed: int = Field(0, ge=0, description="Seed; with a dialogue's id it fixes what is masked and how")
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
