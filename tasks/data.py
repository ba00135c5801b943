"""Tasks that prepare data: the embedded corpus, decomposition, reference rationales."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from awpo.config import CorpusConfig, RationaleConfig
from awpo.data.settings import DecomposeConfig, SelectConfig
from tasks.slots import JUDGE_API
from tasks.stage_run import Work, show_markdown, show_table, stage_run, worth_trying_again
from tasks.tracking_store import Tracking


class DecomposeSettings(DecomposeConfig):
    """How a source is read, and how its dialogues become instances."""

    format: str = "auto"


@task(name="corpus", task_run_name="write corpus · seed {config.seed}", cache_policy=NO_CACHE)
def write_corpus(out: Path, config: CorpusConfig, tracking: Tracking) -> Path:
    """The embedded corpus of dialogues, into `out`; returns the file of dialogues."""
    from awpo.embedded.corpus import DIALOGUES, corpus_identity
    from awpo.embedded.corpus import write_corpus as write

    title, identity = f"write corpus · seed {config.seed}", corpus_identity(config)
    work = Work("corpus", title, out, {}, config, {"seed": config.seed}, identity=identity)
    with stage_run(work, tracking) as stage:
        write(out, config, progress=stage.progress)
        stage.results(_numbers(stage.manifest().counts))
    return out / DIALOGUES


@task(name="decompose", task_run_name="decompose {source.name}", cache_policy=NO_CACHE)
def decompose(source: Path, out: Path, format: str, config: DecomposeConfig, tracking: Tracking) -> Path:
    """The dialogues of `source` as instances in `out`; returns the folder.

    Raises UserError where the source is missing or of no known format. Rows that cannot be read are listed in
    rejected.jsonl and counted by reason.
    """
    from awpo.data.decompose import decompose_identity, decompose_source

    settings, identity = DecomposeSettings(format=format, **dict(config)), decompose_identity(source, format, config)
    work = Work("decompose", f"decompose {source.name}", out, {"source": source}, settings, identity=identity)
    with stage_run(work, tracking) as stage:
        manifest = decompose_source(source, out, format=format, config=config, progress=stage.progress)
        stage.results(_numbers(manifest.counts))
        rejected = dict(manifest.counts.get("rejected", {}))
        if rejected:
            total = sum(rejected.values())
            stage.warn(f"{total} rows could not be read; see {out / 'rejected.jsonl'}")
            lines = [f"| {reason} | {count} |" for reason, count in sorted(rejected.items())]
            show_markdown(
                f"rejected rows of {source.name}",
                "\n".join(
                    [f"{total} rows of `{source}` could not be read.", "", "| reason | rows |", "|---|---|", *lines]
                ),
            )
    return out


@task(name="select", task_run_name="select {instances.name}", cache_policy=NO_CACHE)
def select(instances: Path, out: Path, config: SelectConfig, tracking: Tracking) -> Path:
    """What `config` leaves of the instances, in `out`; returns the folder.

    What goes, by source and reason, and what overlaps with benchmarks is a table each. Raises UserError where a
    benchmark or a tokenizer cannot be read, or nothing is left.
    """
    from awpo.data.selection import CONTAMINATED, select_identity, select_instances

    identity = select_identity([instances], config)
    work = Work("select", f"select {instances.name}", out, {"instances": instances}, config, identity=identity)
    with stage_run(work, tracking) as stage:
        manifest = select_instances([instances], out, config, progress=stage.progress)
        stage.results(_numbers(manifest.counts))
        reasons = [{"source": source, **table} for source, table in manifest.counts["selection"].items()]
        show_table(f"selection of {instances.name}", reasons, "Instances read, left out by reason, and left")
        if overlaps := manifest.counts.get("contaminated"):
            rows = [
                {"source": source, "benchmark": name, "dialogues": count}
                for source, found in overlaps.items()
                for name, count in found.items()
            ]
            show_table(f"overlaps of {instances.name}", rows, "Dialogues that overlap with a benchmark, kept or not")
            total = sum(row["dialogues"] for row in rows)
            stage.warn(f"{total} overlaps of dialogues with benchmarks; see {out / CONTAMINATED}")
    return out


@task(
    name="rationales",
    task_run_name="write rationales · {config.writer}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=[10, 60],
    retry_condition_fn=worth_trying_again,
    tags=["awpo-endpoint"],
)
def write_rationales(instances: Path, out: Path, config: RationaleConfig, tracking: Tracking) -> Path:
    """The instances with a reference rationale each, in `out`; returns the folder. An endpoint's trouble is retried."""
    from awpo.data.rationales import rationales_identity
    from awpo.data.rationales import write_rationales as write

    title, identity = f"write rationales · {config.writer}", rationales_identity(instances, config)
    work = Work("rationales", title, out, {"instances": instances}, config, identity=identity)
    needs = {JUDGE_API: 1} if config.writer == "endpoint" else {}
    with stage_run(work, tracking) as stage, stage.slots(needs):
        manifest = write(instances, out, config, progress=stage.progress)
        stage.results(_numbers(manifest.counts))
    return out


def _numbers(counts: dict[str, object], prefix: str = "") -> dict[str, float]:
    """The numbers among a manifest's counts, nested ones by dotted names: what can be logged as metrics."""
    found: dict[str, float] = {}
    for key, value in counts.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found
