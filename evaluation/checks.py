"""What is wrong with an evaluation and can be told before anything is started for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from awpo.config import EndpointConfig, EvaluationConfig
from awpo.data.store import iterate_instances
from awpo.endpoint import Endpoint
from awpo.errors import UserError
from evaluation.benchmark_data import check_folder
from evaluation.benchmarks import get_benchmark, identities

CORPUS_SPLITS = ("train", "validation", "test_phrasings", "test_tools")
"""Those of the embedded corpus."""


def check_evaluation(
    config: EvaluationConfig,
    instances: Path | None,
    endpoint: EndpointConfig | None = None,
    *,
    splits: Collection[str] = (),
) -> None:
    """Raises UserError where the evaluation would fail for a benchmark's data or package, a split or an address.

    `instances` None stands for the embedded corpus. All of `splits` must be there; of the config's own, which may be
    a preset's, one is enough.
    """
    if endpoint is not None:
        Endpoint(endpoint.model_copy(update={"cache": "off"}))  # checks address and key, asks nothing
    if config.benchmark_data is not None:
        check_data(config.benchmark_data, config.benchmarks)
    identities(config)
    if "held_out" in config.benchmarks:
        _check_splits(config, instances, splits)


def check_data(folder: Path, benchmarks: Collection[str]) -> None:
    """Raises UserError where a folder of benchmarks' files is of no use to them."""
    files = {name: get_benchmark(name).data_files for name in benchmarks}
    if not any(files.values()):
        raise UserError(
            f"no folder of benchmark data is read for {' and '.join(files)}, so that {folder} would have no effect; "
            "leave it out (held_out is evaluated on the folder of instances)"
        )
    for name, expected in files.items():
        if expected:
            check_folder(folder, name, expected)


def _check_splits(config: EvaluationConfig, instances: Path | None, splits: Collection[str]) -> None:
    wanted = {str(split) for split in splits or config.splits}
    found: set[str] = set()
    for split in CORPUS_SPLITS if instances is None else _splits(instances):
        found.add(split)
        if wanted <= found:
            return
    if lacking := sorted(wanted - found) if splits or not wanted & found else []:
        place = instances or "the embedded corpus"
        raise UserError(f"{place} has no split {' or '.join(lacking)}; there are {', '.join(sorted(found)) or 'none'}")


def _splits(instances: Path) -> Iterator[str]:
    return (str(instance.split) for instance in iterate_instances(instances))
