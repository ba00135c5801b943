"""Presets of endpoints and judges: read by what they are for, with names of keys and no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from awpo.endpoint_presets import ENDPOINTS, JUDGES, endpoint_presets, judge_presets, read_endpoint, read_judge
from awpo.errors import UserError


def test_the_papers_endpoints_are_there() -> None:
    assert set(endpoint_presets()) >= {"glm-4.6", "gpt-4o", "qwen3-235b-a22b", "local"}
    assert set(judge_presets()) >= {"rubric", "paper", "local"}


@pytest.mark.parametrize("name", endpoint_presets())
def test_an_endpoint_preset_is_read_and_holds_no_key(name: str) -> None:
    config = read_endpoint(name)
    assert config.api_key_variable.isupper()
    assert config.base_url.startswith("https://" if "localhost" not in config.base_url else "http://localhost")
    assert config.temperature == 0
    assert not {"key", "token", "secret", "authorization"} & set(config.options)
    assert config == read_endpoint(str(ENDPOINTS / f"{name}.yaml"))


@pytest.mark.parametrize("name", judge_presets())
def test_a_judge_preset_is_read(name: str) -> None:
    assert (read_judge(name).kind == "endpoint") == (name != "rubric")
    assert read_judge(str(JUDGES / f"{name}.yaml")) == read_judge(name)


def test_the_papers_judge() -> None:
    judge = read_judge("paper")
    assert judge.endpoint == read_endpoint("qwen3-235b-a22b")
    assert judge.label == "Qwen/Qwen3-235B-A22B x3"


def test_wrong_names_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'gpt-4o'"):
        read_endpoint("gpt4o")
    with pytest.raises(UserError, match="presets: local, paper, rubric"):
        read_judge("zzz")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: endpoint\nendpoint: {base_url: 'http://localhost/v1', modle: x}\n")
    with pytest.raises(UserError, match="did you mean 'model'"):
        read_judge(str(wrong))
