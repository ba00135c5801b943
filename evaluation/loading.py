"""Loading a checkpoint that a person points at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from awpo.errors import UserError
from awpo.models import HARMLESS, no_weights


def load(folder: Path, dtype: Any) -> tuple[Any, Any]:
    """Tokenizer and model; UserError for whatever is missing or broken, none of which the library fills in."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model (no config.json); give a folder saved by a training stage")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} holds no tokenizer (no tokenizer.json); save it beside the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **HARMLESS
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = no_weights(folder) or str(error).splitlines()[0]
        raise UserError(f"cannot load the model in {folder}: {reason}") from None
    if report["missing_keys"]:
        name = sorted(report["missing_keys"])[0]
        raise UserError(f"{folder} lacks {len(report['missing_keys'])} weights of its model ({name}, ..); save it anew")
    return tokenizer, model
