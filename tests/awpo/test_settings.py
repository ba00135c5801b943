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
