"""The plan's formulas against what torch really keeps, and against published figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from awpo.artifacts import open_stage
from awpo.config import CorpusConfig
from awpo.config_rollouts import RolloutSettings
from awpo.config_training import AdapterConfig, PolicyConfig
from awpo.data.decompose import decompose
from awpo.data.store import write_instances
from awpo.embedded.corpus import dialogues
from awpo.embedded.model import SIZES, build_model
from awpo.errors import UserError
from awpo.launch import LaunchSettings, launch_presets, read_launch
from awpo.methods import get_method
from awpo.models import ModelChoice, preset_names, resolve_model
from awpo.training import memory
from awpo.training.lora import peft_config
from awpo.training.memory import (
    GIB,
    Sharding,
    head_in_backward,
    memory_of,
    saved_by_checkpoint,
    saved_by_layer,
    sharding_of,
    states_of,
)
from awpo.training.model_shapes import FIELDS, SHAPES, ModelShape, shape_of
from awpo.training.plan import GPUS, Gpus, Plan, spread
from awpo.training.plan_search import proposals

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "embedded-1m": 984_448,
    "embedded-3m": 2_878_272,
    "smollm2-135m": 134_515_008 + 6 * 576,  # and six tags
}
GROUPED = ModelShape(2, 80, 6, 2, 32, 112, 512, tied=True)
EVERY_HEAD = ModelShape(2, 64, 3, 3, 16, 200, 320, tied=False)
LLAMA = ModelShape(2, 96, 6, 2, 16, 112, 512, tied=True, head_norms=False)
ROWS, PROMPT, COMPLETION = 3, 20, 12
LENGTH = PROMPT + COMPLETION


def config_of(shape: ModelShape, **changes):
    values = {key: getattr(shape, name) for name, key in FIELDS.items()}
    kind = Qwen3Config if shape.head_norms else LlamaConfig
    return kind(**values, **{"use_cache": False, "attn_implementation": "sdpa", **changes})


def model_of(shape: ModelShape, **changes):
    return (Qwen3ForCausalLM if shape.head_norms else LlamaForCausalLM)(config_of(shape, **changes))


def policy(**changes) -> PolicyConfig:
    values = {
        "steps": 468,
        "prompts_per_rollout": 512,
        "group_size": 4,
        "steps_per_rollout": 4,
        "micro_batch_size": 8,
        "max_prompt_length": 2048,
        "max_completion_length": 1024,
        "rollouts": RolloutSettings(engine="vllm_colocate", gpu_memory_utilization=0.4, tensor_parallel=2),
    }
    return PolicyConfig(**{**values, **changes})


def plan(name="Qwen/Qwen3-8B", launch="zero3-8", gpus="8x80", method="awpo", **changes) -> Plan:
    config = policy(method=method, **changes)
    started = read_launch(launch)
    return Plan(SHAPES[name], config, get_method(method), started, sharding_of(started), Gpus.read(gpus), GPUS["h100"])


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_have_the_parameters_of_the_models(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = model_of(shape)
    assert shape.parameters == model.num_parameters() == PUBLISHED[name]


def test_adapters_have_the_parameters_that_peft_gives_them():
    from peft import get_peft_model

    with torch.device("meta"):
        model = get_peft_model(Qwen3ForCausalLM(config_of(GROUPED)), peft_config(AdapterConfig(rank=5)))
    assert GROUPED.adapter_parameters(5) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def saved(shape: ModelShape, layers: int, passes: str, *, recompute=False, rank=0) -> int:
    """Bytes that autograd keeps of a forward pass through TRL's fused head, weights left out."""
    model = model_of(replace(shape, layers=layers))
    if passes == "bfloat16" or rank:
        model = model.to(torch.bfloat16)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if rank:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config(AdapterConfig(rank=rank)))
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, shape.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            found[place] = tensor  # kept, so that no other tensor comes to the same place
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if passes == "autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("shape", [GROUPED, EVERY_HEAD, LLAMA], ids=["grouped", "every head", "llama"])
@pytest.mark.parametrize("passes", ["float32", "autocast", "bfloat16"])
def test_a_layer_keeps_what_the_formula_says_to_the_byte(shape, passes):
    counted = saved(shape, 2, passes) - saved(shape, 1, passes)
    if passes == "autocast":  # bfloat16 copies of the weights are kept beside the activations
        counted -= 2 * sum(inputs * outputs for inputs, outputs in shape.linears)
    assert counted == saved_by_layer(shape, passes, ROWS, LENGTH)


@pytest.mark.parametrize("passes", ["float32", "autocast", "bfloat16"])
def test_a_recomputed_layer_keeps_its_input(passes):
    counted = saved(GROUPED, 2, passes, recompute=True) - saved(GROUPED, 1, passes, recompute=True)
    assert counted == saved_by_checkpoint(GROUPED, passes, ROWS, LENGTH)


@pytest.mark.parametrize("shape", [GROUPED, LLAMA], ids=["grouped", "llama"])
def test_a_layer_with_adapters_keeps_what_the_formula_says(shape):
    rank = 5
    counted = saved(shape, 2, "autocast", rank=rank) - saved(shape, 1, "autocast", rank=rank)
    copies = 2 * shape.adapter_parameters(rank) // shape.layers
    assert counted - copies == saved_by_layer(shape, "autocast", ROWS, LENGTH, rank)


@pytest.mark.parametrize("shape", [GROUPED, LLAMA], ids=["grouped", "llama"])
@pytest.mark.parametrize(
    ("cast", "dtype", "passes"),
    [(False, "float32", "float32"), (True, "float32", "autocast"), (False, "bfloat16", "bfloat16")],
)
def test_the_cache_of_a_rollout_is_as_large_as_transformers_makes_it(cast, dtype, passes, shape):
    model = model_of(shape).to(getattr(torch, dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        cache = model.model(input_ids=torch.zeros((2, 9), dtype=torch.long), use_cache=True).cache
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    config = policy(
        prompts_per_rollout=1, group_size=2, steps_per_rollout=1, steps=1, micro_batch_size=1,
        max_prompt_length=16, max_completion_length=8, rollouts=RolloutSettings(),
    )  # fmt: skip
    planned, _, _ = memory.rollouts_of_trainer(shape, config, Sharding("whole", 1), passes)
    assert planned == held / 9 * 24


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = Qwen3ForCausalLM(config_of(EVERY_HEAD, attn_implementation="eager"))  # a fused kernel is not counted
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros((ROWS, LENGTH), dtype=torch.long))
    assert counter.get_total_flops() == ROWS * LENGTH * EVERY_HEAD.forward_operations(LENGTH)


SHAPES_ON_CPU = {name: SHAPES[name] for name in SIZES} | {"30m": ModelShape(8, 512, 8, 4, 64, 1536, 4096, tied=True)}

# Forward, backward and AdamW of each model in a process of its own, forked when all is imported; prints bytes that are
# counted, and the growth of the peak RSS.
STEP = """
import json, os, sys
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head
configs, rows, prompt, completion = json.loads(sys.argv[1])
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
def step(model, optimiser, ids, prompt):
    labels = ids.clone()
    labels[:, :prompt] = -100
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    (-out.log_probs.sum()).backward()
    optimiser.step()
def prepared(values):
    model = Qwen3ForCausalLM(Qwen3Config(**values, use_cache=False))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.train()
def size(tensors):
    return sum(tensor.nbytes for tensor in tensors)
def measure(config):
    tiny = prepared({**config, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64})
    step(tiny, torch.optim.AdamW(tiny.parameters(), foreach=True), torch.zeros((1, 8), dtype=torch.long), 4)
    before = status("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    model = prepared(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ids = torch.randint(0, config["vocab_size"], (rows, prompt + completion))
    for _ in range(2):
        step(model, optimiser, ids, prompt)
    states = [value for state in optimiser.state.values() for name, value in state.items() if name != "step"]
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "weights": size(model.parameters()),
        "gradients": size(gradients),
        "optimiser": size(states),
        "grown": status("VmHWM:") - before,
    }
for name, config in configs.items():
    if not os.fork():
        print(json.dumps([name, measure(config)]), flush=True)
        os._exit(0)
    os.wait()
"""
ROWS_ON_CPU, PROMPT_ON_CPU, COMPLETION_ON_CPU = 4, 128, 64


@pytest.fixture(scope="module")
def measured():
    """What a step of each model took, by name."""
    configs = {
        name: {key: getattr(shape, field) for field, key in FIELDS.items()} for name, shape in SHAPES_ON_CPU.items()
    }
    result = subprocess.run(
        [sys.executable, "-c", STEP, json.dumps([configs, ROWS_ON_CPU, PROMPT_ON_CPU, COMPLETION_ON_CPU])],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc that forgets a peak: not Linux")
@pytest.mark.parametrize("name", SHAPES_ON_CPU)
def test_a_real_step_on_a_cpu_takes_what_is_planned(name, measured):
    """Weights, gradients and AdamW's states to the byte; the growth of the process's memory within a half.

    The looser check: PyTorch computes the head's tiles by several temporaries on a CPU, and some of what is free stays
    with the allocator, which is much of the little that the smallest model takes. Activations are counted to the byte
    above.
    """
    shape, found = SHAPES_ON_CPU[name], measured[name]
    config = policy(
        precision="float32", gradient_checkpointing="off", micro_batch_size=ROWS_ON_CPU,
        max_prompt_length=PROMPT_ON_CPU, max_completion_length=COMPLETION_ON_CPU, rollouts=RolloutSettings(),
    )  # fmt: skip
    planned = memory_of(shape, config, Sharding("whole", 1), 80 * GIB)
    assert found["weights"] == planned.update.weights == 4 * shape.parameters
    assert found["gradients"] == planned.update.gradients
    assert found["optimiser"] == planned.update.optimiser
    peak = max(planned.update.total, planned.step.total) - memory.OVERHEAD
    print(f"{name}: measured {found['grown'] / 2**20:.1f} MiB, planned {peak / 2**20:.1f} MiB")
    assert peak / 1.5 < found["grown"] < peak * 1.5 + 32 * 2**20


def test_adamw_s_states_are_sixteen_bytes_a_parameter_and_zero_shares_them_as_published():
    """Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 GPUs, 120 GB, 16.6 GB and 1.9 GB of each."""
    shape = SHAPES["Qwen/Qwen3-8B"]

    def gigabytes(kind, processes):
        passes = "autocast" if kind == "whole" else "bfloat16"
        states = states_of(shape, policy(), Sharding(kind, processes), passes, reference=False)
        each = (states.weights + states.gradients + states.optimiser) / shape.parameters
        return 7.5 * each

    assert gigabytes("whole", 64) == pytest.approx(120)
    assert gigabytes("zero2", 64) == pytest.approx(16.6, abs=0.05)
    assert gigabytes("zero3", 64) == pytest.approx(1.9, abs=0.05)
    assert gigabytes("fsdp2", 64) == gigabytes("zero3", 64)


def test_zero_3_agrees_with_deepspeed_s_own_estimate():
    """DeepSpeed: 18 bytes a parameter on the GPUs, or in host memory with a buffer of up to a half; one layer whole."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make install-deepspeed")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    shape = SHAPES["Qwen/Qwen3-32B"]
    layer = shape.head_parameters
    _, of_gpu, whole_layer = estimate_zero3_model_states_mem_needs(shape.parameters, layer, 8, 1, False, False)
    found = memory_of(shape, policy(), Sharding("zero3", 8), 80 * GIB).step
    own = found.weights + found.gradients + found.optimiser
    assert own == pytest.approx(of_gpu - whole_layer, rel=0.1)
    of_host, *_ = estimate_zero3_model_states_mem_needs(shape.parameters, layer, 8, 1, True, True, True, 1.0)
    offloaded = memory_of(shape, policy(), Sharding("zero3", 8, True, True), 80 * GIB)
    assert of_host <= offloaded.host <= 1.5 * of_host
    assert offloaded.step.weights == offloaded.step.optimiser == offloaded.step.gradients == 0


@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        ("ddp-8", "whole"),
        ("zero2-8", "zero2"),
        ("zero3-8", "zero3"),
        ("fsdp2-8", "fsdp2"),
        ("zero3-offload-8", "zero3"),
    ],
)
def test_a_launch_preset_says_who_holds_what(launch, kind):
    found = sharding_of(read_launch(launch))
    assert (found.kind, found.processes) == (kind, 8)
    assert (found.offload_optimiser, found.offload_weights) == ("offload" in launch,) * 2


def test_every_launch_preset_is_one_that_the_plan_knows():
    assert all(sharding_of(read_launch(name)).processes >= 1 for name in launch_presets())


def test_another_way_to_share_a_model_is_refused(tmp_path):
    config = tmp_path / "fsdp1.yaml"
    config.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n")
    with pytest.raises(UserError, match="no formula"):
        sharding_of(LaunchSettings(processes=8, accelerate=str(config)))


def test_memory_falls_with_shards_and_rises_with_the_micro_batch():
    peaks = [plan(launch=name).memory.update.total for name in ("ddp-8", "zero2-8", "zero3-8", "zero3-offload-8")]
    assert peaks == sorted(peaks, reverse=True)
    micro = [plan(micro_batch_size=size).memory.update.total for size in (1, 2, 4, 8, 16)]
    assert micro == sorted(micro)
    assert len(set(micro)) == 5
    kept, recomputed = (plan(gradient_checkpointing=value).memory.update.activations for value in ("off", "on"))
    assert kept > 10 * recomputed
    assert plan(gradient_checkpointing="auto").memory == plan(gradient_checkpointing="on").memory


def test_a_kl_penalty_needs_a_second_model_but_not_above_adapters():
    shape, shards = SHAPES["Qwen/Qwen3-8B"], Sharding("zero3", 8)
    without, with_kl = (memory_of(shape, policy(), shards, 80 * GIB, reference=value) for value in (False, True))
    assert with_kl.update.total - without.update.total == with_kl.update.reference == 2 * shape.parameters // 8
    lora = policy(lora=AdapterConfig(rank=32))
    assert memory_of(shape, lora, Sharding("whole", 8), 80 * GIB, reference=True).update.reference == 0
    adapters = memory_of(shape, lora, Sharding("whole", 8), 80 * GIB).update
    assert adapters.weights == 2 * shape.parameters + 4 * shape.adapter_parameters(32)
    assert adapters.optimiser == 8 * shape.adapter_parameters(32)


def test_the_head_holds_no_more_than_a_tile_of_logits():
    shape = SHAPES["Qwen/Qwen3-0.6B"]
    few, many = (head_in_backward(shape, "bfloat16", tokens, trained=True) for tokens in (8192, 16384))
    assert many - few == 8192 * shape.hidden * 8, "the logits themselves do not grow"


def test_a_plan_that_fits_has_no_obstacles_and_counts_the_work():
    found = plan()
    assert found.fits, found.obstacles
    assert found.rollouts == 117 * 2048
    assert found.most.generated == 117 * 2048 * 1024
    assert found.most.trained == 117 * 2048 * 3072
    assert found.expected.generated == 117 * 2048 * 400
    assert plan(method="dapo").most.generated == 4 * found.most.generated, "three further rounds at most"
    hours, longer = found.hours(found.expected), found.hours(found.most)
    assert all(0 < hours[part] < longer[part] for part in ("rollouts", "updates"))
    half = replace(found, throughput=replace(found.throughput, mfu=found.throughput.mfu / 2))
    assert half.hours(half.expected)["updates"] == pytest.approx(2 * hours["updates"])
    parts = found.to_json()["memory"]["moments"]["update"]
    assert parts.pop("total") == sum(parts.values()) == found.memory.update.total


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"launch": "ddp-8"}, "optimiser step: "),
        ({"micro_batch_size": 64}, "update: "),
        ({"launch": "cpu-2-zero3"}, "of CPUs (device: cpu) and uses no GPU"),
        ({"gpus": "4x80"}, "starts 8 processes, a GPU each, and there are 4"),
        ({"micro_batch_size": 48}, "can't be split into micro-batches of 48 on 8"),
        ({"rollouts": RolloutSettings()}, "rollout: "),
        ({"rollouts": RolloutSettings(engine="vllm_colocate", gpu_memory_utilization=0.1)}, "no room for the weights"),
        ({"rollouts": RolloutSettings(engine="vllm_colocate", tensor_parallel=3)}, "doesn't divide 8 processes"),
    ],
)
def test_what_can_t_be_is_refused_and_what_is_proposed_fits(changes, says):
    config = {key: value for key, value in changes.items() if key not in ("launch", "gpus")}
    if "micro_batch_size" in config and config["micro_batch_size"] == 48:
        config |= {"prompts_per_rollout": 720}  # 48 divides a step, but no process's part of it
    asked = plan(launch=changes.get("launch", "zero3-8"), gpus=changes.get("gpus", "8x80"), **config)
    assert not asked.fits
    assert any(says in obstacle for obstacle in asked.obstacles), asked.obstacles
    found = proposals(asked)
    assert found
    for other in found:
        assert other.fits
        assert other.changes(asked)
        assert other.config.micro_batch_size <= asked.config.micro_batch_size
        assert (other.config.prompts_per_rollout, other.method) == (asked.config.prompts_per_rollout, asked.method)


def test_the_smallest_change_is_proposed_first():
    assert proposals(plan(micro_batch_size=64))[0].changes(plan(micro_batch_size=64)) == ["policy.micro_batch_size: 16"]
    assert proposals(plan(launch="ddp-8"))[0].changes(plan(launch="ddp-8")) == ["launch: zero2-8"]
    shared = RolloutSettings(engine="vllm_colocate", gpu_memory_utilization=0.4, tensor_parallel=4)
    large = plan("Qwen/Qwen3-32B", micro_batch_size=1, rollouts=shared)
    assert proposals(large)[0].changes(large) == ["launch: zero3-offload-8"]


@pytest.mark.parametrize(("count", "machines"), [(1, 1), (8, 1), (12, 2), (16, 2), (24, 3), (11, 11)])
def test_many_gpus_are_those_of_several_machines(count, machines):
    launch = spread(read_launch("zero3-8"), count)
    assert (launch.total, launch.machines) == (count, machines)
    assert launch.processes <= 8
    assert sharding_of(launch).processes == count


@pytest.mark.parametrize(("gpus", "processes"), [("3x80", 2), ("12x80", 8), ("20x80", 16)])
def test_gpus_that_a_step_can_t_be_shared_out_among_stay_idle(gpus, processes):
    """512 rollouts can't be shared out among 3, 12 or 20."""
    asked = plan(gpus=gpus)
    asked = replace(asked, launch=spread(asked.launch, asked.gpus.count))
    found = proposals(replace(asked, sharding=sharding_of(asked.launch)))
    assert (found[0].processes, found[0].gpus) == (processes, asked.gpus)


def test_a_launch_of_cpus_is_answered_with_its_twin_of_gpus():
    asked = plan(launch="cpu-2-zero3")
    assert proposals(asked)[0].changes(asked) == ["launch: zero3-8"]


def test_nothing_is_proposed_where_nothing_fits():
    tiny = plan("Qwen/Qwen3-32B", gpus="8x1")
    assert proposals(tiny) == []


@pytest.mark.parametrize("text", ["80", "8x", "x80", "0x80", "8x0", "8*80", "eight x 80", ""])
def test_gpus_are_number_times_gib(text):
    with pytest.raises(UserError, match="8x80"):
        Gpus.read(text)


def test_gpus_are_read():
    assert Gpus.read("8x80") == Gpus(8, 80)
    assert str(Gpus.read(" 16 X 39.6 ")) == "16x39.6"


def folder(tmp_path, **changes):
    values = {key: getattr(GROUPED, name) for name, key in FIELDS.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **values, **changes}))
    return ModelChoice(name="mine", kind="folder", location=str(tmp_path))


@pytest.mark.parametrize("shape", [GROUPED, LLAMA], ids=["qwen3", "llama"])
def test_a_checkpoint_s_folder_tells_its_shape(tmp_path, shape):
    model_of(shape).save_pretrained(tmp_path)
    mine = ModelChoice(name="mine", kind="folder", location=str(tmp_path))
    assert shape_of(mine) == shape
    if not shape.head_norms:  # a config of earlier versions of transformers
        values = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "head_dim"}))
        assert shape_of(mine) == shape


def test_a_folder_of_another_architecture_is_refused(tmp_path):
    with pytest.raises(UserError, match="of type 'mamba'; the plan's formulas are those of qwen3 and llama"):
        shape_of(folder(tmp_path, model_type="mamba"))
    with pytest.raises(UserError, match="has attention_bias; the plan's formulas are those of layers without"):
        shape_of(folder(tmp_path, attention_bias=True))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="lacks 'num_hidden_layers'"):
        shape_of(ModelChoice(name="mine", kind="folder", location=str(tmp_path)))


def test_every_preset_s_model_has_a_shape():
    assert {choice.location for choice in map(resolve_model, preset_names())} == SHAPES.keys()
    with pytest.raises(UserError, match=r"'mine' is not known before .* one of qwen3-0.6b, .*embedded-1m"):
        shape_of(ModelChoice(name="mine", kind="hub", location="me/mine"))


@pytest.mark.parametrize("size", SIZES)
def test_embedded_models_are_built_in_the_shape_that_is_planned(size, tmp_path):
    asked = CorpusConfig(train_dialogues=300, validation_dialogues=1, test_dialogues=1)
    with open_stage(tmp_path / "instances", "decompose", {}, {}) as stage:
        write_instances(stage.folder, [item for dialogue in dialogues(asked) for item in decompose(dialogue)])
        stage.finish()
    manifest = build_model(size, tmp_path / "instances", tmp_path / "model")
    shape = shape_of(resolve_model(size))
    assert shape_of(resolve_model(str(tmp_path / "model"))) == shape
    assert manifest.counts["parameters"] == shape.parameters == PUBLISHED[size]
