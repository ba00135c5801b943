"""Policy training by one of the methods of `awpo.methods`, on TRL's GRPOTrainer.

    python -m awpo.training.policy JOB.json     {"model", "instances", "out", "config": PolicyConfig, "launch": ...}

A rollout batch of `prompts_per_rollout` x `group_size` completions is sampled, scored, turned into advantages, and
used for `steps_per_rollout` optimiser steps. Writes into `out`: checkpoint/, metrics.jsonl, events.jsonl,
judge_samples.jsonl, summary.json, manifest.json, and adapter/ where adapters were trained. A run that was interrupted
resumes at its last whole checkpoint, at any optimiser step, and goes on with the rollouts that it had sampled: on a CPU
it ends bit for bit as it would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from trl import GRPOConfig

from awpo.chat import render_prompt
from awpo.config_training import PolicyConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import METRICS, RunLog, Tail
from awpo.files import write_atomically
from awpo.judge import judge_identity
from awpo.methods import Method, get_method
from awpo.processes import worker_main
from awpo.training.checkpoints import (
    MarkWholeCheckpoints,
    check_launch,
    check_positions,
    leave_processes,
    load_policy,
    open_training,
    step_of,
    train_from,
    where_to_resume,
)
from awpo.training.collapse_watch import CollapseWatch
from awpo.training.hardware import accumulation_steps, device_arguments, dtype_of_weights
from awpo.training.identity import GROWING, RESUME, policy_identity
from awpo.training.lora import check_layers, peft_config, save_trained, trained_model
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import SAMPLES, Scorer, drop_samples_from
from awpo.training.sharding import process_state, with_own_optimizer
from awpo.training.vllm_arguments import check_rollouts, vllm_arguments
from awpo.training.vllm_rollouts import open_rollouts, probe_prompts
from awpo.types import Instance

# TRL's names on the left, ours on the right; names that the trainer subclass reports pass as they are.
RENAMED = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "completions/mean_length": "response_length",
    "completions/clipped_ratio": "response_cut_share",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip/clipped_share",
    "kl": "kl",
    "num_tokens": "tokens/total",
    "sampling/sampling_logp_difference/mean": "sampling/difference_mean",
    "sampling/sampling_logp_difference/max": "sampling/difference_max",
    "sampling/importance_sampling_ratio/min": "sampling/weight_min",
    "sampling/importance_sampling_ratio/mean": "sampling/weight_mean",
    "sampling/importance_sampling_ratio/max": "sampling/weight_max",
    "step_time": "seconds/step",
}
OWN = (
    "reward/",
    "gate/",
    "judge/",
    "difficulty/",
    "clip/",
    "zero_variance_share",
    "saturated_share",
    "dynamic_sampling/",
    "rollout/",
    "seconds/",
    "tokens/",
)


class LogPolicyToFiles(TrainerCallback):
    """Relays the trainer's logs to the run folder under the project's names, and watches them for signs of collapse."""

    def __init__(self, log: RunLog, *, stop_on_collapse: bool = False) -> None:
        self.log, self._watch = log, CollapseWatch(log.warning, stop=stop_on_collapse)
        self._reward = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            for row in Tail(self.log.folder / METRICS):  # of the steps before an interruption
                self._watch.see(row["step"], row["metrics"], again=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        found = {RENAMED[key]: value for key, value in (logs or {}).items() if key in RENAMED}
        found |= {key: value for key, value in (logs or {}).items() if key.startswith(OWN)}
        if "seconds/step" in found:  # of which the rollout, where there was one, is a part
            before = sum(found.get(name, 0.0) for name in ("seconds/rollout", "seconds/judge"))
            found["seconds/update"] = found["seconds/step"] - before
        if "tokens/update" in found:
            found["tokens/step"] = found.get("tokens/rollout", 0.0) + found["tokens/update"]
        if "loss" in found:
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            found["samples/total"] = state.global_step * rows
            if "reward/outcome" in found:
                self._reward = f", reward {found['reward/outcome']:.2f}"
            # MLflow's pages offer the metric that came first: not the loss, which says little of a policy.
            self.log.metrics(
                state.global_step, dict(sorted(found.items(), key=lambda item: item[0] != "reward/outcome"))
            )
            self._watch.see(state.global_step, found)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.log.progress(state.global_step, state.max_steps, f"steps{self._reward}")


def prompt_rows(
    tokenizer: PreTrainedTokenizerBase, instances: list[Instance], max_prompt_length: int
) -> tuple[Dataset, int]:
    """Rows (`prompt`, `index`) for the instances whose prompt fits; also how many don't."""
    rows, too_long = [], 0
    for index, instance in enumerate(instances):
        prompt = render_prompt(tokenizer, instance)
        if len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) > max_prompt_length:
            too_long += 1
        else:
            rows.append({"prompt": prompt, "index": index})
    return Dataset.from_list(rows), too_long


def trainer_arguments(config: PolicyConfig, method: Method, out: Path, processes: int) -> GRPOConfig:
    """TRL's settings, every default that matters set; raises UserError where the batch can't be split."""
    if method.dynamic_sampling_rounds and config.prompts_per_rollout % processes:
        raise UserError(
            f"method {method.name!r} samples whole groups anew on each process, and policy.prompts_per_rollout = "
            f"{config.prompts_per_rollout} can't be shared out among {processes}; choose a multiple of {processes}"
        )
    micro_batch = config.micro_batch_on(processes)
    accumulation = accumulation_steps(config.rollouts_per_step, micro_batch, processes, "policy.micro_batch_size")
    return GRPOConfig(
        output_dir=str(out / RESUME),
        max_steps=config.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * config.steps_per_rollout,
        num_iterations=1,
        num_generations=config.group_size,
        max_completion_length=config.max_completion_length,
        # Sampling: the policy's own distribution, so that the importance ratio starts at 1.
        temperature=config.temperature,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs=None,
        use_vllm=config.rollouts.engine != "trainer" and torch.cuda.is_available(),  # on a CPU TRL's engine refuses
        use_transformers_continuous_batching=False,
        vllm_importance_sampling_correction=config.rollouts.engine != "trainer",
        **vllm_arguments(config),
        disable_dropout=True,
        # The loss. Advantages are the method's (`PolicyTrainer`): TRL's are computed and not used.
        beta=method.kl,
        use_bias_correction_kl=False,
        sync_ref_model=False,
        epsilon=method.epsilon_low,
        epsilon_high=method.epsilon_high,
        delta=None,
        loss_type=method.loss,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        scale_rewards="none",
        reward_weights=None,
        multi_objective_aggregation="sum_then_normalize",
        mask_truncated_completions=False,
        top_entropy_quantile=1.0,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        router_aux_loss_coef=0.0,
        cast_lm_head_to_fp32=False,
        use_liger_kernel=False,
        label_smoothing_factor=0.0,
        neftune_noise_alpha=None,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.steps_per_rollout,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=2,
        ignore_data_skip=False,
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        remove_unused_columns=False,
        shuffle_dataset=True,
        # A process computes its micro-batch in as many forward passes as its lengths ask for (`packed_forward`), and
        # the buffers of a model are constants: to send them at each pass would wait for passes that never come.
        ddp_broadcast_buffers=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        data_seed=config.seed,
        **device_arguments(config),
    )


def train_policy(
    model: str, instances: Path, out: Path, config: PolicyConfig, launch: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Trains `model` on the train split of `instances`; returns the summary that is written to `out`.

    `launch` is how this and the other processes were started (`LaunchSettings.effect`), where somebody knows.

    Raises UserError where the method doesn't train a policy or no prompt can be trained on.
    """
    method = get_method(config.method)
    if not method.trains:
        raise UserError(f"method {method.name!r} trains no policy; choose one that does (see `awpo methods`)")
    launch, processes = check_launch(launch), process_state()
    check_rollouts(config.rollouts, processes.num_processes)
    work = policy_identity(model, instances, config, launch)
    with open_training(out, "policy", work, GROWING) as stage, ExitStack() as closing:
        if stage.finished:
            return dict(stage.manifest.counts)
        log = RunLog(out)
        if config.threads:
            torch.set_num_threads(config.threads)
        arguments = with_own_optimizer(trainer_arguments(config, method, out, processes.num_processes))
        check_positions(
            model,
            config.max_prompt_length + config.max_completion_length,
            f"policy.max_prompt_length + max_completion_length = {config.max_prompt_length} + "
            f"{config.max_completion_length}",
        )
        set_seed(config.seed)
        policy, tokenizer = load_policy(model, dtype_of_weights(config))
        check_layers(policy, config.lora)
        chosen = read_instances(instances, {"train"})
        rows, too_long = prompt_rows(tokenizer, chosen, config.max_prompt_length)
        if len(rows) < config.prompts_per_rollout:
            raise UserError(
                f"{instances} has {len(rows)} training prompts of at most {config.max_prompt_length} tokens, fewer "
                f"than policy.prompts_per_rollout = {config.prompts_per_rollout}; lower that, or give more data"
            )
        if too_long and processes.is_main_process:
            log.warning(f"{too_long} of {len(chosen)} prompts exceed {config.max_prompt_length} tokens; left out")
        for remark in config.remarks() if processes.is_main_process else []:
            log.warning(remark)
        if config.lora and config.lora.dropout and processes.is_main_process:
            log.warning("policy training uses no dropout: lora.dropout is for supervised fine-tuning alone")
        resume = where_to_resume(out, stage, log, config.steps)
        if processes.is_main_process:
            drop_samples_from(out / SAMPLES, step_of(resume) + 1)
        probes = probe_prompts(tokenizer, rows["prompt"])
        rollouts = open_rollouts(config, model, probes, out, log, main=processes.is_main_process)
        trainer = PolicyTrainer(
            model=policy,
            processing_class=tokenizer,
            args=arguments,
            peft_config=peft_config(config.lora),
            train_dataset=rows,
            callbacks=[LogPolicyToFiles(log, stop_on_collapse=config.stop_on_collapse), MarkWholeCheckpoints()],
            method=method,
            scorer=Scorer(method, config, out / SAMPLES),
            instances=chosen,
            log=log,
            rollouts=closing.enter_context(rollouts),
        )
        train_from(trainer, resume, config.steps)
        summary = {**_last_metrics(out, config), "prompts": len(rows), "too_long": too_long, "steps": config.steps}
        with trained_model(trainer, model, config.lora) as trained:
            if trained is not None:
                judge = {"judge": judge_identity(config.judge)} if method.needs_judge else {}
                card = {"method": method.to_json(), **judge, "base": model, **stage.manifest.begun(), **summary}
                save_trained(trained, tokenizer, out, card)
                summary["seconds"] = round(stage.seconds, 1)
                write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
                stage.finish(summary)
        return summary


def _last_metrics(out: Path, config: PolicyConfig) -> dict[str, float]:
    """Means over the last quarter of the rollout batches (at least one): steadier than the last step alone."""
    rows = [json.loads(line)["metrics"] for line in (out / METRICS).read_text("utf-8").splitlines()]
    result = {}
    for name in ("reward/total", "reward/outcome", "reward/reasoning", "response_length"):
        values = [row[name] for row in rows if name in row]
        if values:
            tail = values[-max(1, len(values) // 4) :]
            result[name] = round(sum(tail) / len(tail), 6)
    return result


def run(job: dict[str, Any]) -> None:
    train_policy(
        job["model"],
        Path(job["instances"]),
        Path(job["out"]),
        PolicyConfig.read(job.get("config", {}), "the policy config"),
        job.get("launch"),
    )
    leave_processes()


if __name__ == "__main__":
    worker_main(run)
