"""The embedded model and its tokenizer: exact round trips, one token per tag, a real Qwen3 that copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from awpo import chat
from awpo.config import CorpusConfig
from awpo.data import store
from awpo.data.decompose import decompose
from awpo.data.rationales import offline_rationale
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import POSITIONS, SIZES, build_model
from awpo.embedded.scaffolding import CONTROL_TOKENS, TAGS, frame
from awpo.embedded.tokenizer import VOCABULARY, attached_words, chat_template
from awpo.errors import UserError
from awpo.files import file_hash
from awpo.types import Instance

CONFIG = CorpusConfig(train_dialogues=400, validation_dialogues=10, test_dialogues=30)


def decomposed() -> list[Instance]:
    instances = [instance for dialogue in dialogues(CONFIG) for instance in decompose(dialogue)]
    return [instance.with_rationale(offline_rationale(instance)) for instance in instances]


@pytest.fixture(scope="module")
def instances() -> list[Instance]:
    return decomposed()


@pytest.fixture(scope="module")
def folder(instances: list[Instance], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedded")
    store.write_instances(root / "instances", instances)
    build_model("embedded-1m", root / "instances", root / "model")
    return root


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def round_trip(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


def words(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=200))
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    assert round_trip(tokenizer, text) == text


PIECES = st.sampled_from(
    [
        '{"name": "',
        '": "',
        '", "',
        "<tool_call>",
        "</think>",
        "<|im_end|>",
        "\n\n",
        "  ",
        "\t",
        "Paris",
        " in",
        "é",
        "12",
    ]
)


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(PIECES, max_size=30))
def test_text_made_of_scaffolding_comes_back(tokenizer: Any, parts: list[str]) -> None:
    assert round_trip(tokenizer, "".join(parts)) == "".join(parts)


def test_code_and_foreign_schemas_come_back(tokenizer: Any) -> None:
    schema = {
        "name": "math.lcm",
        "description": "Compute the least common multiple.\n\tNote: »ünïcode« and 日本語 \U0001f600.",
        "parameters": {
            "type": "dict",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "default": [1, -2.5e-7]}},
            "required": [],
        },
    }
    for text in (
        json.dumps(schema),
        json.dumps(schema, indent=2, ensure_ascii=False),
        "def f(x):\r\n    return  x ** 2   \n\n\n",
        "a\u0301 \u00e1 \ufffd \x00 \x7f  ",
        json.dumps([schema] * 60),
    ):
        assert round_trip(tokenizer, text) == text


def test_instances_of_every_split_come_back(tokenizer: Any, instances: list[Instance]) -> None:
    for instance in instances[:: len(instances) // 60]:
        text = chat.render_prompt(tokenizer, instance) + chat.render_target(instance.target, instance.rationale)
        assert round_trip(tokenizer, text) == text


def test_only_control_tokens_are_special(tokenizer: Any) -> None:
    assert set(tokenizer.all_special_tokens) == set(CONTROL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert {text for text, special in added.items() if special} == set(CONTROL_TOKENS)
    for tag in TAGS:
        assert added[tag] is False
        assert len(tokenizer(tag)["input_ids"]) == 1
    text = "<think>\nYes.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    assert tokenizer.decode(tokenizer(text + "<|im_end|>")["input_ids"], skip_special_tokens=True) == text


def test_the_template_is_qwen3s_and_shows_every_tool(tokenizer: Any, instances: list[Instance]) -> None:
    assert tokenizer.chat_template == chat_template()
    instance = instances[0]
    prompt = chat.render_prompt(tokenizer, instance)
    assert all(f'"name": "{tool.name}"' in prompt for tool in instance.tools)
    assert all(tool.description in prompt for tool in instance.tools)
    assert chat.render_prompt(tokenizer, instance, thinking=False).endswith("<think>\n\n</think>\n\n")


def test_the_templates_sentences_are_one_token_each(tokenizer: Any) -> None:
    def render(messages: Any, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    head, tail = frame(render)
    assert head.startswith("# Tools")
    assert head.endswith("<tools>\n")
    assert tail.startswith("\n</tools>")
    assert "<args-json-object>" in tail
    assert len(tokenizer(head)["input_ids"]) == len(tokenizer(tail)["input_ids"]) == 1


def test_a_value_has_the_same_tokens_in_a_sentence_a_result_and_a_call(tokenizer: Any) -> None:
    for value in ("Paris", "Blue Moon", "dinner is ready", "7:30", "Anna", "B47", "Ouagadougou"):
        inside = words(tokenizer, value)
        for before, after in (("Is it in ", "?"), ('{"city": "', '"}'), ("city is ", "."), ("with ", " and")):
            tokens = words(tokenizer, before + value + after)
            assert any(tokens[start : start + len(inside)] == inside for start in range(len(tokens))), (value, tokens)


def test_prompts_and_targets_are_short(tokenizer: Any, instances: list[Instance]) -> None:
    train = [instance for instance in instances if instance.split == "train"]
    prompts = [len(tokenizer(chat.render_prompt(tokenizer, instance))["input_ids"]) for instance in train]
    targets = [len(tokenizer(chat.render_target(i.target, i.rationale))["input_ids"]) + 1 for i in train]
    assert sum(prompts) / len(train) < 135
    assert max(prompts) < 320
    assert sum(targets) / len(train) < 50
    assert max(targets) < 160


def test_words_that_begin_a_value_do_not_keep_their_space() -> None:
    texts = ["so the Paris of the north is in the north", "I see in the paper that Paris is in"]
    assert attached_words(texts, {"Paris"}, most=4) == ["in", "is", "north", "the"]
    assert "the" not in attached_words(["the cat and the dog", "the end"], set())


@pytest.mark.parametrize(("size", "low", "high"), [("embedded-1m", 0.9e6, 1.1e6), ("embedded-3m", 2.8e6, 3.2e6)])
def test_sizes_are_as_named(folder: Path, tmp_path: Path, size: str, low: float, high: float) -> None:
    manifest = build_model(size, folder / "instances", tmp_path / size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / size)
    assert low < model.num_parameters() == manifest.counts["parameters"] < high
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


def test_the_model_is_a_tied_qwen3_with_room_for_long_prompts(model: Any, tokenizer: Any, folder: Path) -> None:
    assert type(model) is Qwen3ForCausalLM
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == POSITIONS >= 8192
    assert len(tokenizer) <= VOCABULARY == model.config.vocab_size
    assert model.dtype == torch.float32
    generation = GenerationConfig.from_pretrained(folder / "model")
    assert generation.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert generation.pad_token_id == tokenizer.pad_token_id


@torch.no_grad()
def test_the_forward_pass_is_finite_and_ignores_padding(model: Any, tokenizer: Any, instances: list[Instance]) -> None:
    prompts = [chat.render_prompt(tokenizer, instance) for instance in instances[:4]]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    assert batch["attention_mask"][:, -1].all(), "padding is on the left"
    logits = model(**batch).logits
    assert torch.isfinite(logits).all()
    for row, prompt in enumerate(prompts):
        alone = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        torch.testing.assert_close(logits[row, -1], alone, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_the_untrained_model_copies_what_followed_before(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    once = torch.randint(0, model.config.vocab_size, (2, 60), generator=generator)
    logits = model(input_ids=torch.cat((once, once), dim=1)).logits
    predicted = logits[:, 60:-1].argmax(-1)
    assert (predicted == once[:, 1:]).float().mean() > 0.6
    assert (logits[:, :59].argmax(-1) == once[:, 1:]).float().mean() < 0.1, "it cannot know what it has not seen"


def test_the_same_instances_and_seed_give_the_same_files(folder: Path, tmp_path: Path) -> None:
    build_model("embedded-1m", folder / "instances", tmp_path / "again")
    build_model("embedded-1m", folder / "instances", tmp_path / "other", seed=1)
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        assert file_hash(folder / "model" / name) == file_hash(tmp_path / "again" / name), name
    assert file_hash(folder / "model" / "tokenizer.json") == file_hash(tmp_path / "other" / "tokenizer.json")
    assert file_hash(folder / "model" / "model.safetensors") != file_hash(tmp_path / "other" / "model.safetensors")


def test_building_leaves_torchs_random_state_alone(folder: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    build_model("embedded-1m", folder / "instances", tmp_path / "model")
    assert torch.equal(before, torch.random.get_rng_state())


def test_wrong_sizes_and_instances_without_train_are_told(
    folder: Path, tmp_path: Path, instances: list[Instance]
) -> None:
    with pytest.raises(UserError, match=", ".join(SIZES)):
        build_model("embedded-9m", folder / "instances", tmp_path / "a")
    store.write_instances(tmp_path / "test", [i for i in instances if i.split == "test_tools"][:3])
    with pytest.raises(UserError, match="'train'"):
        build_model("embedded-1m", tmp_path / "test", tmp_path / "b")
