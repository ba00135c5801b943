from pathlib import Path

import pytest

from awpo.errors import UserError
from awpo.settings import read_yaml


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
        (
            b"a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n",
            "is not YAML in line 5: the key 'c' stands there again, first in line 3",
        ),
        (b"a: {c: 1, c: 1}\n", "is not YAML in line 1: the key 'c' stands there again"),
    ],
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, raw: bytes, answer: str) -> None:
    (tmp_path / "preset.yaml").write_bytes(raw)
    with pytest.raises(UserError, match=answer) as caught:
        read_yaml(tmp_path / "preset.yaml")
    assert "\n" not in str(caught.value)


def test_a_key_may_stand_in_two_mappings_and_replace_one_that_is_merged(tmp_path: Path) -> None:
    (tmp_path / "preset.yaml").write_text("base: &base {c: 1, d: 2}\nother:\n  <<: *base\n  c: 3\n")
    assert read_yaml(tmp_path / "preset.yaml")["other"] == {"c": 3, "d": 2}


def test_a_missing_yaml_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_yaml(tmp_path / "missing.yaml")


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.yaml").write_text(f"model: !!python/object/apply:os.mkdir [{ran}]\n")
    with pytest.raises(UserError, match=r"evil\.yaml is not YAML in line 1.*could not determine a constructor"):
        read_yaml(tmp_path / "evil.yaml")
    assert not ran.exists()
