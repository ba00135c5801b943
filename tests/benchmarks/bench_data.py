"""What preparing data costs, against what it cannot do without: `make bench-data`.

The floor is parsing the same JSON lines by orjson and writing the same rows of instances as parquet. Against it stands
reading, normalising, checking, hashing and decomposing, in one process. With token counts the measure is the
tokenizer's own rate on the same texts. Schema checks, near-duplicates and the comparison with a benchmark are measured
apart, each as its own cost.

Each piece runs `ROUNDS` times in turn with the others, forwards and backwards, and the median of its processor time
counts: that of other processes on the machine is not in it, though their use of caches and memory is. What the pieces
are given is frozen before, so that collecting garbage costs each only for what it makes itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from awpo.config import CorpusConfig
from awpo.data import decompose, store
from awpo.data.near_duplicates import Sketches, buckets_of, duplicates_of, said_in, similar_pairs, write_part
from awpo.data.rows import Rows
from awpo.data.settings import (
    BenchmarkText,
    DecomposeConfig,
    DecontaminationConfig,
    LengthConfig,
    NearDuplicatesConfig,
)
from awpo.data.sources import detect, get_source, read_row
from awpo.data.sources.base import Rejected
from awpo.data.splits import split_of
from awpo.embedded.corpus import DIALOGUES, write_corpus

ROUNDS = 5


def measure(pieces: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median processor time of each piece, in seconds; the pieces take turns."""
    times: dict[str, list[float]] = {name: [] for name in pieces}
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for name, piece in list(pieces.items())[:: -1 if number % 2 else 1]:
            start = time.process_time()
            piece()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def write_as_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """The rows of instances as the store writes them, with nothing around it."""
    with pq.ParquetWriter(path, store.SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, len(rows), store.ROWS_PER_GROUP):
            group = rows[start : start + store.ROWS_PER_GROUP]
            columns = {name: [row[name] for row in group] for name in store.SCHEMA.names}
            writer.write_table(pa.Table.from_pydict(columns, store.SCHEMA))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="JSON lines of any known format; none: the embedded corpus")
    parser.add_argument("--dialogues", type=int, default=4000, help="dialogues of the embedded corpus")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = arguments.source
        if source is None:
            write_corpus(folder / "corpus", CorpusConfig(train_dialogues=arguments.dialogues))
            source = folder / "corpus" / DIALOGUES
        run(source, folder, arguments.rounds)


def run(source: Path, folder: Path, rounds: int) -> None:
    reader, config = get_source(detect(source)), DecomposeConfig()
    lines = source.read_bytes().splitlines()
    found = [decompose.examine(row, reader) for row in Rows(source)]
    examined = [item for item in found if not isinstance(item, Rejected)]
    rows = [
        row
        for item in examined
        for row in decompose.cut_rows(item.texts, item.dialogue.split or split_of(item.dialogue.id), reader, config)
    ]
    instances = [store.instance_of(row) for row in rows]

    def whole() -> None:
        (folder / "whole").mkdir(exist_ok=True)
        decompose._decompose_rows(Rows(source), folder / "whole", reader, config, lambda *_: None)

    def schema_checks() -> None:
        for item in examined:
            decompose.invalid_calls(item.dialogue)

    def near_duplicates() -> None:
        config = NearDuplicatesConfig()
        sketches, sizes = Sketches(config), [len(said)]
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            write_part(work, 0, [sketches.of(words) for words in said], range(len(said)), config)
            duplicates_of(
                work, sizes, (similar_pairs(work, sizes, bucket, config) for bucket in buckets_of(sizes, config))
            )

    def parse() -> None:
        for line in lines:
            orjson.loads(line)

    def parse_strictly() -> None:
        for _ in Rows(source):
            pass

    def normalise() -> None:
        for row in Rows(source):
            read_row(row, reader)

    last_rows = {row["dialogue_id"]: row for row in rows}
    messages = [[*orjson.loads(row["prompt"]), orjson.loads(row["target"])] for row in last_rows.values()]
    said = [said_in(found) for found in messages]
    asked = [[message["content"] or "" for message in found if message["role"] == "user"] for found in messages]
    pieces: dict[str, Callable[[], Any]] = {
        "parse by orjson": parse,
        "write as parquet": lambda: write_as_parquet(rows, folder / "floor.parquet"),
        "parse strictly": parse_strictly,
        "read and normalise": normalise,
        "decompose, whole": whole,
        "schema checks": schema_checks,
        "near-duplicates": near_duplicates,
    }
    pieces |= contamination_piece(asked)
    pieces |= token_pieces(folder, instances)
    times = measure(pieces, rounds)
    floor = times["parse by orjson"] + times["write as parquet"]
    count = len(examined)
    print(f"{count} dialogues, {len(rows)} instances, {source.stat().st_size / 1e6:.1f} MB; {rounds} rounds")
    print(f"{'':28}{'seconds':>9}{'s per million dialogues':>26}")
    for name, seconds in times.items():
        print(f"{name:28}{seconds:9.3f}{seconds / count * 1e6:26.0f}")
    print(f"floor (orjson + parquet)    {floor:9.3f}")
    print(f"decompose / floor           {times['decompose, whole'] / floor:9.2f}")
    if "tokenizer alone" in times:
        print(f"token counts / tokenizer    {times['token counts'] / times['tokenizer alone']:9.2f}")


def contamination_piece(asked: list[list[str]]) -> dict[str, Callable[[], Any]]:
    """The comparison with BFCL's questions, where bfcl-eval is installed; reading the questions is not in it."""
    from awpo.data.contamination import Contamination
    from awpo.errors import UserError

    try:
        known = Contamination(DecontaminationConfig(benchmarks={"bfcl": BenchmarkText(path="bfcl")}))
    except UserError as error:
        print(f"without decontamination: {error}")
        return {}
    return {"decontamination": lambda: [known.find(texts) for texts in asked]}


def token_pieces(folder: Path, instances: list[Any]) -> dict[str, Callable[[], Any]]:
    """Token counts of instances, and the tokenizer alone on the same texts in batches of the same size."""
    from awpo.chat import render_prompt, render_target
    from awpo.data.lengths import Lengths, Segments
    from awpo.data.select_work import ROWS_AT_ONCE
    from awpo.embedded.tokenizer import train_tokenizer

    some = instances[:1000]
    train_tokenizer(some[:300]).save_pretrained(folder / "tokenizer")
    lengths = Lengths(LengthConfig(tokenizer=str(folder / "tokenizer")))
    tokenizer = lengths.tokenizer
    texts = [render_prompt(tokenizer, item) + render_target(item.target, item.rationale) for item in some]
    batches = range(0, len(some), ROWS_AT_ONCE)
    backend = tokenizer.backend_tokenizer

    def count() -> None:
        lengths.segments = Segments.of(tokenizer)  # nothing is known from an earlier round
        for at in batches:
            lengths.count(some[at : at + ROWS_AT_ONCE])

    return {
        "tokenizer alone": lambda: [
            backend.encode_batch(texts[at : at + ROWS_AT_ONCE], add_special_tokens=False) for at in batches
        ],
        "token counts": count,
    }


if __name__ == "__main__":
    main()
