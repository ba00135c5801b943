"""Token lengths of instances by the real tokenizer and its chat template: counted, tabled, and what is too long told."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

from awpo.chat import render_prompt, render_target
from awpo.data.settings import LengthConfig
from awpo.errors import UserError
from awpo.types import Instance

BINS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Lengths:
    """Counts tokens of prompt and target, as training renders them, in a table by source."""

    def __init__(self, config: LengthConfig) -> None:
        """Raises UserError where the tokenizer cannot be loaded or has no chat template."""
        from transformers import AutoTokenizer

        self.config = config
        if not Path(config.tokenizer).is_dir():
            raise UserError(f"lengths.tokenizer: {config.tokenizer} is no folder; give a checkpoint's")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"lengths.tokenizer: {config.tokenizer} holds no tokenizer ({reason:.120})") from None
        if not self.tokenizer.chat_template:
            raise UserError(f"lengths.tokenizer: {config.tokenizer} has no chat template; give one that has")
        self.table: dict[str, dict[str, Any]] = {}

    def count(self, instances: list[Instance]) -> list[int]:
        """The tokens of each instance: its prompt, and its target with the rationale where it has one."""
        if not instances:
            return []
        texts = [
            render_prompt(self.tokenizer, instance) + render_target(instance.target, instance.rationale)
            for instance in instances
        ]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.truncation is None and backend.padding is None:
            # The same tokens, without the masks and offsets that nobody asks for here.
            return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def fits(self, instances: list[Instance]) -> list[bool]:
        """Which instances are not too long; all are counted in the table."""
        fitting = []
        for instance, tokens in zip(instances, self.count(instances), strict=True):
            fits = self.config.most is None or tokens <= self.config.most
            empty = {"instances": 0, "tokens": 0, "longest": 0, "too_long": 0, "up_to": Counter[str]()}
            row = self.table.setdefault(instance.source, empty)
            row["instances"] += 1
            row["tokens"] += tokens
            row["longest"] = max(row["longest"], tokens)
            row["too_long"] += not fits
            place = bisect_left(BINS, tokens)
            row["up_to"][str(BINS[place]) if place < len(BINS) else "more"] += 1
            fitting.append(fits)
        return fitting
