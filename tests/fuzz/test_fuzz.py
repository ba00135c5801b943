"""A few seconds of what `make fuzz` does for long: no exception but those that are documented, no growth past proportion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awpo.chat import parse_completion
from awpo.data import strict_json
from awpo.data.call_syntax import scan_literal
from awpo.data.sources import read
from awpo.data.sources.base import Rejected
from awpo.endpoint_presets import read_judge
from awpo.errors import UserError
from awpo.judge_prompts import read_reason
from awpo.launch import LaunchSettings
from awpo.models import resolve_model
from awpo.serving.application import Refused, read_request
from awpo.settings import Settings, load_yaml, preset_path, read_yaml
from flows.parameters import PipelineSettings
from tasks.tracking import RunFile
from tests.fuzz.further_targets import tokenizer
from tests.fuzz.fuzz import TOKENS
from tests.fuzz.growth import bombs, repeated, rows_of_formats, texts
from tests.fuzz.targets import CORPUS, TARGETS

SEEDS = {name: [path.read_bytes() for path in sorted((CORPUS / name).iterdir())] for name in TARGETS}


@st.composite
def spoilt(draw: st.DrawFn, name: str) -> bytes:
    """A seed, or two at a cut, in which pieces were replaced by tokens, by other characters, or by nothing."""
    seeds = st.sampled_from(SEEDS[name])
    data = draw(seeds)
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))] + (other := draw(seeds))[draw(st.integers(0, len(other))) :]
    pieces = st.one_of(
        st.sampled_from(TOKENS).map(str.encode), st.text(max_size=6).map(str.encode), st.binary(max_size=4)
    )
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(data)))
        data = (
            data[:start]
            + draw(pieces) * draw(st.sampled_from([1, 1, 1, 70]))
            + data[start + draw(st.integers(0, 20)) :]
        )
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_text_and_few(name: str) -> None:
    for seed in SEEDS[name]:
        seed.decode("utf-8")
        TARGETS[name](seed)
    assert len(SEEDS[name]) >= 3
    assert sum(map(len, SEEDS[name])) < 20_000


@pytest.mark.parametrize("name", TARGETS)
def test_growth_is_measured_of_every_target(name: str) -> None:
    assert texts(name, 100)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_comes_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """vllm#19056: malformed JSON raises inside a parser."""
    TARGETS[name](data.draw(spoilt(name)))


@pytest.mark.parametrize("name", ["completion", "calls", "judge", "rows"])
def test_time_grows_with_size_in_proportion(name: str) -> None:
    """Of what was quadratic each of these took minutes; `python tests/fuzz/growth.py` measures."""
    for text in repeated(name, 30_000).values():
        TARGETS[name](text)


def test_hostile_rows_of_every_format_are_read_in_proportion() -> None:
    for text in rows_of_formats(200_000).values():
        TARGETS["rows"](text)


def test_hostile_settings_are_read_or_refused_in_proportion() -> None:
    for text in [*repeated("settings", 1_000).values(), *bombs(30_000).values()]:
        TARGETS["settings"](text)


# What was found, each by its kind.


def test_an_integer_of_too_many_digits_does_not_hide_what_is_nested_too_deeply(tmp_path: Path) -> None:
    """The second reading, for the integer, met the nesting and raised RecursionError out of the reader."""
    hostile = '{"a": ' + "1" * 5000 + ', "b": ' + "[" * 20_000 + "]" * 20_000 + "}"
    with pytest.raises(ValueError, match="nested too deeply"):
        strict_json.parse(hostile)
    (tmp_path / "rows.jsonl").write_text(f'{hostile}\n{{"query": "Hi", "tools": "[]", "answers": "[]"}}\n')
    rejected, fine = read(tmp_path / "rows.jsonl", "xlam")
    assert isinstance(rejected, Rejected)
    assert not isinstance(fine, Rejected)


def test_a_long_number_with_a_letter_behind_it_is_no_number() -> None:
    """It was tried in every division of its digits: minutes for 100 kB."""
    assert scan_literal("1" * 300_000 + "x")[1] is not None
    assert scan_literal("1." + "1" * 300_000 + "e5x")[1] is not None
    assert scan_literal("-1.5e3")[0] == -1500.0


def test_a_judge_s_reason_can_be_written_down() -> None:
    assert read_reason('{"reason": "a\\ud800b"}') == "a?b"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 2000, "nested more than 64 deep"),
        ("- " * 2000 + "a", "nested more than 64 deep"),
        ("a: &a [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1 if n else ''}, *a{n - 1 if n else ''}]\n" for n in range(30)), "more than 100000 values"),
        ("a: &a {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1 if n else ''}, *a{n - 1 if n else ''}]}}\n" for n in range(30)), "more than 100000 values"),
        ("a: &a [*a]", "more than 100000 values"),
        ("a: !!bool maybe", "not what its tag says"),
        ("a: !!timestamp soon", "not what its tag says"),
        ("a: !!int ''", "not what its tag says"),
        ("#" * 2**20 + "#", "1048577 characters"),
    ],
)  # fmt: skip
def test_settings_that_mean_more_than_they_say_are_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    """Deep nesting raised RecursionError; aliases of aliases stood for billions of values in the message."""
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        read_yaml(tmp_path / "settings.yaml")
    assert "\n" not in str(caught.value)


def test_aliases_of_a_settings_file_work() -> None:
    assert load_yaml("a: &a {x: 1}\nb: {<<: *a, y: *a}\n") == {"a": {"x": 1}, "b": {"x": 1, "y": {"x": 1}}}
    assert load_yaml("") is None


class Example(Settings):
    steps: int = 1
    rate: float = 0.5


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"st[eps": 1}, r"unknown key 'st\[eps'"),
        ({"x" * 10_000: 1}, "unknown key 'xxx"),
        ({"rate": 10**5000}, "rate: "),
        ({"steps": [10**5000]}, "steps: must be a whole number, not "),
    ],
)
def test_a_message_about_settings_can_always_be_made(values: dict[str, object], told: str) -> None:
    """A key with a bracket, a key of many characters, an integer that Python does not write out."""
    with pytest.raises(UserError, match=told) as caught:
        Example.read(values, "settings.yaml")
    assert len(str(caught.value)) < 1000


LONG = "x" * 300


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (LaunchSettings, {"accelerate": LONG}),
        (LaunchSettings, {"interpreter": LONG}),
        (PipelineSettings, {"data": LONG}),
        (PipelineSettings, {"model": LONG}),
        (PipelineSettings, {"launch": LONG}),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_like_one_that_none_has(
    schema: type[Settings], values: dict[str, object]
) -> None:
    """Path.exists raises OSError for a name of more than 255 bytes."""
    with pytest.raises(UserError, match="xxx"):
        getattr(schema.read(values, "settings.yaml"), "check", str)()


def test_presets_models_and_judges_of_such_names_are_refused(tmp_path: Path) -> None:
    for use in (read_judge, resolve_model, lambda name: preset_path(tmp_path, name, "preset")):
        with pytest.raises(UserError, match="xxx"):
            use(LONG)


@pytest.mark.parametrize("call", ['{"function": {"arguments": "%s"}}' % ("[" * 20_000), '{"function": 1}', "[1]", "1"])
def test_calls_of_a_request_that_cannot_be_read_are_refused(call: str) -> None:
    """Arguments that are nested too deeply ended the request to the model server with a traceback."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a", "tool_calls": [json.loads(call)]}]}
    with pytest.raises(Refused, match="'tool_calls' cannot be read"):
        read_request(body, tokenizer(), 512, "m")


@pytest.mark.parametrize("damaged", ["[" * 100_000, '"a"', '{"uri": 1}', '{"sent": [1]}', '{"sent": {"loss": "a"}}'])
def test_a_damaged_note_of_a_run_is_none(tmp_path: Path, damaged: str) -> None:
    whole = {"uri": "sqlite:///a", "run_id": "b", "work": "c", "sent": {"loss": 3}}
    file = RunFile.path_for(tmp_path / "stage")
    file.write_text(json.dumps(whole))
    assert RunFile.read(tmp_path / "stage") is not None
    file.write_text(json.dumps(whole | json.loads(damaged)) if damaged.startswith("{") else damaged)
    assert RunFile.read(tmp_path / "stage") is None


def test_the_fuzzer_s_targets_are_those_of_the_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert parse_completion("").errors
