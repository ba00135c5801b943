"""What MLflow is told of a judge: its prompt, once per version, and the sampled judgements of a training run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities.model_registry import PromptVersion
from mlflow.exceptions import MlflowException

from awpo.artifacts import read_manifest
from awpo.config import JudgeConfig
from awpo.config_training import PolicyConfig
from awpo.events import Tail
from awpo.judge_prompts import PROMPT_HASH, RESPONSE_FORMAT, prompt_template
from awpo.methods import get_method
from tasks.judge_traces import known_traces, send_traces, trace_id
from tasks.relay import EVERY_SECONDS, Relay
from tasks.stage_run import StageRun
from tasks.tracking import TrackedRun, ended_truly, open_run
from tasks.tracking_store import Tracking, store_lock

PROMPT, BLIND_PROMPT = "awpo-judge", "awpo-judge-without-reference"
TRACES_PER_BATCH = 20
SUMMARY = "summary.json"


@contextmanager
def judgements_relayed(stage: StageRun, config: PolicyConfig) -> Iterator[None]:
    """Sends the sampled judgements of a training stage while it runs; what is left on leaving, however it ends.

    A store that is away is a warning: the next attempt or run of the stage sends what is missing. Nothing is sent
    where the method needs no judge.
    """
    if not get_method(config.method).needs_judge:
        yield
        return
    relay = JudgementRelay(stage.run, stage.work.folder, config.judge)
    try:
        with relay:
            yield
    finally:
        if relay.problem:
            stage.warn(
                f"MLflow did not take all judgements ({relay.problem}); they are sent by the next run of this stage"
            )


class JudgementRelay(Relay):
    """Sends judge_samples.jsonl as traces, and the judge's prompt before the first; `pump` counts traces.

    Of a judge that asks a model every sample is sent; of one by rules, whose scores can be computed again, the first
    of each step.
    """

    def __init__(self, run: TrackedRun, folder: Path, config: JudgeConfig, every: float = EVERY_SECONDS) -> None:
        from awpo.training.scoring import SAMPLES  # with the clients of endpoints, which take seconds to import

        super().__init__(run, every)
        self.path, self.config = folder / SAMPLES, config
        self._prompts: list[PromptVersion] | None = None
        self._known: set[str] | None = None  # ids of the traces that the store has
        self._tail, self._inode = Tail(self.path), 0
        self._of_step: Counter[int] = Counter()
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def _send_new(self) -> int:
        if self._prompts is None:
            self._prompts = announce_judge(self.run, self.config)
        self._read()
        if not self._waiting:
            return 0
        if self._known is None:
            self._known = known_traces(self.run)
        sent = 0
        while self._waiting:
            batch = self._waiting[:TRACES_PER_BATCH]
            new = [(trace, row) for trace, row in batch if trace not in self._known]
            send_traces(self.run, self.config, self._prompts, new, self.path.stat().st_mtime)
            self._known.update(trace for trace, _ in new)
            del self._waiting[:TRACES_PER_BATCH]
            sent += len(new)
        return sent

    def _read(self) -> None:
        """Adds the new samples to those that wait."""
        if not self.path.exists():
            return
        status = self.path.stat()
        # A resumed trainer replaces the file by one without the steps that it will do again: read it from its start.
        if status.st_ino != self._inode or status.st_size < self._tail.offset:
            self._tail, self._inode = Tail(self.path), status.st_ino
            self._of_step.clear()
            self._waiting.clear()
        for row in self._tail:
            step, judgement = row.get("step"), row.get("judgement")
            if not isinstance(step, int) or not isinstance(judgement, dict):
                continue
            place = self._of_step[step]
            self._of_step[step] += 1
            if place == 0 or self.config.kind == "endpoint":
                self._waiting.append((trace_id(self.run.run_id, step, place), row))


def track_evaluation(tracking: Tracking, config: JudgeConfig, folder: Path, summary: dict[str, Any]) -> TrackedRun:
    """Records a finished evaluation of a judge as a run: its figures as metrics, each kind's beside them.

    The same folder and figures are the same run.
    """
    manifest = read_manifest(folder)
    assert manifest is not None, f"{folder} is no finished evaluation"
    run = open_run(tracking, f"judge {config.label}", folder, manifest.fingerprint, {"awpo.stage": manifest.stage})
    with ended_truly(run):
        if run.file.complete:
            return run
        run.config(config.model_dump(mode="json"))
        announce_judge(run, config)
        run.tags({"awpo.judge_usable": not summary["unusable"], "awpo.judge_unusable": "; ".join(summary["unusable"])})
        figures = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        for kind in summary["kinds"]:
            figures |= {
                f"{kind['kind']}/{name}": kind[name] for name in ("accuracy", "right", "wrong", "lift", "failed")
            }
        run.metrics({name: value for name, value in figures.items() if value is not None})
        run.artifact(folder / SUMMARY)
    return run


def announce_judge(run: TrackedRun, config: JudgeConfig) -> list[PromptVersion]:
    """Tags the run with who judges by which version; links it with the prompts that are asked with, if any."""
    from awpo.judge import judge_identity

    identity = judge_identity(config)
    version = {f"awpo.judge_{name}": identity[name] for name in ("prompt", "rules") if name in identity}
    run.tags({"awpo.judge": config.label, **version})
    if config.kind != "endpoint":
        return []
    prompts = [register_prompt(run.tracking, with_reference=True)]
    if config.two_pass:
        prompts.append(register_prompt(run.tracking, with_reference=False))
    with store_lock:
        for prompt in prompts:
            run.client.link_prompt_version_to_run(run.run_id, prompt)
    return prompts


def register_prompt(tracking: Tracking, *, with_reference: bool) -> PromptVersion:
    """The judge's prompt in the registry: the version of its hash, made where there is none yet.

    The alias `hash-...` leads to it, so that the registry need not be read through.
    """
    client, name = tracking.client(), PROMPT if with_reference else BLIND_PROMPT
    alias = f"hash-{PROMPT_HASH}"
    with store_lock:
        try:
            return client.get_prompt_version_by_alias(name, alias)
        except MlflowException as error:
            # The first is what it says of a missing prompt, the second of a missing alias (and of other things, which
            # come up again below).
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
        mlflow.set_experiment(experiment_id=tracking.experiment_id)  # whose page shows the prompt
        shown = "with" if with_reference else "without"
        prompt = client.register_prompt(
            name,
            prompt_template(with_reference=with_reference),
            commit_message=f"The judge's prompt {shown} the reference, version {PROMPT_HASH}",
            tags={"awpo.prompt_hash": PROMPT_HASH},
            response_format=RESPONSE_FORMAT["json_schema"]["schema"],
        )
        client.set_prompt_alias(name, alias, prompt.version)
    return prompt
