"""Evaluates one checkpoint, or one endpoint."""

from __future__ import annotations

import flows.prefect_home  # noqa: F401 - sets defaults before the libraries below read them

# isort: split
from pathlib import Path
from typing import Any

from prefect import flow

from awpo.artifacts import read_manifest
from awpo.config import CorpusConfig, EndpointConfig, EvaluationConfig, RationaleConfig
from evaluation.items import read_scores
from evaluation.target import Target
from flows.form_parameters import check_parameters
from flows.parameters import PipelineSettings, read_pipeline
from flows.pieces import THREADS_ALONE, prepare_instances
from flows.preflight import check_out
from tasks.cancellation import stops_its_tasks
from tasks.evaluation import evaluate as evaluate_checkpoint
from tasks.evaluation import score_metrics
from tasks.layout import Layout, checkpoint_of
from tasks.model import build_model
from tasks.parents import close_runs, parent_run
from tasks.registry import resolve_checkpoint

QUICK = read_pipeline("quick")


@flow(
    name="evaluate",
    flow_run_name="evaluate {checkpoint}",
    on_crashed=[close_runs],
    on_cancellation=[close_runs],
    validate_parameters=True,
)
def evaluate(
    checkpoint: str = "embedded-1m",
    instances: str | None = None,
    out: str = "runs/evaluate",
    evaluation: EvaluationConfig = QUICK.evaluation,
    corpus: CorpusConfig = QUICK.corpus,
    endpoint: EndpointConfig | None = None,
) -> dict[str, Any]:
    """Evaluates a checkpoint, or the model behind an endpoint, and returns the scores.

    Args:
        checkpoint: Folder of a checkpoint or of a training stage, models:/NAME@ALIAS, or the name of a model preset
        instances: Folder of instances; empty for the embedded corpus, made in OUT
        out: Folder of the results, made where it is missing
        evaluation: Benchmarks, splits and sampling
        corpus: The embedded corpus, where no instances are given
        endpoint: An endpoint that is evaluated in place of a checkpoint, which then is a name only
    """
    check_parameters()
    layout = Layout(Path(out))
    check_out(layout.out)
    settings = {"checkpoint": checkpoint, "instances": instances, "evaluation": evaluation.model_dump(mode="json")}
    if endpoint:
        settings["endpoint"] = endpoint.model_dump(mode="json")
    with stops_its_tasks(), parent_run("evaluate", layout.out, settings) as (tracking, run):

        def folder_of_instances() -> Path:
            if instances:
                return Path(instances)
            made = PipelineSettings(corpus=corpus, rationales=RationaleConfig())
            return prepare_instances(layout, made, tracking)

        folder = folder_of_instances() if instances or "held_out" in evaluation.benchmarks else None
        target: Target
        if endpoint:
            target, name = endpoint, endpoint.model.replace("/", "-")
        else:
            known = resolve_checkpoint(checkpoint, tracking)
            if known is None:
                folder = folder or folder_of_instances()
                known = Path(build_model(checkpoint, folder, layout.out / checkpoint, 0, tracking))
                name = checkpoint
            else:
                name = _name_of(checkpoint_of(known))
            target = checkpoint_of(known)
        labels = {"method": "given", "init": "base", "model": name, "seed": evaluation.seed}
        result = evaluate_checkpoint(
            target, folder, layout.out / "evaluation" / name, evaluation, labels, tracking, THREADS_ALONE
        )
        scores = read_scores(result)
        run.metrics(score_metrics(scores))
        manifest = read_manifest(result)
    return {
        "out": str(result),
        "run_id": run.run_id,
        "scores": scores,
        "seconds": manifest.seconds if manifest else None,
    }


def _name_of(checkpoint: Path) -> str:
    place = checkpoint.resolve()
    return place.parent.name if place.name == "checkpoint" else place.name


if __name__ == "__main__":
    evaluate()
