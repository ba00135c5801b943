"""Mutation check: does a test notice when one thing in the pure modules is wrong?

    python tests/mutation.py [--only MODULE] [--jobs N] [--output FILE] [--match TEXT ..] [--list]

Changes one thing at a time (a sign, a comparison, an operator, a constant, a divisor, a mask or clamp left out, min
and max swapped) in a copy of the package, never in the working tree, and runs the module's test files on it. Prints
each mutant as killed or survived. Exit status 1 where one survives that `EQUIVALENT` doesn't list with a reason.

A mutant's run forks from a process that has loaded torch once; hypothesis draws few examples, always the same, and
doesn't shrink. With --output, results are kept as JSON lines, and mutants whose code and tests are unchanged since
are not run again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADVANTAGES = tuple(sorted(path.name for path in (ROOT / "tests" / "awpo").glob("test_advantages*.py")))
MODULES: dict[str, tuple[str, ...]] = {
    "clipping": ("test_clipping.py", *ADVANTAGES),
    "groups": ADVANTAGES,
    "advantages": (*ADVANTAGES, "test_clipping.py"),
    "rewards": ("test_rewards.py", "test_toolrl_reward.py"),
}
"""Module of `awpo`: its tests in tests/awpo, those that fail soonest first."""

EXAMPLES = 4
CPU_SECONDS = 240
"""A mutant that runs longer than this is in a loop that the original is not in: killed."""

EQUIVALENT: dict[str, str] = {
    "clipping.shrinking: nan=1.0 -> nan=2.0": "1 - 2 is below 0, and clamped to the same 0",
    "rewards.json_equal: isinstance(left, (int, float)) and isinstance(right, (int, float)) -> isinstance(left, (int, float)) or isinstance(right, (int, float))": "a number equals nothing that is no number in Python either",
    "rewards._largest_sum: len(table) == 1 -> len(table) == 0": "a shortcut: the matching of one row by scipy is the same",
    "rewards._largest_sum: table[0] -> table[1] #2": "all rows have one length, and there are at least two here",
    "rewards._largest_sum: len(table[0]) == 1 -> len(table[0]) == 0": "a shortcut: the matching of one column by scipy is the same",
    "rewards._largest_sum: strict=True -> strict=False": "scipy gives as many rows as columns",
    "rewards.overlong_penalty: length <= start -> length < start": "where the slope begins it is 0",
    "groups.check_ranges: r_max_P.abs() -> r_max_P": "an r_max far below 0 has an r_min further below, which is refused",
    "groups.normalise: count_P.clamp(min=1) -> count_P": "a group without a valid rollout then has the mean NaN, and no valid rollout to take it from",
    "groups.normalise: min=1 -> min=0": "a group without a valid rollout then has the mean NaN, and no valid rollout to take it from",
    "groups.normalise: magnitude_PG.where(valid_PG, 0) -> magnitude_PG.where(valid_PG, 1)": "the size counts as 1 at least, with or without it",
    "groups.variance_ratio: mix.std_P.where(mix.varies_P, 1) -> mix.std_P": "where the mixture has no variance the ratio is replaced two lines further on, whatever it was",
    "groups.variance_ratio: mix.std_P.where(mix.varies_P, 1) -> mix.std_P.where(mix.varies_P, 2)": "where the mixture has no variance the ratio is replaced two lines further on, whatever it was",
    "groups.variance_ratio: mix.std_P.where(mix.varies_P, 1) -> mix.std_P.where(mix.varies_P, 0)": "where the mixture has no variance the ratio is replaced two lines further on, whatever it was",
    "advantages.compare_rewards: batch.reasoning_PG.abs() -> batch.reasoning_PG": "a reasoning reward is never negative",
    "advantages.compare_rewards: valid_PG.sum(dim=1).clamp(min=1) -> valid_PG.sum(dim=1)": "a group without a valid rollout then has the mean NaN, which both of its uses mask",
    "advantages.compare_rewards: min=1 -> min=0": "a group without a valid rollout then has the mean NaN, which both of its uses mask",
    "advantages.dara: (density_K.max() / density_K).sqrt().where(density_K > 0, 1) -> (density_K.max() / density_K).sqrt()": "a reward that varies nowhere has no positive advantage that its weight could meet",
    "advantages.dara: (density_K.max() / density_K).sqrt().where(density_K > 0, 1) -> (density_K.max() / density_K).sqrt().where(density_K > 0, 2)": "a reward that varies nowhere has no positive advantage that its weight could meet",
    "advantages.dara: (density_K.max() / density_K).sqrt().where(density_K > 0, 1) -> (density_K.max() / density_K).sqrt().where(density_K > 0, 0)": "a reward that varies nowhere has no positive advantage that its weight could meet",
    "advantages.dara: density_K > 0 -> density_K >= 0": "a reward that varies nowhere has no positive advantage that its weight could meet",
    "advantages.dara: parts_KPG > 0 -> parts_KPG >= 0": "an advantage of 0 is 0 with any weight",
}
"""Mutants that no test can kill, by `Mutant.key`, each with the reason."""


# Mutants


@dataclass(frozen=True)
class Mutant:
    """One change: `module` of awpo, where, what, and the changed module's whole source."""

    module: str
    function: str
    line: int
    change: str
    source: str
    number: int = 1

    @property
    def key(self) -> str:
        """Stays the same when lines move; `number` tells like changes in one function apart."""
        return f"{self.module}.{self.function}: {self.change}" + (f" #{self.number}" if self.number > 1 else "")


OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SWAPPED = {
    "min": "max",
    "amin": "amax",
    "any": "all",
    "zeros_like": "ones_like",
}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
LEFT_OUT = ("where", "masked_fill", "clamp", "abs", "sqrt", "square", "nan_to_num", "removesuffix", "strip", "clone")
"""Methods whose call is replaced by what it is called on."""


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Every other node that could stand in the place of this one by one slip."""
    if isinstance(node, ast.BinOp | ast.BoolOp):
        for operator in OPERATORS.get(type(node.op), ()):
            other = copy.copy(node)
            other.op = operator()  # type: ignore[assignment]
            yield other
    elif isinstance(node, ast.Compare):
        for place, old in enumerate(node.ops):
            for operator in OPERATORS.get(type(old), ()):
                yield ast.Compare(node.left, [*node.ops[:place], operator(), *node.ops[place + 1 :]], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield from (ast.Constant(value) for value in (node.value + 1, node.value - 1) if value >= 0)
        elif isinstance(node.value, float):
            yield ast.Constant(node.value * 2 if node.value else 1.0)
            yield from [ast.Constant(node.value / 2)] if node.value else []
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call):
        yield from changed_call(node)


def changed_call(node: ast.Call) -> Iterator[ast.AST]:
    function = node.func
    if isinstance(function, ast.Attribute):
        whole = ast.unparse(function) == "torch.where"
        if function.attr in LEFT_OUT and not whole:
            yield function.value
        if whole:
            yield ast.Call(function, [node.args[0], node.args[2], node.args[1]], node.keywords)
        if function.attr in SWAPPED:
            yield ast.Call(ast.Attribute(function.value, SWAPPED[function.attr]), node.args, node.keywords)
    elif isinstance(function, ast.Name) and function.id in SWAPPED:
        yield ast.Call(ast.Name(SWAPPED[function.id]), node.args, node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg in ("min", "max") and isinstance(function, ast.Attribute) and function.attr == "clamp":
            other = ast.keyword(SWAPPED[keyword.arg], keyword.value)
            yield ast.Call(function, node.args, [*node.keywords[:place], other, *node.keywords[place + 1 :]])


def skipped(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """What says nothing about numbers: annotations, decorators, texts, the words of an error, an axis (it crashes)."""
    return (
        (isinstance(parent, ast.keyword) and parent.arg == "dim")
        or         field in ("annotation", "returns", "decorator_list", "type_params", "bases")
        or isinstance(parent, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)
        or (isinstance(child, ast.Constant) and isinstance(child.value, str))
        or (isinstance(parent, ast.Subscript) and field == "slice" and isinstance(parent.value, ast.Name | ast.Attribute)
            and ast.unparse(parent.value) in ("Mapping", "Callable", "dict", "list", "tuple"))
    )  # fmt: skip


def places(node: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    """(parent, field, index in it or None, child, function's name) of every node that may be changed."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or skipped(node, field, child):
                continue
            inside = (*scope, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else scope
            yield node, field, index, child, ".".join(scope) or "module"
            yield from places(child, inside)


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of one module's source, in the order of its lines."""
    statements = ast.parse(source).body
    texts = [ast.unparse(statement) for statement in statements]
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for number, statement in enumerate(statements):
        for function, line, change in changes(ast.Module([statement], [])):
            key = f"{function}: {change}"
            seen[key] += 1
            whole = "\n".join([*texts[:number], ast.unparse(statement), *texts[number + 1 :]])
            found.append(Mutant(module, function, line, change, whole, seen[key]))
    return sorted(found, key=lambda mutant: mutant.line)


def changes(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Makes each change in the tree in turn, tells (function, line, change), and takes it back."""
    for parent, field, index, child, function in list(places(tree)):
        if isinstance(child, ast.If):
            if isinstance(child.test, ast.Compare | ast.UnaryOp):
                continue  # those are turned round in themselves
            parent, field, index, old = child, "test", None, child.test
            others: list[ast.AST] = [ast.UnaryOp(ast.Not(), child.test)]
        else:
            old, others = child, list(changed(child))
        # a bare constant says little: it is shown in the expression around it
        shown = parent if isinstance(old, ast.Constant) and isinstance(parent, ast.expr | ast.keyword) else None
        for new in others:
            before = ast.unparse(shown or old)
            put(parent, field, index, new)
            line = getattr(old, "lineno", getattr(parent, "lineno", 0))
            yield function, line, " ".join(f"{before} -> {ast.unparse(shown or new)}".split())
            put(parent, field, index, old)


def put(parent: ast.AST, field: str, index: int | None, child: ast.AST) -> None:
    if index is None:
        setattr(parent, field, child)
    else:
        getattr(parent, field)[index] = child


# Running tests on one


@dataclass(frozen=True)
class Verdict:
    killed: bool
    by: str


class FirstFailure:
    """A pytest plugin that remembers which test failed first."""

    name = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and not self.name:
            self.name = str(getattr(report, "nodeid", ""))

    def pytest_collectreport(self, report: object) -> None:
        self.pytest_runtest_logreport(report)


def load_once() -> None:
    """Loads what takes long and isn't under test, so that a forked child has it already."""
    import gc

    import hypothesis
    import hypothesis.strategies
    import pydantic
    import pytest
    import scipy.optimize
    import torch

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for them takes longer than most mutants' tests
    torch.set_num_threads(1)
    assert all((pytest, scipy.optimize, hypothesis.strategies))
    pydantic.create_model("Loads", value=(int, pydantic.Field(0, ge=0)))  # most of pydantic comes with the first model
    settings = hypothesis.settings
    original = settings.__init__

    def few(self: object, parent: object = None, **options: object) -> None:
        if "max_examples" in options:
            options["max_examples"] = min(int(str(options["max_examples"])), EXAMPLES)
        original(self, parent, **options)  # type: ignore[arg-type]

    settings.__init__ = few  # type: ignore[method-assign,assignment]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    settings.register_profile(
        "mutation", max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=phases
    )
    settings.load_profile("mutation")
    gc.freeze()  # a child has no reason to look through all of torch


def run_tests(folder: Path, tests: Sequence[Path], answer: int) -> None:
    """In a forked child: the tests on the package in `folder`; writes "STATUS TEST" to the pipe `answer`, and ends."""
    status, failure = 3, FirstFailure()
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        import pytest

        import awpo

        if Path(awpo.__file__).resolve().parent == (folder / "awpo").resolve():
            options = ["-x", "-q", "--no-header", "--tb=no"]
            options += ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"]
            names = [str(test) for test in tests]
            status = int(
                pytest.main(
                    [*options, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *names], plugins=[failure]
                )
            )
    finally:
        os.write(answer, f"{status} {failure.name}".encode())
        os._exit(0)


def copy_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "awpo", folder / "awpo", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def start(folder: Path, module: str, source: str, tests: Sequence[Path]) -> tuple[int, int]:
    """Forks a run; returns (process id, the pipe that its answer comes through)."""
    (folder / "awpo" / f"{module}.py").write_text(source, "utf-8")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run_tests(folder, tests, writing)
    os.close(writing)
    return child, reading


def finish(child: int, reading: int) -> tuple[int, str]:
    """The run's pytest status, -1 where it was ended for its time, and the first test that failed."""
    with os.fdopen(reading, "rb") as pipe:
        status, _, name = pipe.read().decode().partition(" ")
    os.waitpid(child, 0)
    return (int(status) if status else -1), name


def verdict(status: int, name: str) -> Verdict:
    if status in (3, 4, 5):
        raise SystemExit(f"the tests could not be run (pytest's exit status {status})")
    return Verdict(status != 0, name.rpartition("/")[2] if status >= 0 else f"more than {CPU_SECONDS} s")


def fingerprint(mutant: Mutant, tests: Sequence[Path]) -> str:
    digest = hashlib.sha256(mutant.source.encode())
    for path in [*tests, *sorted((ROOT / "awpo").glob("*.py"))]:
        if path.name != f"{mutant.module}.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def check(
    chosen: Sequence[Mutant], tests: Sequence[Path] | None, jobs: int, output: Path | None
) -> Iterator[tuple[Mutant, Verdict]]:
    """Runs the mutants, at most `jobs` at once; gives each with its verdict, in order."""
    kept: dict[str, Verdict] = {}
    if output is not None and output.exists():
        for line in output.read_text("utf-8").splitlines():
            row = json.loads(line)
            kept[row["fingerprint"]] = Verdict(row["killed"], row["by"])
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        folders = [copy_package(Path(temporary) / str(job)) for job in range(jobs)]
        known_good: set[str] = set()
        for first in range(0, len(chosen), jobs):
            running = []
            for folder, mutant in zip(folders, chosen[first : first + jobs], strict=False):
                files = tests or [ROOT / "tests" / "awpo" / name for name in MODULES[mutant.module]]
                original = (ROOT / "awpo" / f"{mutant.module}.py").read_text("utf-8")
                mark = fingerprint(mutant, files)
                if mark in kept:
                    running.append((mutant, mark, None))
                    continue
                if mutant.module not in known_good:
                    status, name = finish(*start(folder, mutant.module, original, files))
                    if status:
                        raise SystemExit(f"the tests of {mutant.module} fail without a mutant: {name or status}")
                    known_good.add(mutant.module)
                running.append((mutant, mark, start(folder, mutant.module, mutant.source, files)))
            for mutant, mark, process in running:
                if process is not None:
                    kept[mark] = verdict(*finish(*process))
                    if output is not None:
                        row = {"fingerprint": mark, "key": mutant.key, "killed": kept[mark].killed, "by": kept[mark].by}
                        with open(output, "a", encoding="utf-8") as file:
                            file.write(json.dumps(row, ensure_ascii=False) + "\n")
                yield mutant, kept[mark]
            for folder, (mutant, _, process) in zip(folders, running, strict=False):
                if process is not None:
                    shutil.copy(ROOT / "awpo" / f"{mutant.module}.py", folder / "awpo" / f"{mutant.module}.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Changes one thing at a time and sees whether a test notices.")
    parser.add_argument("--only", choices=sorted(MODULES), action="append", help="a module of awpo; may be repeated")
    parser.add_argument("--match", nargs="+", default=[""], help="only mutants with one of these texts in their key")
    parser.add_argument("--tests", type=Path, nargs="+", help="other test files than the module's own")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at once (default 1)")
    parser.add_argument("--output", type=Path, help="file of results, from which an interrupted run goes on")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    options = parser.parse_args()
    chosen = [
        mutant
        for module in options.only or MODULES
        for mutant in mutants(module, (ROOT / "awpo" / f"{module}.py").read_text("utf-8"))
        if any(text in mutant.key for text in options.match)
    ]
    if options.list:
        for mutant in chosen:
            print(f"awpo/{mutant.module}.py:{mutant.line}: {mutant.key.partition('.')[2]}")
        return 0
    load_once()
    counts: Counter[tuple[str, str]] = Counter()
    for mutant, result in check(chosen, options.tests, max(1, options.jobs), options.output):
        reason = EQUIVALENT.get(mutant.key)
        word = "killed" if result.killed else "equivalent" if reason else "SURVIVED"
        counts[mutant.module, word] += 1
        print(f"{word:10} awpo/{mutant.module}.py:{mutant.line}: {mutant.key.partition('.')[2]}", end="")
        print(f"   ({result.by or reason})" if result.by or reason else "", flush=True)
        if reason and result.killed:
            print(f"           listed as equivalent, but a test notices it: {mutant.key}")
    print(f"\n{'module':12}{'mutants':>9}{'killed':>9}{'equivalent':>12}{'survived':>10}")
    for module in options.only or MODULES:
        row = [counts[module, word] for word in ("killed", "equivalent", "SURVIVED")]
        print(f"{module:12}{sum(row):9}{row[0]:9}{row[1]:12}{row[2]:10}")
    return int(any(word == "SURVIVED" for _, word in counts))


if __name__ == "__main__":
    sys.exit(main())
