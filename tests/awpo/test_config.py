import re
from pathlib import Path
from typing import Any

import pytest

from awpo.config import CorpusConfig, EvaluationConfig, JudgeConfig, RationaleConfig
from awpo.config_training import AdapterConfig, PolicyConfig, SftConfig
from awpo.errors import UserError
from awpo.methods import METHODS
from awpo.settings import Settings, read_yaml


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
    with pytest.raises(UserError, match=r"^the preset: temperature: must be at most 2, not 3$") as caught:
        PolicyConfig.read({"temperature": 3}, "the preset")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "values", "answer"),
    [
        (SftConfig, {"steps": "many"}, "steps: must be a whole number, not 'many'"),
        (SftConfig, {"steps": 1.5}, "steps: must be a whole number, not 1.5"),
        (SftConfig, {"steps": None}, "steps: must be a whole number, not empty"),
        (SftConfig, {"learning_rate": "fast"}, "learning_rate: must be a number, not 'fast'"),
        (SftConfig, {"learning_rate": float("inf")}, "learning_rate: must be a finite number, not inf"),
        (SftConfig, {"learning_rate": 0}, "learning_rate: must be more than 0, not 0"),
        (SftConfig, {"wrong_decision_share": 1}, "wrong_decision_share: must be less than 1, not 1"),
        (SftConfig, {"rationales": "perhaps"}, "rationales: must be true or false, not 'perhaps'"),
        (SftConfig, {"lora": 3}, "lora: must be a mapping of keys to values, not 3"),
        (SftConfig, {"lora": {"target_modules": 3}}, "lora.target_modules: must be 'all-linear' or a list, not 3"),
        (PolicyConfig, {"method": 3}, "method: must be text, not 3"),
        (
            PolicyConfig,
            {"reward_mode": "strikt"},
            "reward_mode: must be 'strict' or 'compat', not 'strikt'; did you mean 'strict'?",
        ),
        (
            PolicyConfig,
            {"judge": {"kind": "x", "samples": 0}},
            "judge.kind: must be 'rubric', 'endpoint' or 'correlated'",
        ),
        (EvaluationConfig, {"splits": "test"}, "splits: must be a list, not 'test'"),
        (JudgeConfig, {"endpoint": {"model": "m"}}, "endpoint.base_url is missing (Base URL, ending in /v1); give it"),
    ],
)
def test_a_mistake_is_told_in_words_of_the_file(settings: type[Settings], values: dict[str, Any], answer: str) -> None:
    with pytest.raises(UserError) as caught:
        settings.read(values, "x")
    assert str(caught.value).startswith(f"x: {answer}")
    assert "Input" not in str(caught.value)
    assert "\n" not in str(caught.value)


ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "model": "strong"}


@pytest.mark.parametrize(
    ("settings", "values", "answer"),
    [
        (PolicyConfig, {"group_size": 1}, "x: group_size: must be at least 2, not 1: a lone rollout has no group"),
        (
            PolicyConfig,
            {"prompts_per_rollout": 3, "group_size": 5},
            "x: prompts_per_rollout x group_size = 3 x 5 = 15 rollouts can't be split into steps_per_rollout = 4 equal "
            "optimiser steps; choose 1, 3, 5, 15",
        ),
        (
            PolicyConfig,
            {"prompts_per_rollout": 8, "group_size": 4, "steps_per_rollout": 4, "micro_batch_size": 64},
            "x: the 8 x 4 / 4 = 8 rollouts of an optimiser step (prompts_per_rollout x group_size / steps_per_rollout) "
            "are no whole number of micro-batches of 64; choose a micro_batch_size of 1, 2, 4, 8",
        ),
        (
            PolicyConfig,
            {"prompts_per_rollout": 32, "micro_batch_size": 24},
            "are no whole number of micro-batches of 24; choose a micro_batch_size of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            PolicyConfig,
            {"steps": 3},
            "x: steps = 3 is fewer than steps_per_rollout = 4: part of the only rollout batch would never be trained on; "
            "give more steps, or a steps_per_rollout of at most 3",
        ),
        (PolicyConfig, {"method": "awpo-sotf"}, "x: method: no method 'awpo-sotf'; did you mean 'awpo_soft'?"),
        (PolicyConfig, {"method": "sft"}, "x: method: 'sft' trains no policy; choose a method that does"),
        (
            SftConfig,
            {"batch_size": 12, "micro_batch_size": 8},
            "x: the batch_size = 12 instances of an optimiser step are no whole number of micro-batches of 8; choose a "
            "micro_batch_size of 1, 2, 3, 4, 6, 12",
        ),
        (SftConfig, {"lora": {"rank": 0}}, "x: lora.rank: must be at least 1, not 0"),
        (SftConfig, {"lora": {"target_modules": []}}, "no layer would get an adapter"),
        (SftConfig, {"lora": {"target_modules": ["q_proj", "lm_head"]}}, "'lm_head' can have no adapter"),
        (SftConfig, {"lora": {"rnak": 8}}, "x: unknown key 'lora.rnak'; did you mean 'rank'?"),
        (
            SftConfig,
            {"precision": "float16"},
            "x: precision: must be 'auto', 'float32' or 'bfloat16', not 'float16'; did you mean 'bfloat16'?",
        ),
        (
            PolicyConfig,
            {"judge": {"endpoint": ENDPOINT}},
            "x: judge: kind 'rubric' would never ask 'strong'; set kind: endpoint",
        ),
        (JudgeConfig, {"two_pass": True}, "x: two_pass asks a model twice, and kind 'rubric' asks none"),
        (JudgeConfig, {"kind": "endpoint"}, "x: kind 'endpoint' needs 'endpoint' with base_url and model"),
        (JudgeConfig, {"correlation": 0.5}, "x: 'correlation' and kind 'correlated' go together"),
        (RationaleConfig, {"endpoint": ENDPOINT}, "x: writer 'offline' would never ask 'strong'; set writer: endpoint"),
        (EvaluationConfig, {"benchmarks": []}, "x: benchmarks is empty, so nothing would be evaluated"),
        (EvaluationConfig, {"splits": []}, "x: benchmark 'held_out' needs at least one of splits"),
        (EvaluationConfig, {"splits": ["test", "test"]}, "x: splits has test more than once"),
        (CorpusConfig, {"test_dialogues": 0}, "x: test_dialogues: must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_or_contradicts_itself_is_refused_with_the_numbers(
    settings: type[Settings], values: dict[str, Any], answer: str
) -> None:
    with pytest.raises(UserError, match=re.escape(answer)) as caught:
        settings.read(values, "x")
    assert "\n" not in str(caught.value)


def test_a_penalty_over_less_than_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method of the registry has a share that small; a reader may add one."""
    brief = METHODS["dapo"].changed(name="brief", overlong_share=0.1)
    monkeypatch.setattr("awpo.methods.METHODS", {**METHODS, "brief": brief})
    with pytest.raises(UserError, match=r"last 0\.1 x max_completion_length = 0\.8 tokens.* of at least 10$"):
        PolicyConfig.read({"method": "brief", "max_completion_length": 8}, "x")
    assert PolicyConfig.read({"method": "brief", "max_completion_length": 10}, "x").method == "brief"


def test_where_clipping_is_never_alive_the_config_says_so() -> None:
    once = {"steps_per_rollout": 1}
    (remark,) = PolicyConfig.read({**once, "method": "grpo"}, "x").remarks()
    assert remark.startswith("clipping is never alive: with steps_per_rollout = 1 each rollout is used once")
    assert "shrinking" not in remark
    (remark,) = PolicyConfig.read({**once, "method": "awpo"}, "x").remarks()
    assert remark.endswith("nor does the shrinking clip radius of 'awpo'")
    assert PolicyConfig().remarks() == []
    (remark,) = PolicyConfig(steps=42).remarks()
    assert remark.endswith("of the last rollout batch 2 of 4 parts are used")


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_a_switch_is_what_yaml_makes_of_it(tmp_path: Path, text: str, value: str) -> None:
    """A bare on is true in YAML."""
    (tmp_path / "sft.yaml").write_text(f"gradient_checkpointing: {text}\n")
    assert SftConfig.read(read_yaml(tmp_path / "sft.yaml"), "x").gradient_checkpointing == value


def test_an_endpoint_writer_needs_its_endpoint() -> None:
    with pytest.raises(UserError, match="needs 'endpoint'"):
        RationaleConfig.read({"writer": "endpoint"}, "x")


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(UserError, match="benchmarks"):
        EvaluationConfig.read({"benchmarks": ["held_out", "nonsense"]}, "x")


def test_every_field_is_described() -> None:
    for model in (SftConfig, PolicyConfig, EvaluationConfig, RationaleConfig, JudgeConfig, AdapterConfig, CorpusConfig):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
