from pathlib import Path
from typing import Any

import pytest

from awpo.config import EvaluationConfig, PolicyConfig, RationaleConfig, Settings, SftConfig, read_yaml
from awpo.errors import UserError


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(UserError, match=r"the preset: unknown key 'learning_rat'; did you mean 'learning_rate'\?"):
        SftConfig.read({"learning_rat": 1}, "the preset")


@pytest.mark.parametrize(
    ("settings", "values", "answer"),
    [
        (PolicyConfig, {"judge": {"scael": 1}}, r"unknown key 'judge.scael'; did you mean 'scale'\?"),
        (PolicyConfig, {"judge": {"zzz": 1}}, r"unknown key 'judge.zzz'; known: kind, correlation, endpoint"),
        (RationaleConfig, {"endpoint": {"base_url": "u", "modl": "m"}}, r"did you mean 'model'\?"),
    ],
)
def test_an_unknown_nested_key_is_answered_with_the_keys_of_its_place(
    settings: type[Settings], values: dict[str, Any], answer: str
) -> None:
    with pytest.raises(UserError, match=answer):
        settings.read(values, "x")


def test_a_value_outside_its_limits_is_one_line_with_the_key() -> None:
    with pytest.raises(UserError, match=r"the preset: group_size: .*greater than or equal to 2") as caught:
        PolicyConfig.read({"group_size": 1}, "the preset")
    assert "\n" not in str(caught.value)


def test_rollouts_must_split_into_whole_micro_batches() -> None:
    with pytest.raises(UserError, match="must split evenly"):
        PolicyConfig.read({"prompts_per_rollout": 3, "group_size": 5}, "x")


def test_checkpoints_lie_at_rollout_boundaries() -> None:
    with pytest.raises(UserError, match="save_every must be a multiple of steps_per_rollout = 4"):
        PolicyConfig.read({"save_every": 6}, "x")


def test_an_endpoint_writer_needs_its_endpoint() -> None:
    with pytest.raises(UserError, match="needs 'endpoint'"):
        RationaleConfig.read({"writer": "endpoint"}, "x")


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(UserError, match="benchmarks"):
        EvaluationConfig.read({"benchmarks": ["held_out", "nonsense"]}, "x")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", ""])
def test_yaml_that_is_no_mapping_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "preset.yaml").write_text(text)
    with pytest.raises(UserError, match=r"preset\.yaml"):
        read_yaml(tmp_path / "preset.yaml")


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"\x89PNG\xff\x00", "not text in UTF-8"),
        (b"a: \x00\n", "is not YAML"),
        (b"a: 1\nb: [1,\n", "is not YAML in line 3"),
        (b"a: 2020-13-45\n", "is not YAML: month must be in"),
    ],
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, raw: bytes, answer: str) -> None:
    (tmp_path / "preset.yaml").write_bytes(raw)
    with pytest.raises(UserError, match=answer) as caught:
        read_yaml(tmp_path / "preset.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_yaml_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_yaml(tmp_path / "missing.yaml")


def test_every_field_is_described() -> None:
    for model in (SftConfig, PolicyConfig, EvaluationConfig, RationaleConfig):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
