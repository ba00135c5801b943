"""A training step of stock TRL against one of ours: same model, prompts, lengths, loss and optimiser, in one run.

Each side is a process of its own (`python -m awpo.training.step_benchmark SIDE SHAPE.json`), so that its memory is its
own; steps are taken in turn, one side after the other, so that what else the machine does hits both. Counted is
processor time, as wall time varies with the load. A step is a rollout of `prompts` x `group` answers, their loss and
gradient, and one optimiser step. Answers have a fixed length: no side may end one early. Stock TRL takes the fastest
of its own micro-batches, found first; ours one group, or half of one where a whole one needs more memory than stock TRL.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from awpo.errors import UserError

SIDES = ("stock", "ours")
# Qwen3 of random weights: hidden size, layers, heads of queries, of keys, head size, vocabulary.
SIZES = {"3m": (256, 4, 8, 4, 32, 1024), "30m": (512, 9, 8, 4, 64, 4096)}


@dataclass(frozen=True)
class Shape:
    """What a step computes: tokens of each prompt and answer, answers of a prompt, prompts; `model` is a key of `SIZES`
    or a checkpoint's folder."""

    prompt: int
    answer: int
    group: int
    prompts: int = 4
    model: str = "3m"

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    def micro_batches(self) -> list[int]:
        """The micro-batches that stock TRL is tried with: half a group, a group, all rows."""
        return sorted({size for size in (self.group // 2, self.group, self.rows) if self.rows % size == 0})


class Side:
    """One of the two in a process of its own. It ends with the `with` block."""

    def __init__(self, side: str, shape: Shape, micro_batch: int, folder: Path) -> None:
        job = folder / f"{side}-{micro_batch}.json"
        job.write_text(json.dumps({"shape": asdict(shape), "micro_batch": micro_batch, "out": str(folder)}), "utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = open(folder / f"{side}.log", "ab")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "awpo.training.step_benchmark", side, str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def ask(self, what: str) -> dict[str, Any]:
        """The answer to "step" or "compare". Raises RuntimeError, with the end of its log, where the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            text = Path(self._log.name).read_text("utf-8", "replace")
            raise RuntimeError(f"the benchmark's process ended: {text[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()


def measure(shape: Shape, repeats: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Both sides at one shape. Ratios are stock time over ours; times are seconds of processor time, memory bytes.

    Raises UserError where the shape can't be computed.
    """
    if min(shape.prompt, shape.answer, shape.prompts) < 1 or shape.group < 2:
        raise UserError(
            "a prompt and an answer have at least one token, a group at least two rows; give larger numbers"
        )
    with tempfile.TemporaryDirectory(prefix="awpo-bench-") as temporary:
        folder = Path(temporary)
        tried: dict[int, dict[str, Any]] = {}
        for size in shape.micro_batches():
            with Side("stock", shape, size, folder) as stock:
                tried[size] = stock.ask("step")
            say(f"stock TRL, micro-batch of {size}: {tried[size]['processor_seconds']:.2f} s")
        best = min(tried, key=lambda size: tried[size]["processor_seconds"])
        own = _own_micro_batch(shape, tried[best]["peak_memory"], folder)
        say(f"AWPO takes a micro-batch of {own}")
        steps: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        with Side("stock", shape, best, folder) as stock, Side("ours", shape, own, folder) as ours:
            for one in (stock, ours):  # the first step warms up
                one.ask("step")
            for number in range(repeats):
                for side, one in zip(SIDES, (stock, ours), strict=True):
                    steps[side].append(one.ask("step"))
                pair = [steps[side][-1]["processor_seconds"] for side in SIDES]
                say(f"{number + 1} of {repeats}: stock {pair[0]:.2f} s, ours {pair[1]:.2f} s, {pair[0] / pair[1]:.2f}")
        with Side("ours", shape, shape.group, folder) as ours:
            compared = ours.ask("compare")
    ratios = [a["processor_seconds"] / b["processor_seconds"] for a, b in zip(*steps.values(), strict=True)]
    tokens = shape.rows * (shape.prompt + shape.answer)
    return {
        **asdict(shape),
        "repeats": repeats,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        **compared,
        "micro_batches_tried": {str(size): round(step["processor_seconds"], 3) for size, step in tried.items()},
        "micro_batch_stock": best,
        "micro_batch_ours": own,
        **{side: _summary(steps[side], tokens) for side in SIDES},
    }


def _own_micro_batch(shape: Shape, most_memory: int, folder: Path) -> int:
    """A group, or half of one where a whole one needs more than `most_memory` bytes."""
    half = shape.group // 2
    if shape.rows % half:
        return shape.group
    with Side("ours", shape, shape.group, folder) as ours:
        return half if ours.ask("step")["peak_memory"] > most_memory else shape.group


def _summary(steps: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    names = ("processor_seconds", "wall_seconds", "rollout_seconds", "update_seconds")
    found = {name: round(statistics.median(step[name] for step in steps), 3) for name in names}
    peak = max(step["peak_memory"] for step in steps)
    return {**found, "tokens_per_second": round(tokens / found["processor_seconds"], 1), "peak_memory": peak}


def _model(shape: Shape) -> tuple[Any, Any]:
    """Model and tokenizer. The tokenizer's words are t0, t1, ..."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    if shape.model in SIZES:
        hidden, layers, heads, kv_heads, size, vocabulary = SIZES[shape.model]
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size,
            max_position_embeddings=max(4096, shape.prompt + shape.answer),
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(shape.model, dtype=torch.float32)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(model.config.vocab_size)}, unk_token="t2"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2")
    return model, tokenizer


def _share_of_even(text: str) -> float:
    """A reward that differs from answer to answer: the share of words with an even number."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


class _EvenScorer:
    """Scores as `awpo.training.scoring.Scorer` does, by `_share_of_even` and without a judge."""

    judge = None

    def begin(self, instances: Any, texts: list[str], lengths: Any) -> Any:
        from concurrent.futures import Future

        from awpo.training.scoring import Scores

        count = len(texts)
        zero, one, nothing = [0.0] * count, [1.0] * count, [float("nan")] * count
        begun: Future[Scores] = Future()
        begun.set_result(Scores([_share_of_even(text) for text in texts], zero, zero, nothing, zero, one))
        return begun

    def write_samples(self, *_: Any, **__: Any) -> None:
        """A benchmark keeps none."""


def _trainer(side: str, shape: Shape, micro_batch: int, out: Path) -> Any:
    import random

    from datasets import Dataset
    from trl import GRPOTrainer

    from awpo.config_training import PolicyConfig
    from awpo.events import RunLog
    from awpo.methods import get_method
    from awpo.training.policy import trainer_arguments
    from awpo.training.policy_trainer import PolicyTrainer
    from awpo.types import Instance, Message

    model, tokenizer = _model(shape)
    config = PolicyConfig(
        method="grpo",
        steps=1,
        prompts_per_rollout=shape.prompts,
        group_size=shape.group,
        steps_per_rollout=1,
        micro_batch_size=micro_batch,
        max_prompt_length=max(16, shape.prompt),
        max_completion_length=max(8, shape.answer),
    )
    method = get_method("grpo")
    arguments = trainer_arguments(config, method, out / side, 1)
    arguments.save_strategy, arguments.logging_strategy = "no", "no"
    rng = random.Random(0)
    prompts = {
        f"p{i}": [rng.randrange(3, model.config.vocab_size) for _ in range(shape.prompt)] for i in range(shape.prompts)
    }
    rows = Dataset.from_list([{"prompt": name, "index": 0} for name in prompts])
    common = {"model": model, "processing_class": tokenizer, "args": arguments, "train_dataset": rows}
    trainer: Any
    if side == "stock":
        arguments.scale_rewards = "group"
        arguments.generation_kwargs = {"min_new_tokens": shape.answer}

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [_share_of_even(tokenizer.decode(ids)) for ids in completion_ids]

        trainer = GRPOTrainer(reward_funcs=[reward], **common)
    else:
        scorer: Any = _EvenScorer()
        asked, answer = Message("user", "?"), Message("assistant", "!")
        instance = Instance("benchmark", "benchmark", 0, 1, "train", (), (asked,), answer, None)
        trainer = PolicyTrainer(method=method, scorer=scorer, instances=[instance], log=RunLog(out / side), **common)
        trainer.eos_token_ids = []
    trainer._tokenize_prompts = lambda texts: ([prompts[text] for text in texts], None, {})
    return trainer


class _Worker:
    def __init__(self, side: str, job: dict[str, Any]) -> None:
        from transformers import TrainerCallback

        self.shape = Shape(**job["shape"])
        self.trainer = _trainer(side, self.shape, job["micro_batch"], Path(job["out"]))
        self.rollout = 0.0
        generate = self.trainer._generate_single_turn

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return generate(*arguments, **named)
            finally:
                self.rollout += time.process_time() - start

        self.trainer._generate_single_turn = timed
        worker = self

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                worker.begun = time.process_time(), time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                worker.ended = time.process_time(), time.perf_counter()

        self.begun = self.ended = (0.0, 0.0)
        self.trainer.add_callback(Clock())

    def step(self) -> dict[str, Any]:
        self.rollout = 0.0
        self.trainer.train()
        processor, wall = (end - begin for begin, end in zip(self.begun, self.ended, strict=True))
        return {
            "processor_seconds": processor,
            "wall_seconds": wall,
            "rollout_seconds": self.rollout,
            "update_seconds": processor - self.rollout,
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def compare(self) -> dict[str, float]:
        """How far our log-probabilities and gradients are from those of TRL's padded pass, of one group of answers."""
        import torch

        trainer, found = self.trainer, []
        trainer.train()
        batch = trainer._buffered_inputs[0]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        kept = batch["completion_mask"].bool()
        for packs in (False, True):
            trainer._packs = packs
            trainer.model.zero_grad()
            values, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, kept.shape[1])
            (values * kept * batch["advantages"][:, None]).sum().backward()
            gradient = torch.cat([one.grad.flatten() for one in trainer.model.parameters() if one.grad is not None])
            found.append((values.detach()[kept], gradient))
        (plain, right), (packed, gradient) = found
        difference = float((gradient - right).norm())
        return {
            "max_logprob_difference": float((packed - plain).abs().max()),
            # No gradient at all where all answers of the group have one reward.
            "gradient_difference": difference and difference / float(right.norm()),
        }


def main() -> None:
    side, job = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = _Worker(side, json.loads(Path(job).read_text("utf-8")))
    for line in sys.stdin:
        print(json.dumps(getattr(worker, line.strip())()), file=answers, flush=True)


if __name__ == "__main__":
    main()
