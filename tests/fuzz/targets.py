"""What is fuzzed: everything that reads what a stranger, a model or a hurried person wrote.

Each target takes bytes and raises nothing: what it may raise (UserError, RowError, ValueError where that is documented)
it takes for an answer. It asserts besides that what was read can be written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from awpo.chat import MOST_ERRORS, parse_completion
from awpo.config import EvaluationConfig, JudgeConfig
from awpo.config_training import PolicyConfig, SftConfig
from awpo.data import strict_json
from awpo.data.call_syntax import begins_call, scan_calls, scan_literal
from awpo.data.rows import Rows
from awpo.data.settings import DecomposeConfig, SelectConfig
from awpo.data.sources import FORMATS, detect, read_row
from awpo.data.sources.base import read_value
from awpo.errors import UserError
from awpo.judge_prompts import CRITERIA, read_grades, read_reason
from awpo.launch import LaunchSettings
from awpo.settings import Settings, read_yaml
from awpo.types import Dialogue
from flows.parameters import PipelineSettings, StudySettings
from tests.fuzz.further_targets import FURTHER, check_message, new_folder, text_of

CORPUS = Path(__file__).with_name("corpus")
SETTINGS: tuple[type[Settings], ...] = (
    PipelineSettings,
    StudySettings,
    LaunchSettings,
    PolicyConfig,
    SftConfig,
    JudgeConfig,
    EvaluationConfig,
    DecomposeConfig,
    SelectConfig,
)

_folder = new_folder()


def completion(data: bytes) -> None:
    """The completion parser never raises; what it gives can be stored."""
    found = parse_completion(text_of(data))
    assert len(found.errors) <= MOST_ERRORS
    assert found.errors or not found.calls_malformed
    json.dumps([(call.name, call.arguments) for call in found.tool_calls], ensure_ascii=False, allow_nan=False).encode()
    (found.content + (found.thought or "") + "".join(found.errors)).encode("utf-8")


def rows(data: bytes) -> None:
    """A file of rows is read, row by row, by each format: a dialogue that can be written down, or the reason why not."""
    path = _folder / "rows"
    path.write_bytes(data)
    try:
        detect(path)
        found = list(Rows(path))
    except UserError as error:
        check_message(error)
        return
    for source in FORMATS.values():
        for row in found:
            dialogue = read_row(row, source)
            if isinstance(dialogue, Dialogue):
                strict_json.dump(dialogue.to_json())
            else:
                assert dialogue.reason


def calls(data: bytes) -> None:
    """Calls and values as code, as JSON, or as either: read, or a ValueError that says why not."""
    text = text_of(data)
    names = ["get", "Get It", "a(1", "[x", text[:8]]
    for loose in (False, True):
        scan_calls(text, names, unescaped_quotes=loose)
    begins_call(text, names)
    scan_literal(text)
    try:
        value = read_value(text)
    except ValueError:
        return
    written = strict_json.dump(value)
    assert strict_json.dump(strict_json.parse(written)) == written


def judge(data: bytes) -> None:
    """A judge's answer gives every criterion in [0, 1], or nothing."""
    text = text_of(data)
    grades = read_grades(text)
    assert grades is None or (tuple(grades) == CRITERIA and all(0 <= grade <= 1 for grade in grades.values()))
    read_reason(text).encode("utf-8")


def settings(data: bytes) -> None:
    """A settings file is a mapping, which each schema reads or refuses in one line."""
    path = _folder / "settings.yaml"
    path.write_bytes(data)
    try:
        values = read_yaml(path)
    except UserError as error:
        check_message(error)
        return
    for schema in SETTINGS:
        try:
            schema.read(values, "settings.yaml").identity()
        except UserError as error:
            check_message(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (completion, rows, calls, judge, settings, *FURTHER)
}
