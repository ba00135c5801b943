"""A checkpoint that an attacker made: whoever loads one executes nothing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from awpo.chat import render_messages
from awpo.data.lengths import Lengths
from awpo.data.settings import LengthConfig
from awpo.errors import UserError
from awpo.models import resolve_model
from awpo.serving.engine import load_engine
from awpo.training.checkpoints import check_positions, load_policy
from awpo.training.rollout_buffer import RolloutState, file_name
from awpo.types import Message
from evaluation.loading import load

LOADERS: dict[str, Callable[[Path], Any]] = {
    "training": lambda folder: load_policy(str(folder)),
    "evaluation": lambda folder: load(folder, torch.float32),
    "serving": lambda folder: load_engine(resolve_model(str(folder))),
}


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("who", LOADERS)
def test_weights_that_are_a_pickle_are_refused(who: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, ran = make_checkpoint(), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"\(pytorch_model.bin\) are a pickle.*convert them to safetensors"):
        LOADERS[who](folder)
    assert not ran.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # the attack is one
    assert ran.exists()


@pytest.mark.parametrize("who", [*LOADERS, "positions", "lengths"])
def test_code_beside_the_weights_is_not_run(who: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, ran = make_checkpoint(), tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nclass Evil: pass\n")
    evil = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    for name, classes in (
        ("config.json", evil),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "modeling_evil.Evil"]}),
    ):
        values = json.loads((folder / name).read_text())
        values |= {"auto_map": classes}
        if name == "config.json":
            values["model_type"] = "evil"
        else:
            values["tokenizer_class"] = "Evil"
        (folder / name).write_text(json.dumps(values))
    more = {
        "positions": lambda folder: check_positions(str(folder), 10, "x"),
        "lengths": lambda folder: Lengths(LengthConfig(tokenizer=str(folder))),
    }
    with pytest.raises(UserError):
        {**LOADERS, **more}[who](folder)
    assert not ran.exists()


def test_a_template_reaches_nothing_of_python(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    escape = "{{ cycler.__init__.__globals__.os.system('true') }}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer, _ = load(folder, torch.float32)
    tokenizer.chat_template = escape
    with pytest.raises(Exception, match=r"unsafe|undefined") as caught:
        render_messages(tokenizer, (Message("user", "hello"),), (), {})
    assert type(caught.value).__module__.startswith("jinja2")


def test_rollouts_of_a_checkpoint_are_read_without_unpickling_objects(tmp_path: Path) -> None:
    state = RolloutState(micro_batches=1, buffer=[], metrics={}, memory={}, processes=1)
    state.write(tmp_path, 0)
    assert RolloutState.read(tmp_path, 0, 1) == state
    ran = tmp_path / "ran"
    torch.save({"micro_batches": Payload(ran)}, tmp_path / file_name(0))
    with pytest.raises(UserError, match="cannot resume"):
        RolloutState.read(tmp_path, 0, 1)
    assert not ran.exists()
