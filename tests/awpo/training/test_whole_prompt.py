"""The prompt is whole, and the same wherever it is met: in fine-tuning, in rollouts and in evaluation.

With both of Qwen3's own templates: the thinking one and that of instruct-2507, which has no thoughts. TRL by itself
would render no tools that stand in a row, and would strip tags that are special tokens.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from awpo.chat import render_target
from awpo.config_training import PolicyConfig
from awpo.events import RunLog
from awpo.methods import get_method
from awpo.training.policy import prompt_rows, trainer_arguments
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer
from awpo.training.sft import Demonstrations
from awpo.training.sft_trainer import IGNORED
from awpo.types import Instance, Message, Tool, ToolCall
from evaluation.generate import Question, Sampling
from evaluation.local_generator import LocalGenerator

TEMPLATES = ("qwen3.jinja", "qwen3_instruct_2507.jinja")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONFIG = PolicyConfig(
    prompts_per_rollout=2, group_size=2, steps_per_rollout=1, micro_batch_size=4, max_completion_length=300
)

TOOLS = (
    Tool("get_weather", "Weather in a city", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool(
        "Search Managers",
        'Looks "people" up, even <b>Grüße</b> & 早',
        {
            "type": "object",
            "properties": {
                "filter": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"key": {"enum": ["a", "b"]}, "n": {"type": "integer"}}},
                },
                "limit": {"type": "integer", "default": 10, "minimum": 0, "description": "most\nanswers"},
            },
            "required": ["filter"],
        },
    ),
    Tool("clock", "", {"type": "object", "properties": {}}),
)
SEARCH = ToolCall("Search Managers", {"filter": [{"key": "a", "n": 1}], "limit": 3})


def make(number: int, *prompt: Message, tools: tuple[Tool, ...] = TOOLS) -> Instance:
    target = Message("assistant", None, (SEARCH, ToolCall("clock", {}))) if number % 2 else Message("assistant", "Hi.")
    return Instance("test", f"d{number}", 0, 1, "train", tools, prompt, target, "The search fits <tool_call> well.")


INSTANCES = [
    make(0, Message("user", "Who is it?")),
    make(1, Message("system", "Be kind."), Message("user", "Who is it?")),
    make(
        2,
        Message("user", "Who is it?"),
        Message("assistant", "I look.", (SEARCH,), thought="An earlier thought"),
        Message("tool", '{"name": "Ann"}', name="Search Managers"),
        Message("user", "And now?"),
    ),
    make(3, Message("user", "Which?"), Message("assistant", None, (SEARCH, SEARCH)), Message("tool", "1"), tools=TOOLS[::-1]),
]  # fmt: skip


@pytest.fixture(params=TEMPLATES)
def checkpoint(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with one of Qwen3's templates."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = importlib.resources.files("trl").joinpath("chat_templates", request.param)
    tokenizer.chat_template = template.read_text("utf-8")
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(folder: Path, tokenizer: PreTrainedTokenizerBase, scorer: Scorer) -> PolicyTrainer:
    rows, left_out = prompt_rows(tokenizer, INSTANCES, 100_000)
    assert (len(rows), left_out) == (len(INSTANCES), 0)
    method = get_method("grpo")
    trainer = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tokenizer,
        args=trainer_arguments(CONFIG, method, folder / "out", 1),
        train_dataset=rows,
        method=method,
        scorer=scorer,
        instances=INSTANCES,
        log=RunLog(folder),
    )
    trainer.model.train()
    return trainer


def rollout_prompts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompt's ids that a policy is trained on, without their padding."""
    trainer = trainer_of(folder, tokenizer, Scorer(get_method("grpo"), CONFIG, None))
    batch = trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset for _ in range(2)])
    pairs = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs][::2]


def evaluated_prompts(folder: Path) -> list[list[int]]:
    """The ids that evaluation hands to its decoder."""
    generator = LocalGenerator(folder, threads=1)
    seen: list[list[int]] = []

    def complete(rows: list[Any], *_: Any) -> Iterator[int]:
        seen.extend(row.ids for row in rows)
        yield len(rows)

    generator.decoder.complete = complete  # type: ignore[method-assign]
    generator.answer([Question.of(instance) for instance in INSTANCES], Sampling(max_tokens=1))
    return seen


def tools_in(prompt: str) -> list[Any]:
    """What a model finds between the tags that Qwen3's templates put around the tools, taken as JSON lines."""
    _, opening, rest = prompt.partition("<tools>\n")
    inner, closing, _ = rest.partition("\n</tools>")
    assert opening
    assert closing
    return [json.loads(line) for line in inner.split("\n")]


def test_fine_tuning_rollouts_and_evaluation_see_the_same_prompt_with_every_tool_whole(checkpoint: Path) -> None:
    """verl#6854: the template strips earlier thoughts."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    demonstrations = Demonstrations(tokenizer, INSTANCES, 100_000)
    tuned = [row["input_ids"][: row["labels"].count(IGNORED)] for row in demonstrations.rows]
    assert tuned == rollout_prompts(checkpoint, tokenizer) == evaluated_prompts(checkpoint)
    for ids, instance in zip(tuned, INSTANCES, strict=True):
        text = tokenizer.decode(ids)
        assert tools_in(text) == [tool.to_json() for tool in instance.tools]
        assert text.endswith("<|im_start|>assistant\n")
        for message in instance.prompt:
            assert (message.content or "") in text
        assert "An earlier thought" not in text


@pytest.mark.parametrize("special", [False, True])
def test_rewards_see_the_tags(checkpoint: Path, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids in, text with tags out, whether the tags are special tokens or not, in training and in evaluation."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
        tokenizer.save_pretrained(checkpoint)
    thinking = "enable_thinking" in tokenizer.chat_template
    texts = [render_target(instance.target, instance.rationale if thinking else None) for instance in INSTANCES]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(tokenizer.convert_tokens_to_ids(tag) in ids[1] for tag in TAGS[0 if thinking else 2 :])
    completions = [[*row, tokenizer.eos_token_id] for row in ids]
    seen: list[str] = []

    class Watched(Scorer):
        def score(self, instances: Any, texts: Any, lengths: Any) -> Any:
            seen.extend(texts)
            self.scores = super().score(instances, texts, lengths)
            return self.scores

    scorer = Watched(get_method("grpo"), CONFIG, None)
    trainer = trainer_of(checkpoint, tokenizer, scorer)
    twice = [row for row in completions for _ in range(2)]
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *_: (twice, None))
    trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset for _ in range(2)])
    assert seen[::2] == texts
    assert scorer.scores.format == [1.0] * 8
    assert scorer.scores.correct[::2] == [3.0 if instance.target.tool_calls else 0.0 for instance in INSTANCES]
    generator = LocalGenerator(checkpoint, threads=1)
    assert [generator._text(row) for row in completions] == texts


def test_the_target_follows_the_prompt_as_the_template_would_have_it(checkpoint: Path) -> None:
    """Prompt and target tokenised apart give the ids of the whole conversation tokenised at once (verl#6854)."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    thinking = "enable_thinking" in tokenizer.chat_template
    rows = Demonstrations(tokenizer, INSTANCES, 100_000, rationales=thinking).rows
    for row, instance in zip(rows, INSTANCES, strict=True):
        last = {**instance.target.to_json(), **({"reasoning_content": instance.rationale} if thinking else {})}
        whole = tokenizer.apply_chat_template(
            [*(message.to_json() for message in instance.prompt), last],
            tools=[tool.to_json() for tool in instance.tools],
            tokenize=False,
        )
        assert tokenizer.decode(row["input_ids"]) + "\n" == whole
        at_once = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        assert torch.equal(at_once[:-1], torch.tensor(row["input_ids"]))


def test_a_tokenizer_that_begins_every_text_adds_nothing_to_a_rendered_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """The template writes all that a prompt holds; a second beginning, in training alone, would set the two apart."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[start])
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a")["input_ids"][0] == start[1] != tokenizer("a", add_special_tokens=False)["input_ids"][0]
    assert rollout_prompts(folder, tokenizer) == evaluated_prompts(folder)
