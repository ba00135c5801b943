"""What infra/gpu_check.py tries: each part takes a scale and an empty folder, and returns its numbers or raises.

Models are drawn at random here, in the shape of Qwen3-0.6B. Memory is what PyTorch's allocator had at most, beside what
`awpo.training.memory` says, without what CUDA itself takes.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHAPE = "Qwen/Qwen3-0.6B"
DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean difference of log-probabilities between two ways to compute attention. On a CPU, with 28 layers of random weights:
4e-7 in float32, 0.005 in bfloat16, and 0.05 where scores are scaled by a fifth too much."""


@dataclass(frozen=True)
class Scale:
    """How large things are: those of a GPU, or the tiny ones of a CPU."""

    device: str
    rows: int
    prompt: int
    completion: int
    rollouts: int

    @property
    def bf16(self) -> bool:
        return self.device == "cuda"


GPU = Scale("cuda", rows=4, prompt=2048, completion=1024, rollouts=64)
CPU = Scale("cpu", rows=2, prompt=48, completion=16, rollouts=8)


class Skipped(Exception):
    """A part that can't be tried here, and why."""


def shape_of_check(scale: Scale) -> Any:
    from awpo.training.model_shapes import SHAPES

    if scale.device == "cuda":
        return SHAPES[SHAPE]
    return replace(
        SHAPES[SHAPE], layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocabulary=512
    )


def make_model(scale: Scale, attention: str, weights: str = "float32") -> Any:
    """A model of that shape with random weights, the same ones each time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from awpo.training.model_shapes import FIELDS

    shape = shape_of_check(scale)
    values = {key: getattr(shape, name) for name, key in FIELDS.items()}
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = Qwen3ForCausalLM(Qwen3Config(**values, attn_implementation=attention, eos_token_id=1, pad_token_id=0))
    return model.to(getattr(torch, weights))


def batch_of(scale: Scale) -> dict[str, Any]:
    """Rows of padded prompts and completions, as a policy's update has them."""
    import torch

    length = scale.prompt + scale.completion
    ids = torch.randint(
        2, shape_of_check(scale).vocabulary, (scale.rows, length), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(ids)
    mask[0, : scale.prompt // 4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : scale.prompt] = -100
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(scale.device) for name, tensor in named.items()}


def settings_of(scale: Scale) -> Any:
    from awpo.config_training import PolicyConfig

    return PolicyConfig(
        steps=1,
        prompts_per_rollout=scale.rows,
        group_size=2,
        steps_per_rollout=1,
        micro_batch_size=scale.rows,
        max_prompt_length=scale.prompt,
        max_completion_length=scale.completion,
        precision="auto" if scale.bf16 else "float32",
        gradient_checkpointing="on",
    )


def predicted(shape: Any, config: Any, kind: str = "whole") -> dict[str, int]:
    """Planned bytes at each moment, of tensors alone."""
    import torch

    from awpo.training.memory import OVERHEAD, Sharding, memory_of

    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 2**34
    moments = memory_of(shape, config, Sharding(kind, 1), total).moments  # type: ignore[arg-type]
    return {name: parts.total - OVERHEAD for name, parts in moments.items()}


def wait(scale: Scale) -> None:
    import torch

    if scale.device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(scale: Scale) -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if scale.device == "cuda" else None


def compared(measured: int | None, planned: int) -> dict[str, Any]:
    """Measured and planned bytes and their ratio; on a CPU nothing counts tensors."""
    return {"measured_bytes": measured, "planned_bytes": planned, "ratio": measured / planned if measured else None}


def check_step(scale: Scale, folder: Path) -> dict[str, Any]:
    """A training step as the trainer makes it: autocast, gradient checkpointing, TRL's fused head, AdamW."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    from awpo.training.plan import GPUS

    model = make_model(scale, "sdpa").train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch, losses, seconds = batch_of(scale), [], []
    for _ in range(4):
        wait(scale)
        start = time.perf_counter()
        with torch.autocast(scale.device, torch.bfloat16, enabled=scale.bf16):
            loss = model(**batch, fused_lm_head=True, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        wait(scale)
        seconds.append(time.perf_counter() - start)
    if not all(map(torch.isfinite, torch.tensor(losses))) or losses[-1] >= losses[0]:
        raise RuntimeError(f"the loss of the same batch does not fall: {losses}")
    shape, plan = shape_of_check(scale), predicted(shape_of_check(scale), settings_of(scale))
    tokens = scale.rows * (scale.prompt + scale.completion)
    each = min(seconds[1:])
    operations = 4 * tokens * shape.forward_operations((scale.prompt + scale.completion) / 2, head=False)
    operations += 4 * scale.rows * scale.completion * 2 * shape.head_parameters
    return {
        **compared(peak_bytes(scale), max(plan["update"], plan["optimiser step"])),
        "tokens_per_second": tokens / each,
        "mfu_of_h100": operations / each / (GPUS["h100"].tflops * 1e12),
        "losses": losses,
    }


def check_attention(scale: Scale, folder: Path) -> dict[str, Any]:
    """Log-probabilities by PyTorch's fused attention against the plain one, and flash attention where it is installed."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    kind = "bfloat16" if scale.bf16 else "float32"
    small = replace(scale, rows=1, prompt=min(scale.prompt, 512), completion=min(scale.completion, 128))
    batch = {name: tensor[:, small.prompt // 4 :] for name, tensor in batch_of(small).items()}  # no padding
    flash = importlib.util.find_spec("flash_attn") is not None and scale.device == "cuda"
    found: dict[str, Any] = {} if flash else {"flash_attention_2": "not tried: flash_attn is not installed, or no GPU"}
    values = {}
    for attention in ("eager", "sdpa", *(("flash_attention_2",) if flash else ())):
        model = make_model(small, attention, kind).eval()
        add_fused_lm_head(model)
        with torch.no_grad():
            for _ in range(2):  # the first pass compiles and allocates
                wait(scale)
                start = time.perf_counter()
                values[attention] = model(**batch, fused_lm_head=True, use_cache=False).log_probs
                wait(scale)
        found[f"{attention}_seconds"] = time.perf_counter() - start
        found[f"{attention}_difference"] = (values[attention] - values["eager"]).abs().mean().item()
        del model
    worst = max(value for name, value in found.items() if name.endswith("_difference"))
    if not worst <= DIFFERENCE[kind]:
        raise RuntimeError(
            f"log-probabilities differ by {worst:.3g} on average, more than {DIFFERENCE[kind]:g}: {found}"
        )
    return found


def check_rollout(scale: Scale, folder: Path) -> dict[str, Any]:
    """Tokens per second of the project's own sampling loop, in groups of eight that share a prompt."""
    from awpo.decoding import Decoder, Row, uniform_numbers

    model = make_model(scale, "sdpa", "bfloat16" if scale.bf16 else "float32").eval()
    limit, prompt = min(scale.completion, 256), min(scale.prompt, 512)
    vocabulary = shape_of_check(scale).vocabulary
    rows = [
        Row(index // 8, [2 + (index // 8 * 31 + place) % (vocabulary - 2) for place in range(prompt)], limit,
            uniform_numbers(f"rollout-{index}", limit))
        for index in range(scale.rollouts)
    ]  # fmt: skip
    wait(scale)
    start = time.perf_counter()
    for _ in Decoder(model, []).complete(rows, 1.0, scale.rollouts):
        pass
    wait(scale)
    seconds = time.perf_counter() - start
    tokens = sum(len(row.output) for row in rows)
    if tokens != limit * scale.rollouts:
        raise RuntimeError(f"{tokens} tokens were sampled, and {limit * scale.rollouts} asked for")
    return {
        "rollouts": scale.rollouts,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": peak_bytes(scale),
    }


def trained(scale: Scale, folder: Path, launch: Any, kind: str) -> dict[str, Any]:
    """Policy training of the embedded model by the project's worker, and its memory against the plan."""
    from awpo.config import CorpusConfig, RationaleConfig
    from awpo.config_training import PolicyConfig
    from awpo.data.decompose import decompose_source
    from awpo.data.rationales import write_rationales
    from awpo.embedded.corpus import write_corpus
    from awpo.embedded.model import build_model
    from awpo.processes import run_worker
    from awpo.training.model_shapes import read_shape

    corpus = CorpusConfig(train_dialogues=40, validation_dialogues=4, test_dialogues=4)
    write_corpus(folder / "corpus", corpus)
    decompose_source(folder / "corpus", folder / "instances")
    write_rationales(folder / "instances", folder / "rationales", RationaleConfig())
    build_model("embedded-1m", folder / "rationales", folder / "model")
    config = PolicyConfig(
        steps=4,
        prompts_per_rollout=8,
        group_size=4,
        steps_per_rollout=2,
        micro_batch_size=8,
        max_completion_length=48 if scale.device == "cuda" else 16,
        gradient_checkpointing="on",
    )
    out, peaks = folder / "policy", [0]
    job = {
        "model": str(folder / "model"),
        "instances": str(folder / "rationales"),
        "out": str(out),
        "launch": launch.effect(),
        "config": config.model_dump(mode="json"),
    }
    run_worker(
        "awpo.training.policy",
        job,
        out,
        on_event=lambda row: peaks.append(int(row.get("gpu_bytes") or 0)),
        launch=launch,
    )
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    plan = predicted(read_shape(folder / "model"), config, kind)
    seconds = {name: summary[name] for name in ("seconds", "reward/outcome", "response_length") if name in summary}
    return {**compared(max(peaks) or None, max(plan.values())), **seconds, "steps": summary["steps"]}


def check_policy(scale: Scale, folder: Path) -> dict[str, Any]:
    from awpo.launch import LaunchSettings

    return trained(scale, folder, LaunchSettings(), "whole")


def check_zero3(scale: Scale, folder: Path) -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        raise Skipped("DeepSpeed is not installed: make install-deepspeed")
    from awpo.launch import LaunchSettings

    device = {"device": "cpu"} if scale.device == "cpu" else {}
    return trained(
        scale, folder, LaunchSettings.read({"processes": 1, "accelerate": "zero3", **device}, "zero3"), "zero3"
    )


PARTS: dict[str, Callable[[Scale, Path], dict[str, Any]]] = {
    "step": check_step,
    "attention": check_attention,
    "rollout": check_rollout,
    "policy": check_policy,
    "zero3": check_zero3,
}
