"""The parts of infra/gpu_check.sh, which says what they are for. Each part is a process of its own and fails alone.

    python infra/gpu_check.py [--cpu] [--only PART] [--out gpu_check.json]

A part prints its numbers as one line of JSON. Models are drawn at random here, in the shape of Qwen3-0.6B; memory is
what PyTorch's allocator had at most, beside what `awpo.training.memory` says (without what CUDA itself takes).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where the project isn't installed
LIMIT_SECONDS = 900
SHAPE = "Qwen/Qwen3-0.6B"
DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a log-probability between two ways to compute attention; bfloat16 has 8 bits, 28 layers."""


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
    from awpo.config import PolicyConfig

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
        found[f"{attention}_difference"] = (values[attention] - values["eager"]).abs().max().item()
        del model
    worst = max(value for name, value in found.items() if name.endswith("_difference"))
    if not worst <= DIFFERENCE[kind]:
        raise RuntimeError(f"log-probabilities differ by up to {worst:.3g}, more than {DIFFERENCE[kind]:g}: {found}")
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
    from awpo.config import CorpusConfig, PolicyConfig, RationaleConfig
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


def run_part(name: str, on_cpu: bool) -> dict[str, Any]:
    """A part in a process of its own: its state (ok, skipped or failed), seconds, numbers or reason."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--part", name, *(["--cpu"] if on_cpu else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"state": "failed", "reason": f"no end after {LIMIT_SECONDS} s", "seconds": float(LIMIT_SECONDS)}
    seconds = round(time.monotonic() - start, 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"state"')]
    if lines:
        return {**json.loads(lines[-1]), "seconds": seconds}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"state": "failed", "reason": f"{ended}: {said[-1] if said else 'nothing was said'}", "seconds": seconds}


def part_main(name: str, scale: Scale) -> None:
    """One part in this process; whatever goes wrong becomes its reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = {"state": "ok", "numbers": PARTS[name](scale, Path(folder))}
        except Skipped as reason:
            found = {"state": "skipped", "reason": str(reason)}
        except Exception as error:  # noqa: BLE001 -- whatever it was is the part's reason
            found = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


def told(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if found["state"] != "ok":
        return f"{name:10} {found['state']:8} {found['seconds']:7.1f} s  {found['reason']}"
    shown = []
    for key, value in found["numbers"].items():
        if isinstance(value, list) or value is None:
            continue
        if key.endswith("_bytes"):
            shown.append(f"{key.removesuffix('_bytes')} {value / 2**30:.2f} GiB")
        else:
            shown.append(f"{key} {value:.4g}" if isinstance(value, int | float) else f"{key} {value}")
    return f"{name:10} {'ok':8} {found['seconds']:7.1f} s  {'; '.join(shown)}"


def machine(on_cpu: bool) -> dict[str, Any]:
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version(), "device": "a CPU, tiny shapes"}
    if not on_cpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Tries training on one GPU, part by part.")
    parser.add_argument("--cpu", action="store_true", help="the same code on a CPU, with tiny shapes")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; give it again for more")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="file of the numbers")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print("no GPU: PyTorch sees none here; --cpu tries the same code on a CPU with tiny shapes", file=sys.stderr)
        return 2
    if options.part:
        part_main(options.part, CPU if options.cpu else GPU)
        return 0
    about = machine(options.cpu)
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    parts = {}
    for name in options.only or PARTS:
        parts[name] = run_part(name, options.cpu)
        print(told(name, parts[name]), flush=True)
    options.out.write_text(json.dumps({"machine": about, "parts": parts}, indent=2) + "\n", "utf-8")
    return int(any(found["state"] == "failed" for found in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
