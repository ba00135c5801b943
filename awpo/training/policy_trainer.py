"""TRL's GRPOTrainer with this project's rewards, advantages and clip radius.

TRL keeps weight sync, the loss, checkpoints, ZeRO and FSDP. Its hooks that are overridden are private, so TRL is
pinned exactly and a test fails when one of them moves:
`_calculate_rewards` (scores the rollouts and keeps what advantages need), `_generate_and_score_completions`
(replaces the advantages and adds the clip radius of each row), `_compute_loss` (a radius per row),
`_tokenize_prompts` (a rendered prompt gets no second beginning), `_generate_single_turn` (on a CPU, rollouts by
`awpo.decoding`); in `awpo.training.packed_trainer` `_prepare_inputs` (rows are shuffled by whole groups) and
`_get_per_token_logps_and_entropies` (each prompt computed once); in `awpo.training.resumable_trainer`, for checkpoints
at any step, `_save_rng_state`, `_load_optimizer_and_scheduler` and `_get_train_sampler`.

Axes: N rollouts of all processes, P prompts, G rollouts of a prompt, B rows of a micro-batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from awpo.advantages import estimate
from awpo.decoding import Decoder, Row, uniform_numbers
from awpo.events import RunLog
from awpo.methods import Method
from awpo.training.collapse_watch import repeated_share
from awpo.training.dynamic_sampling import replace_groups, teaching_groups, varying_groups
from awpo.training.finite_steps import FiniteSteps
from awpo.training.packed_trainer import PackedTrainer
from awpo.training.rollout_watch import RolloutWatch, reward_metrics
from awpo.training.scoring import Drawn, Scorer, Scores, chosen_rows, of_all_judges
from awpo.training.sharding import whole_weights
from awpo.training.vllm_rollouts import DIFFERENCE, VllmRollouts, refuse_stale
from awpo.types import Instance

# Rollouts in one batch of the CPU's loop: it is packed anew as rows end.
ROLLOUTS_AT_ONCE = 128
SPENT = ("seconds/judge", "seconds/rollout", "tokens/rollout")
# What advantages are made of, a column (B,) each.
COLUMNS = ("format", "correct", "overlong", "reasoning", "r_min", "r_max")


def scored_elsewhere(completions: Sequence[Any], **_: Any) -> list[float]:
    """TRL wants at least one reward function; the rewards come from `PolicyTrainer._calculate_rewards`."""
    raise RuntimeError("rewards are computed in PolicyTrainer._calculate_rewards")


class PolicyTrainer(FiniteSteps, PackedTrainer):
    """Trains by `method`. Rows of the dataset: `prompt` (text, already rendered with its tools) and `index`, which
    points into `instances`."""

    # TRL holds numbers here; around its loss they are tensors (B, 1).
    epsilon_low: Any
    epsilon_high: Any

    def __init__(
        self,
        *arguments: Any,
        method: Method,
        scorer: Scorer,
        instances: Sequence[Instance],
        log: RunLog,
        rollouts: VllmRollouts | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, reward_funcs=[scored_elsewhere], **named)
        self.rollouts = rollouts
        if rollouts:  # TRL corrects for what vLLM sampled; asked before, it would have made an engine of its own
            self.use_vllm = True
        self.method, self.scorer, self.instances, self.run_log = method, scorer, instances, log
        self._scored: tuple[list[Instance], list[str], Scores] | None = None
        self._begun: tuple[list[list[int]], Future[Scores]] | None = None
        self._judge_wait = 0.0
        self._watch = RolloutWatch(method, self._warn)
        self._draws: list[Drawn] = []
        self._prepare_packing(self._warn)
        self.watch_steps("policy", log)
        self._told: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        if self._begun is None or self._begun[0] != completion_ids_list:
            self._begin_scoring(inputs, completion_ids_list)  # what was begun is of other completions
        assert self._begun is not None
        start = time.perf_counter()
        scores = self._begun[1].result()
        self._judge_wait, self._begun = time.perf_counter() - start, None
        self._scored = ([self.instances[row["index"]] for row in inputs], self._decoded(completion_ids_list), scores)
        device = self.accelerator.device
        outcome = torch.tensor(scores.format, device=device) + torch.tensor(scores.correct, device=device)
        return gather(outcome.unsqueeze(1))

    def _begin_scoring(self, rows: Sequence[dict[str, Any]], completion_ids: list[list[int]]) -> None:
        """A judge behind an endpoint is asked as soon as there are completions, and answers while TRL computes."""
        instances = [self.instances[row["index"]] for row in rows]
        lengths = [len(ids) for ids in completion_ids]
        self._begun = (completion_ids, self.scorer.begin(instances, self._decoded(completion_ids), lengths))

    def _decoded(self, completion_ids: list[list[int]]) -> list[str]:
        """Texts decoded here and not taken from TRL, which strips every special token: a tag may be one."""
        return [self._decode(ids) for ids in completion_ids]

    def _decode(self, ids: list[int]) -> str:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return str(self._tokenizer.decode([i for i in ids if i not in ends], skip_special_tokens=False))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's rollout batch, with the method's advantages and a clip radius for each row."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        self._draws = []
        batch = self._roll_out(inputs, group_size)
        rounds = self.method.dynamic_sampling_rounds if self.model.training else 0
        if rounds:
            batch = self._fill_empty_groups(batch, group_size, rounds)
        self._tell(batch["row"].tolist())
        return {key: value for key, value in batch.items() if key not in (*COLUMNS, "row", "teaches")}

    def _roll_out(self, inputs: list[dict[str, Any]], group_size: int) -> dict[str, Any]:
        """One draw: TRL's batch, and columns (B,) for what advantages are made of and for what is told of it."""
        self._rows = inputs
        start, tokens_before = time.perf_counter(), self.state.num_input_tokens_seen
        output = super()._generate_and_score_completions(inputs)
        if self.use_vllm:
            difference = self._metrics["train" if self.model.training else "eval"][DIFFERENCE][-1]
            refuse_stale(difference, self.scorer.config, "the log-probabilities of its rollouts")
        self._drawn_logps = None
        assert self._scored is not None
        drawn = Drawn(*self._scored)
        self._draws.append(drawn)
        device = self.accelerator.device
        for name in COLUMNS:
            output[name] = torch.tensor(getattr(drawn.scores, name), dtype=torch.float32, device=device)
        output["instance"] = torch.tensor([row["index"] for row in inputs], device=device)
        output["row"] = torch.arange(len(inputs), device=device) + len(inputs) * (len(self._draws) - 1)
        self._credit(output, group_size)
        judging = max(gather_object([self._judge_wait]))
        store = self._metrics["train" if self.model.training else "eval"]
        store["seconds/judge"].append(judging)
        store["seconds/rollout"].append(time.perf_counter() - start - judging)
        store["tokens/rollout"].append(self.state.num_input_tokens_seen - tokens_before)
        return output

    def _credit(self, batch: dict[str, Any], group_size: int) -> None:
        """Gives the rows of `batch` their advantages and clip radii, and notes what came of the rollouts of all."""
        rewards_N = {name: gather(batch[name]) for name in COLUMNS}
        rewards_N["outcome"] = rewards_N["format"] + rewards_N["correct"]
        # Every prompt's rows stand together, in the order of the processes, so groups are whole here.
        rewards_PG = {name: values_N.view(-1, group_size) for name, values_N in rewards_N.items()}
        read = {*self.method.rewards, "outcome"} | ({"reasoning"} if self.scorer.judge else set())
        result = estimate(
            self.method,
            {
                name: rewards_PG[name] + rewards_PG["overlong"] if name == "outcome" else rewards_PG[name]
                for name in sorted(read)
            },
            r_min=rewards_PG["r_min"][:, 0],
            r_max=rewards_PG["r_max"][:, 0],
        )
        count = len(batch["row"])
        first = self.accelerator.process_index * count
        rows = slice(first, first + count)
        batch["advantages"] = result.advantages.reshape(-1)[rows].to(batch["advantages"].dtype)
        batch["clip_low"] = result.clip_low.repeat_interleave(group_size)[rows]
        batch["clip_high"] = result.clip_high.repeat_interleave(group_size)[rows]
        batch["teaches"] = teaching_groups(self.method, rewards_PG, result).repeat_interleave(group_size)[rows]
        self._told = {"rewards": rewards_N, "result": result, "advantages": batch["advantages"]}

    def _fill_empty_groups(self, batch: dict[str, Any], group_size: int, rounds: int) -> dict[str, Any]:
        """Dynamic sampling, at most `rounds` rounds. A group that none could fill has no advantages."""
        store = self._metrics["train"]
        used = 0
        for draw in range(rounds):
            empty = int(gather((~varying_groups(batch, group_size)).sum().reshape(1)).sum())
            if not empty:
                break
            used += 1
            kept = {name: list(values) for name, values in store.items()}
            drawn = self._roll_out(self._fresh_rows(len(batch["row"]), group_size, draw), group_size)
            spent = {name: [sum(store[name])] for name in SPENT}
            tokens = store["num_tokens"]
            store.clear()
            store.update({**kept, **spent, "num_tokens": tokens})
            batch = replace_groups(batch, drawn, group_size, int(self._tokenizer.pad_token_id))
            self._credit(batch, group_size)
        batch["advantages"] = batch["advantages"].where(batch["teaches"], 0)
        self._told["advantages"] = batch["advantages"]
        empty_share = gather((~varying_groups(batch, group_size)).float().mean().reshape(1)).mean().item()
        store["dynamic_sampling/rounds"].append(float(used))
        store["dynamic_sampling/empty_share"].append(empty_share)
        if empty_share:
            self._warn(f"{empty_share:.0%} of the groups have no variance after {used} rounds of sampling")
        lengths = batch["completion_mask"].sum(dim=1)
        batch["num_items_in_batch"] = gather(lengths).sum()
        # TRL's are of the groups that were drawn first.
        last = batch["completion_ids"].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.tensor([*self.eos_token_ids, self._tokenizer.pad_token_id], device=last.device)
        store["completions/mean_length"][-1] = gather(lengths).float().mean().item()
        store["completions/clipped_ratio"][-1] = gather(~torch.isin(last, ends)).float().mean().item()
        return batch

    def _fresh_rows(self, count: int, group_size: int, draw: int) -> list[dict[str, Any]]:
        """Prompts of the training set, drawn with replacement by each process, so that one may come twice or be in the
        batch already; which ones depends on seed, step and round alone, so resuming is exact."""
        seed = f"{self.args.seed}-{self.state.global_step}-{draw}-{self.accelerator.process_index}"
        picked = random.Random(seed).choices(range(len(self.train_dataset)), k=count // group_size)
        return [dict(self.train_dataset[index]) for index in picked for _ in range(group_size)]

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        """TRL's (prompt ids, no images, nothing else); the template has written all that a prompt begins with."""
        return self.processing_class(text=prompts, add_special_tokens=False)["input_ids"], None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, *rest: Any
    ) -> Any:
        """TRL's (completion ids, log-probabilities or None); their scoring begins at once."""
        if self.rollouts:
            completion_ids, logprobs = self.rollouts.roll_out(self, prompt_ids, num_generations)
        elif self.accelerator.device.type == "cpu" and not self.use_vllm:
            completion_ids, logprobs = self._sample(prompt_ids), None
        else:
            completion_ids, logprobs = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, *rest
            )
        if len(self._rows) == len(completion_ids):
            self._begin_scoring(self._rows, completion_ids)
        return completion_ids, logprobs

    def _sample(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Completions by the project's loop on a CPU, where a group shares its prompt's prefill.

        The random numbers of a rollout depend on seed, step, round and its row among those of all processes alone: how
        many processes share the work changes nothing.
        """
        key = f"{self.args.seed}-{self.state.global_step}-0-{len(self._draws) + 1}"
        first = self.accelerator.process_index * len(prompt_ids)
        numbers: dict[tuple[int, ...], int] = {}
        limit = self.max_completion_length
        rows = [
            Row(numbers.setdefault(tuple(ids), len(numbers)), ids, limit, uniform_numbers(f"{key}-{index}", limit))
            for index, ids in enumerate(prompt_ids, first)
        ]
        with whole_weights(self.accelerator, self.model_wrapped) as model:
            training = model.training
            model.eval()
            try:
                for _ in Decoder(model, self.eos_token_ids).complete(rows, self.temperature, ROLLOUTS_AT_ONCE):
                    pass
            finally:
                model.train(training)
        # The policy that drew them is the old policy of the loss: what it was sure of is known, in float32.
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        if self._packs and not aligned and model.dtype == torch.float32:
            self._drawn_logps = [row.logprobs for row in rows]
        return [row.output for row in rows]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        low, high = self.epsilon_low, self.epsilon_high
        self.epsilon_low, self.epsilon_high = inputs["clip_low"].unsqueeze(1), inputs["clip_high"].unsqueeze(1)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        # The store takes means over the micro-batches of a step.
        total = self.accelerator.reduce(tokens, reduction="sum").item() * self.current_gradient_accumulation_steps
        self._metrics["train" if self.model.training else "eval"]["tokens/update"].append(total)
        # Rows without an advantage have no gradient, where the loss has no other term.
        if self.beta == 0 and not self._entropy_bonus_enabled:
            self._idle = inputs["advantages"] == 0
        named = inputs["instance"].tolist() if "instance" in inputs else []  # of an earlier version's checkpoint
        self._made_of([self.instances[index].id for index in named])
        try:
            return self._refuse_loss(super()._compute_loss(model, inputs))
        finally:
            self.epsilon_low, self.epsilon_high, self._idle = low, high, None

    def _tell(self, rows: list[int]) -> None:
        """Hands the metrics of the groups that are trained on to TRL's store (docs/metrics.md), which averages them
        until it logs, and writes some of their rollouts down."""
        rewards_N, result = self._told["rewards"], self._told["result"]
        drawn = chosen_rows(self._draws, rows)
        metrics = self._metrics["train" if self.model.training else "eval"]
        values = reward_metrics(self.method, rewards_N) | result.metrics()
        device = self.accelerator.device
        values["rollout/repeated_share"] = (
            gather(torch.tensor([repeated_share(text) for text in drawn.texts], device=device)).mean().item()
        )
        if judged := sum(len(one.scores.grades) for one in self._draws):
            values["judge/seconds_per_judgement"] = drawn.scores.judge_seconds / judged
            values |= of_all_judges(gather_object([self.scorer.metrics()]))
        for name, value in values.items():
            metrics[name].append(value)
        self._watch.see(rewards_N, result)
        if self.accelerator.is_main_process:
            advantages = [round(value, 6) for value in self._told["advantages"].tolist()]
            draws = {"draw": [row // len(rows) for row in rows]} if self.method.dynamic_sampling_rounds else {}
            self.scorer.write_samples(
                self.state.global_step + 1, drawn.instances, drawn.texts, drawn.scores, advantage=advantages, **draws
            )

    def _warn(self, message: str) -> None:
        if self.accelerator.is_main_process:
            self.run_log.warning(message)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The method card that is saved with the finished checkpoint takes the place of TRL's."""
