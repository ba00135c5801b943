"""Fuzzing by atheris, guided by coverage: `python tests/fuzz/fuzz.py TARGET --seconds 600`; see targets.py.

What it finds ends it with code 77 and lies in --findings; give that file as `--replay FILE` to see it again. A
finding becomes an ordinary test. Inputs that reach new code are kept in --findings too, never in the seeds' folder.
With `--by hypothesis` the inputs are those of test_fuzz.py, for as long; that makes a finding smaller before it ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TOKENS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<response>",
        "</response>",
        "<|im_end|>",
        "<obs>",
        "<user>",
    ),
    *('{"name": ', '"arguments": ', '"parameters": ', '"messages"', '"role"', '"tools"', '"conversations"', "\\ud800"),
    *('"coherence": ', '"correctness": ', '"appropriateness": ', "8/10", " out of 10", "NaN", "1e999", "```json"),
    *("User:", "AI:", "API-Request: [", "]->", "API descriptions:", "**Available Tools**", "List[", "Optional["),
    *("&a ", "*a", "<<: ", "!!int ", "!!timestamp ", "!!binary ", "? ", "| ", "0x", "1:59", "2001-01-01", "steps: "),
)


def main() -> None:
    known = sorted(path.name for path in Path(__file__).with_name("corpus").iterdir())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=known)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--findings", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--by", choices=("atheris", "hypothesis"), default="atheris")
    arguments = parser.parse_args()
    if arguments.by == "hypothesis":
        by_hypothesis(arguments.target, arguments.seconds)
        return
    try:
        import atheris
    except ImportError:
        sys.exit("error: atheris is not installed (wheels for Python 3.11 on Linux alone); make fuzz installs it")
    with atheris.instrument_imports(include=["awpo", "evaluation", "flows", "tasks", "yaml"]):
        from tests.fuzz.targets import CORPUS, TARGETS

        # What is imported at first use is to be followed, too, and what is made then takes longer than one input may.
        for seed in sorted((CORPUS / arguments.target).iterdir()):
            TARGETS[arguments.target](seed.read_bytes())

    found = arguments.findings / arguments.target
    found.mkdir(parents=True, exist_ok=True)
    dictionary = arguments.findings / "tokens.txt"
    escaped = (token.replace("\\", "\\\\").replace('"', '\\"') for token in TOKENS)
    dictionary.write_text("".join(f'"{token}"\n' for token in escaped))
    options = [f"-max_total_time={arguments.seconds}", f"-dict={dictionary}", f"-artifact_prefix={found}/finding-"]
    options += ["-max_len=8192", "-timeout=10", "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=1"]
    inputs = [str(found), str(CORPUS / arguments.target)] if arguments.replay is None else [str(arguments.replay)]
    print(f"{arguments.target}: {arguments.seconds} s from {time.strftime('%X')}", flush=True)
    atheris.Setup([sys.argv[0], *options, *inputs], TARGETS[arguments.target])
    atheris.Fuzz()


def by_hypothesis(name: str, seconds: float) -> None:
    """Spoilt seeds, anew and by chance, for so many seconds; raises what the first bad one raises, made small."""
    from hypothesis import HealthCheck, given, settings

    from tests.fuzz.targets import TARGETS
    from tests.fuzz.test_fuzz import spoilt

    tried = 0

    @settings(max_examples=1000, deadline=10_000, database=None, suppress_health_check=list(HealthCheck))
    @given(data=spoilt(name))
    def search(data: bytes) -> None:
        nonlocal tried
        tried += 1
        TARGETS[name](data)

    start = time.monotonic()
    while time.monotonic() - start < seconds:
        search()
    print(f"{name}: {tried} inputs by hypothesis in {time.monotonic() - start:.0f} s, none of them bad", flush=True)


if __name__ == "__main__":
    main()
