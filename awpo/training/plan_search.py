"""What would fit in place of a plan that doesn't: every candidate is judged as the plan was, so a proposal always fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from awpo.config_rollouts import RolloutSettings
from awpo.config_training import PolicySettings
from awpo.launch import LaunchSettings, launch_presets, read_launch
from awpo.training.memory import Sharding, sharding_of
from awpo.training.plan import Gpus, Plan, spread


def proposals(asked: Plan, most_gpus: int = 1024) -> list[Plan]:
    """Plans that fit: with the fewest changes on the GPUs that there are, and on the fewest more that need fewer.

    A change is another micro-batch, another launch, or others who sample rollouts. Where nothing fits on all GPUs that
    there are, as a step's rollouts can't be shared out among five, some of them stay idle. Empty where nothing fits on
    up to `most_gpus` GPUs.
    """
    found: list[Plan] = []
    rollouts = list(_rollouts(asked.config))
    for processes, count in _sizes(asked, most_gpus):
        if found and count == found[0].gpus.count:
            continue
        best = next((plan for plan in _candidates(asked, processes, count, rollouts) if plan.fits), None)
        if best and (not found or _axes(best, asked) < _axes(found[0], asked)):
            found.append(best)
            if len(found) == 2 or _axes(best, asked) <= 1:
                break
    return found


def _sizes(asked: Plan, most_gpus: int) -> Iterator[tuple[int, int]]:
    """Numbers of (processes, GPUs): all that there are, fewer and fewer of them, then ever more GPUs."""
    there = asked.gpus.count
    yield from ((processes, there) for processes in range(there, 0, -1))
    doubled = {2**power * base for base in (1, there) for power in range(most_gpus.bit_length())}
    yield from ((count, count) for count in sorted(doubled) if there < count <= most_gpus)


def _axes(plan: Plan, asked: Plan) -> int:
    """How many kinds of settings differ; the number of processes follows the GPUs and is none."""
    return (
        (plan.config.micro_batch_size != asked.config.micro_batch_size)
        + (plan.launch.accelerate != asked.launch.accelerate)
        + (plan.config.rollouts != asked.config.rollouts)
    )


def _candidates(asked: Plan, processes: int, count: int, rollouts: Sequence[RolloutSettings]) -> list[Plan]:
    """All that is tried by so many processes on `count` GPUs, with the fewest changes first."""
    gpus = Gpus(count, asked.gpus.gib)
    found = []
    for launch, sharding in _launches(asked, processes):
        for settings in rollouts:
            for micro_batch in _micro_batches(asked.config, processes):
                config = asked.config.model_copy(update={"micro_batch_size": micro_batch, "rollouts": settings})
                found.append(replace(asked, launch=launch, sharding=sharding, config=config, gpus=gpus))
    return sorted(found, key=lambda plan: _axes(plan, asked))


def _launches(asked: Plan, count: int) -> Iterator[tuple[LaunchSettings, Sharding]]:
    """The launch that was asked for on so many GPUs, then the presets' ways to share a model, by how much they save."""
    order = {"whole": 0, "zero2": 1, "fsdp2": 2, "zero3": 3}
    presets = [read_launch(name) for name in launch_presets()]
    known: dict[str | None, Sharding] = {
        each.accelerate: sharding_of(each) for each in presets if each.accelerate and each.device == "auto"
    }
    ladder = sorted(known, key=lambda name: (_offloads(known[name]), order[known[name].kind]))
    known[asked.launch.accelerate] = asked.sharding
    for name in dict.fromkeys((asked.launch.accelerate, *ladder)):
        launch = spread(asked.launch, count).model_copy(update={"accelerate": name, "device": "auto"})
        yield launch, replace(known[name], processes=count)


def _offloads(sharding: Sharding) -> int:
    return int(sharding.offload_optimiser) + int(sharding.offload_weights)


def _micro_batches(config: PolicySettings, processes: int) -> Iterator[int]:
    """The micro-batches that are no larger than the one asked for and divide a process's part of a step, largest first."""
    part, rest = divmod(config.prompts_per_rollout * config.group_size // config.steps_per_rollout, processes)
    if not rest:
        yield from (size for size in range(config.micro_batch_size, 0, -1) if part % size == 0)


def _rollouts(config: PolicySettings) -> Iterator[RolloutSettings]:
    """Who samples: as asked for, then a colocated vLLM on ever more GPUs together."""
    yield config.rollouts
    for tensor_parallel in (1, 2, 4, 8):
        for share in (0.3, 0.4, 0.5, 0.6):
            yield RolloutSettings(engine="vllm_colocate", gpu_memory_utilization=share, tensor_parallel=tensor_parallel)
