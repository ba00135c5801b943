from pathlib import Path

import pytest

from awpo.errors import UserError
from awpo.models import preset_names, resolve_model


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_resolves(name: str) -> None:
    choice = resolve_model(name)
    assert choice.name == name
    assert choice.kind in ("embedded", "smollm2", "hub")
    assert (choice.revision is not None) == (choice.kind == "hub")


def test_a_hub_model_is_loaded_at_its_revision() -> None:
    choice = resolve_model("qwen3-0.6b")
    assert choice.address == f"Qwen/Qwen3-0.6B@{choice.revision}"
    assert resolve_model("embedded-1m").address == "embedded-1m"


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown model 'embeded-1m'; did you mean 'embedded-1m'\?"):
        resolve_model("embeded-1m")


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(UserError, match=r"known: .*embedded-1m.*or a checkpoint's folder"):
        resolve_model("zzz")


def test_a_folder_must_hold_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).kind == "folder"
