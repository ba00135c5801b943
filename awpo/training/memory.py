"""Memory of policy training on a GPU, by part and by moment, as arithmetic on shapes. All sizes are bytes.

What a training keeps all the time is 16 bytes per parameter (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1), of
which ZeRO and FSDP give each process a part. What a pass adds was derived from the layers of transformers' Qwen3 and
Llama as Korthikanti et al. 2022 (arXiv 2205.05198) did for GPT, tensor by tensor: a test counts what autograd really
saves.

Passes run in one of three ways. `float32`; `autocast`: float32 weights, of which bfloat16 copies are made (one process,
and DDP); `bfloat16`: bfloat16 weights beside float32 masters (DeepSpeed and FSDP2, as accelerate sets them up).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from awpo.config_training import PolicySettings, TrainingConfig
from awpo.errors import UserError
from awpo.launch import LaunchSettings
from awpo.training.model_shapes import ModelShape

Passes = Literal["float32", "autocast", "bfloat16"]
Kind = Literal["whole", "zero2", "zero3", "fsdp2"]

GIB = 2**30
# Assumptions of ours, for there is no formula: what a process takes before it holds any tensor (CUDA's context, NCCL's
# buffers, workspaces of cuBLAS), what vLLM takes beside weights and cache, and what of it stays when it sleeps.
OVERHEAD = 2 * GIB
VLLM_OVERHEAD = 3 * GIB
VLLM_ASLEEP = 1 * GIB
# Defaults of DeepSpeed 0.19.8, in elements: a bucket of gradients, weights gathered at once, those gathered ahead, what
# the optimiser steps on at once.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
PREFETCH = 50_000_000
SUB_GROUP = 1_000_000_000
# Tiles of TRL 1.16's fused head, which never holds all logits: tokens, entries of the vocabulary.
TILE = (4096, 32768)


@dataclass(frozen=True)
class Sharding:
    """Who holds what: `whole` in every process, or in parts, ZeRO's or FSDP's, of `processes` on all machines."""

    kind: Kind
    processes: int
    offload_optimiser: bool = False
    offload_weights: bool = False


def sharding_of(launch: LaunchSettings) -> Sharding:
    """What a launch's config of accelerate says. Raises UserError where it is of a kind that no formula is for."""
    config, processes = launch.accelerate_config(), launch.total
    kind = str(config.get("distributed_type", "NO"))
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return Sharding("whole", processes)
    if kind == "DEEPSPEED":
        deepspeed = config.get("deepspeed_config") or {}
        stage = deepspeed.get("zero_stage")
        offload = {name: deepspeed.get(f"offload_{name}_device", "none") != "none" for name in ("optimizer", "param")}
        if stage in (2, 3):
            return Sharding("zero2" if stage == 2 else "zero3", processes, offload["optimizer"], offload["param"])
    if kind == "FSDP":
        fsdp = config.get("fsdp_config") or {}
        if int(fsdp.get("fsdp_version", 1)) == 2 and fsdp.get("fsdp_reshard_after_forward", True):
            offload_all = bool(fsdp.get("fsdp_offload_params", False))
            return Sharding("fsdp2", processes, offload_all, offload_all)
    raise UserError(
        f"accelerate = {launch.accelerate!r} shares the model in a way that the plan has no formula for; it knows DDP, "
        "DeepSpeed's ZeRO-2 and ZeRO-3, and FSDP2 that reshards after the forward pass"
    )


def passes_of(config: TrainingConfig, sharding: Sharding) -> Passes:
    """How passes run on a GPU that has bfloat16."""
    if config.precision == "float32":
        return "float32"
    return "autocast" if sharding.kind == "whole" else "bfloat16"


def saved_by_layer(shape: ModelShape, passes: Passes, rows: int, length: int, rank: int = 0) -> int:
    """Bytes that autograd keeps of one layer for `rows` rows of `length` tokens, padded, by PyTorch's fused attention.

    Per token, with hidden width h, queries q, keys k, intermediate I, bytes e of what matrices multiply:

    - two norms: input and normalised, 4 h each (normalised in 2 h where the weights are bfloat16; with adapters only
      the input, as the norm's weight is not trained), and a float32 each
    - inputs of the matrices: one of h e for q, k, v and one for gate, up; under autocast a copy for each of the five
    - norms of heads, where there are any: queries and keys in float32, 4 (q + k), normalised, e (q + k), and a float32
      each head
    - attention: queries, output, and keys and values repeated for every head, 4 q e; its log-sum 4 bytes a head
    - SwiGLU: gate, its activation, up, their product, 4 I e
    - the mask that attention reads, e for each pair of tokens

    `rank` is that of adapters on all matrices; their frozen matrices need no inputs, but A does, and B (r e each).
    """
    h, q, k, wide = shape.hidden, shape.queries, shape.keys, shape.intermediate
    e = 4 if passes == "float32" else 2
    normed = (q + k) if shape.head_norms else 0
    scalars = 4 * (2 + shape.heads + (shape.heads + shape.kv_heads if shape.head_norms else 0))
    if rank:
        norms, inputs, heads = 8 * h, 5 * h * e + q * e + 7 * rank * e, 4 * normed
    else:
        norms = 16 * h if passes != "bfloat16" else 12 * h
        inputs = (5 if passes == "autocast" else 2) * h * e
        heads = (4 + e) * normed
    token = norms + inputs + heads + 4 * q * e + 4 * wide * e + scalars
    return rows * length * (token + length * e)


def saved_by_checkpoint(shape: ModelShape, passes: Passes, rows: int, length: int) -> int:
    """Bytes kept of one layer with gradient checkpointing: its input alone, in the type of the residual stream."""
    return rows * length * shape.hidden * (2 if passes == "bfloat16" else 4)


def head_in_backward(shape: ModelShape, passes: Passes, tokens: int, trained: bool) -> int:
    """Bytes around TRL's fused head while it goes backwards over `tokens` completion tokens.

    Its input and the last norm's, the gradients of input and weight in float32 (and in the weight's type), one tile of
    logits. `trained` says whether the head is, which adapters leave as it is.
    """
    h = shape.hidden
    residual = 2 if passes == "bfloat16" else 4
    e = 4 if passes == "float32" else 2
    copy = 2 if passes == "bfloat16" else 0
    tile = min(tokens, TILE[0]) * min(shape.vocabulary, TILE[1]) * e
    weight = shape.head_parameters * (4 + copy) if trained else 0
    return tokens * h * (residual + 4 + copy) + weight + tile


@dataclass(frozen=True)
class Parts:
    """Bytes of one GPU at one moment."""

    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    reference: int = 0
    gathered: int = 0
    buckets: int = 0
    activations: int = 0
    vocabulary: int = 0
    rollouts: int = 0
    overhead: int = OVERHEAD

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the three moments of a training, and of all processes' host memory."""

    rollout: Parts
    update: Parts
    step: Parts
    host: int

    @property
    def moments(self) -> dict[str, Parts]:
        return {"rollout": self.rollout, "update": self.update, "optimiser step": self.step}

    @property
    def peak(self) -> int:
        return max(parts.total for parts in self.moments.values())


@dataclass(frozen=True)
class States:
    """What is kept of the parameters all the time: bytes of one GPU, and of the host memory of one process."""

    weights: int
    gradients: int
    optimiser: int
    reference: int
    buckets: int
    in_step: int
    host: int


def states_of(shape: ModelShape, config: PolicySettings, sharding: Sharding, passes: Passes, reference: bool) -> States:
    """Weights, gradients and AdamW's two moments.

    All weights trained: 16 bytes per parameter, 4 + 4 + 8 in float32 where a process has them whole and in FSDP2, 2 + 2
    and a float32 master with the moments (12) by DeepSpeed. Adapters: 16 for theirs, 2 for the model's below them.
    In the optimiser's step PyTorch's AdamW makes a temporary of 4, and DeepSpeed the gradient in float32 (ZeRO-3 by
    sub-group).
    `reference`: with a second model for the KL penalty.
    """
    kind, n = sharding.kind, sharding.processes
    total = shape.parameters
    lora = config.lora
    trained = shape.adapter_parameters(lora.rank) if lora else total
    frozen = 0 if not lora else total * (4 if passes == "float32" else 2)
    part = n if kind != "whole" else 1
    of_weights = n if kind in ("zero3", "fsdp2") else 1
    copy = 0 if not reference or lora else total * (4 if kind in ("whole", "fsdp2") else 2) // of_weights
    if kind in ("zero2", "zero3"):
        size = 4 if passes == "float32" else 2
        weights = (trained * size + frozen) // of_weights
        gradients, optimiser = trained * size // part, trained * 12 // part
        large = shape.head_parameters if not lora else 0  # a matrix that is larger than the bucket stands beside it
        bucket = size * (REDUCE_BUCKET + (large if large > REDUCE_BUCKET else 0))
        in_step = 2 * 4 * min(trained // part, SUB_GROUP) if kind == "zero3" else 2 * 4 * trained // part
    else:
        weights = (trained * 4 + frozen) // of_weights
        gradients, optimiser, in_step = (trained * size // part for size in (4, 8, 4))
        # DDP keeps its buckets as a copy of all gradients.
        bucket = 4 * trained if kind == "whole" and n > 1 else 0
    host = 0
    if sharding.offload_optimiser:
        host += optimiser + gradients + 4 * trained // part  # gradients as they come, and in float32 for the step
        optimiser = gradients = in_step = 0
    if sharding.offload_weights:
        host += weights
        weights = 0
    return States(weights, gradients, optimiser, copy, bucket, in_step, host)


def gathered_for_passes(shape: ModelShape, sharding: Sharding, passes: Passes) -> int:
    """Bytes of weights that are gathered from their shards while passes run.

    ZeRO-3 keeps up to `LIVE_PARAMETERS` and gathers ahead; FSDP2 keeps embeddings and head for the whole pass, and
    holds two layers and the gradients of one, and of embeddings and head, before they are shared out.
    """
    size = 4 if passes == "float32" else 2
    if sharding.kind == "zero3":
        return size * (min(shape.parameters, LIVE_PARAMETERS) + min(shape.parameters, PREFETCH))
    if sharding.kind == "fsdp2":
        ends = shape.parameters - shape.layers * shape.layer_parameters
        return size * (2 * ends + 3 * shape.layer_parameters)
    return 0


def activations_of_update(
    shape: ModelShape, config: PolicySettings, passes: Passes, recompute: bool
) -> tuple[int, int]:
    """Bytes of (layers, head) of a micro-batch at the worst moment of its backward pass.

    The head goes first, while all layers are kept; a layer's own turn comes when the head is done. What a layer's
    backward pass makes on the way is taken as its SwiGLU's three gradients and two of the hidden states.
    """
    rows, length = config.micro_batch_size, config.max_prompt_length + config.max_completion_length
    rank = config.lora.rank if config.lora else 0
    layer = saved_by_layer(shape, passes, rows, length, rank)
    e = 4 if passes == "float32" else 2
    work = rows * length * (3 * shape.intermediate * e + 2 * shape.hidden * 4)
    last_norm = rows * length * shape.hidden * 8
    head = head_in_backward(shape, passes, rows * config.max_completion_length, trained=not rank)
    if not recompute:
        kept = shape.layers * layer + last_norm
        return (kept, head) if head >= work else (kept + work, 0)
    kept = shape.layers * saved_by_checkpoint(shape, passes, rows, length)
    return (kept + last_norm, head) if last_norm + head >= layer + work else (kept + layer + work, 0)


def rollouts_of_trainer(
    shape: ModelShape, config: PolicySettings, sharding: Sharding, passes: Passes
) -> tuple[int, int, int]:
    """Bytes of (cache of keys and values, passes, gathered weights) where the trainer generates on a GPU.

    TRL hands all rollouts of a process to transformers at once, each as long as the longest may be; under autocast
    keys are float32, as the norm of heads makes them. Prefill holds a layer's SwiGLU, the last tokens' logits three
    times in float32 for sampling. ZeRO-3 gathers the whole model.
    """
    rows = -(-config.prompts_per_rollout * config.group_size // sharding.processes)
    e = 4 if passes == "float32" else 2
    sizes = {"float32": (4, 4), "autocast": (4, 2), "bfloat16": (2, 2)}[passes]
    cache = rows * (config.max_prompt_length + config.max_completion_length) * shape.cache_bytes(*sizes)
    token = 3 * shape.intermediate * e + 2 * (shape.queries + 2 * shape.keys) * e + 2 * shape.hidden * 4
    work = rows * config.max_prompt_length * token + 3 * 4 * rows * shape.vocabulary
    gathered = gathered_for_passes(shape, sharding, passes)
    if sharding.kind == "zero3":
        gathered = e * shape.parameters
    if passes == "autocast":
        gathered += 2 * shape.parameters
    return cache, work, gathered


def vllm_requests(shape: ModelShape, config: PolicySettings, gpu_bytes: int) -> float:
    """Whole rollouts, each as long as it may be, whose cache a colocated vLLM has room for at once on its GPUs.

    Below 1 vLLM refuses to start. Negative where not even its weights have room.
    """
    settings = config.rollouts
    free = settings.gpu_memory_utilization * gpu_bytes - 2 * shape.parameters / settings.tensor_parallel - VLLM_OVERHEAD
    length = config.max_prompt_length + config.max_completion_length
    on_each = shape.cache_bytes() * max(1 / settings.tensor_parallel, 1 / shape.kv_heads)
    return free / (length * on_each)


def memory_of(
    shape: ModelShape, config: PolicySettings, sharding: Sharding, gpu_bytes: int, reference: bool = False
) -> Memory:
    """Bytes of one GPU of `gpu_bytes`, by part, while rollouts are drawn, in an update's backward pass, in the step.

    `reference` says whether the method has a KL penalty. Gradient checkpointing is on unless it is set off: `auto`
    means that on a GPU. PyTorch's allocator is taken to give back what is free before vLLM wakes.
    """
    passes = passes_of(config, sharding)
    states = states_of(shape, config, sharding, passes, reference)
    recompute = config.gradient_checkpointing != "off"
    layers, head = activations_of_update(shape, config, passes, recompute)
    gathered = gathered_for_passes(shape, sharding, passes)
    # Under autocast every weight's bfloat16 copy lives through the forward pass; counted in the backward pass, too, which
    # it overlaps where nothing is recomputed.
    copies = 2 * shape.parameters if passes == "autocast" and not config.lora else 0
    kept: dict[str, Any] = {
        "weights": states.weights,
        "optimiser": states.optimiser,
        "reference": states.reference,
        "buckets": states.buckets,
    }
    engine = config.rollouts.engine
    share = round(config.rollouts.gpu_memory_utilization * gpu_bytes) if engine == "vllm_colocate" else 0
    asleep = min(VLLM_ASLEEP, share) if config.rollouts.sleep else share
    while_rolling: dict[str, int] = {"rollouts": share}
    if engine == "trainer":
        cache, work, whole = rollouts_of_trainer(shape, config, sharding, passes)
        while_rolling = {"rollouts": cache, "activations": work, "gathered": whole}
    # ZeRO-3 keeps its buffer of gradients; the others have none between a step and the next backward pass.
    idle = states.gradients if sharding.kind == "zero3" else 0
    return Memory(
        rollout=Parts(**kept, gradients=idle, **while_rolling),
        update=Parts(
            **kept,
            gradients=states.gradients,
            gathered=gathered + copies,
            activations=layers,
            vocabulary=head,
            rollouts=asleep,
        ),
        step=Parts(
            **{**kept, "optimiser": states.optimiser + states.in_step}, gradients=states.gradients, rollouts=asleep
        ),
        host=states.host * sharding.processes,
    )
