"""Token lengths of instances by the real tokenizer and its chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from awpo.chat import render_prompt, render_target
from awpo.data.settings import LengthConfig
from awpo.errors import UserError
from awpo.files import file_hash
from awpo.types import Instance, content_hash

CHARACTERS_KEPT = 8_000_000
# What a tokenizer is made of, among the files of a checkpoint.
_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")


def tokenizer_identity(config: LengthConfig) -> str:
    """The hash of a tokenizer's files. Raises UserError where there is none."""
    folder = Path(config.tokenizer)
    if not folder.is_dir():
        raise UserError(f"lengths.tokenizer: {config.tokenizer} is no folder; give a checkpoint's")
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    return content_hash({path.name: file_hash(path) for path in files})


class Lengths:
    """Counts tokens of prompt and target, as training renders them."""

    def __init__(self, config: LengthConfig) -> None:
        """Raises UserError where the tokenizer cannot be loaded or has no chat template."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                config.tokenizer, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"lengths.tokenizer: {config.tokenizer} holds no tokenizer ({reason:.120})") from None
        if not self.tokenizer.chat_template:
            raise UserError(f"lengths.tokenizer: {config.tokenizer} has no chat template; give one that has")
        self.segments = Segments.of(self.tokenizer)

    def count(self, instances: list[Instance]) -> list[int]:
        """The tokens of each instance: its prompt, and its target with the rationale where it has one."""
        if not instances:
            return []
        texts = [
            render_prompt(self.tokenizer, instance) + render_target(instance.target, instance.rationale)
            for instance in instances
        ]
        return self.segments.count(texts) if self.segments is not None else self._whole(texts)

    def _whole(self, texts: list[str]) -> list[int]:
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]


class Segments:
    """Counts tokens of texts by what stands between special tokens; what was counted before is not counted again.

    A tokenizer of the library `tokenizers` takes the special tokens out first and treats what lies between them apart:
    the tokens of a text are those of its segments. Most are repeated: each step of a dialogue begins as the one before
    did, and many dialogues have the same tools.
    """

    def __init__(self, backend: Any, pattern: re.Pattern[str]) -> None:
        self._backend, self._pattern = backend, pattern
        self._known: dict[str, int] = {}
        self._characters = 0

    @staticmethod
    def of(tokenizer: Any) -> Segments | None:
        """None for a tokenizer of which this does not hold, or is not known to."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return None
        described = backend.to_str()
        # `Metaspace` treats a text's beginning in a way of its own, and a marked token may take blanks around it.
        tokens = [token for token in json.loads(described)["added_tokens"] if not token["normalized"]]
        if '"Metaspace"' in described or not tokens:
            return None
        if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens):
            return None
        longest_first = sorted((token["content"] for token in tokens), key=len, reverse=True)
        return Segments(backend, re.compile(f"({'|'.join(map(re.escape, longest_first))})"))

    def count(self, texts: list[str]) -> list[int]:
        """The tokens of each text."""
        # Special tokens stand at odd places.
        split = [self._pattern.split(text) for text in texts]
        if self._characters > CHARACTERS_KEPT:
            self._known.clear()
            self._characters = 0
        new = list(dict.fromkeys(part for parts in split for part in parts[::2] if part not in self._known))
        # Without the masks and offsets that nobody asks for here.
        for part, found in zip(new, self._backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._known[part] = len(found)
            self._characters += len(part)
        return [sum(self._known[part] for part in parts[::2]) + len(parts) // 2 for parts in split]
