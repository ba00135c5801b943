"""The official BFCL evaluation on stored outputs, by the own `eval_runner` of the package that is installed, V3 or V4:

    python official_bfcl.py RESULTS SCORES NUMBERS [--stand-ins]

RESULTS/MODEL/BFCL_v3_CATEGORY_result.json (or v4) hold the outputs; the package writes its score files and tables to SCORES.
Its tables round to two decimals: NUMBERS gets the same numbers as JSON before that, by table and column, with the
accuracy and the wrong items of each category, and the processor time from after the imports to the end.

Run it with an interpreter that has the whole package; with `--stand-ins`, what is imported but not installed (vendors'
clients, and the registry of models that imports them all) is replaced by modules of the same names that do nothing.
Handler, checkers, executor, runner and tables are the package's own either way.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-0.6B-FC"
HANDLER = "bfcl_eval.model_handler.local_inference.qwen_fc"
# Where the package's tables, by file and column, show each average of evaluation/bfcl/averages.py.
COLUMNS_V3 = {
    "Overall Acc": ("data_overall", "Overall Acc"),
    "Non-Live Overall Acc": ("data_non_live", "Non_Live Overall Acc"),
    "Non-Live AST Acc": ("data_overall", "Non-Live AST Acc"),
    "Non-Live Simple AST": ("data_overall", "Non-Live Simple AST"),
    "Live Acc": ("data_overall", "Live Acc"),
    "Live AST Summary": ("data_live", "AST Summary"),
    "Multi Turn Acc": ("data_overall", "Multi Turn Acc"),
    "Irrelevance Detection": ("data_overall", "Irrelevance Detection"),
}
COLUMNS_V4 = {
    name: ("data_overall", name)
    for name in (
        *("Overall Acc", "Non-Live AST Acc", "Non-Live Simple AST", "Live Acc", "Multi Turn Acc"),
        *("Web Search Acc", "Memory Acc", "Irrelevance Detection"),
    )
} | {"Agentic Overall Acc": ("data_agentic", "Agentic Overall Acc")}
# Imported by handler and runner, beside what they need to read and check stored outputs.
_OPTIONAL = ("overrides", "tenacity", "openai", "requests", "dotenv", "tqdm", "pandas", "numpy")
_PARSERS = ("java_parser", "js_parser")  # of models that answer in Java or JavaScript; they need tree_sitter


class StandIn(types.ModuleType):
    """A module that has every name: a class to inherit from, or a function that gives back what it is given first.

    The latter is what a decorator does that changes nothing, or one that is made with options.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__init__": lambda self, *args, **options: None})
        return lambda *args, **options: args[0] if args else (lambda function: function)


def stand_in() -> None:
    """Puts stand-ins in place of what is not installed, and a registry that knows MODEL alone."""
    for name in _OPTIONAL:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = StandIn(name)
    if importlib.util.find_spec("tree_sitter") is None:
        for name in _PARSERS:
            sys.modules[f"bfcl_eval.model_handler.parser.{name}"] = StandIn(name)
    registry = types.ModuleType("bfcl_eval.constants.model_config")
    registry.MODEL_CONFIG_MAPPING = {}  # type: ignore[attr-defined]
    sys.modules[registry.__name__] = registry
    # As the package's registry describes it.
    registry.MODEL_CONFIG_MAPPING[MODEL] = types.SimpleNamespace(  # type: ignore[attr-defined]
        model_name=MODEL.removesuffix("-FC"),
        model_handler=importlib.import_module(HANDLER).QwenFCHandler,
        display_name="Qwen3-0.6B (FC)",
        url="https://huggingface.co/Qwen/Qwen3-0.6B",
        org="Qwen",
        license="apache-2.0",
        input_price=None,
        output_price=None,
        is_fc_model=True,
        underscore_to_dot=False,
    )


def evaluate(results: Path, scores: Path) -> dict[str, Any]:
    """Runs the package's evaluation; returns its numbers as the module's text says."""
    from bfcl_eval.eval_checker import eval_runner, eval_runner_helper

    started = time.process_time()
    tables: dict[str, dict[str, float]] = {}
    keep_tables(eval_runner_helper, tables)
    scores.mkdir(parents=True, exist_ok=True)
    eval_runner.main([MODEL], ["all"], results, scores)
    seconds = time.process_time() - started
    categories: dict[str, Any] = {}
    for path in sorted((scores / MODEL.replace("/", "_")).rglob("BFCL_v?_*_score.json")):
        total, *wrong = (json.loads(line) for line in path.read_text("utf-8").splitlines())
        name = path.name[len("BFCL_v?_") :].removesuffix("_score.json")
        categories[name] = total | {"wrong": sorted({row["id"] for row in wrong})}
    return {"tables": tables, "categories": categories, "processor_seconds": seconds}


def keep_tables(helper: Any, tables: dict[str, dict[str, float]]) -> None:
    """Makes the module `eval_runner_helper` put the numbers of its one model into `tables` before it rounds them."""
    official_writer = helper.write_score_csv_file

    def writer(data: list[list[Any]], file_path: Path, header: list[str], **options: Any) -> None:
        (row,) = data
        tables[Path(file_path).stem] = {
            name: value for name, value in zip(header, row, strict=True) if isinstance(value, (int, float))
        }
        official_writer(data, file_path, header, **options)

    helper.write_score_csv_file = writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=lambda text: Path(text).resolve())
    parser.add_argument("scores", type=lambda text: Path(text).resolve())
    parser.add_argument("numbers", type=Path)
    parser.add_argument("--stand-ins", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("BFCL_PROJECT_ROOT", folder)  # the package makes folders there when imported
        if arguments.stand_ins:
            stand_in()
        numbers = evaluate(arguments.results, arguments.scores)
    arguments.numbers.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
