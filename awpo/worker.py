"""One process of a worker: ends with who started it, and keeps its prints apart from those of other processes.

    python -m awpo.worker MODULE JOB.json

Runs MODULE (whose main function is `awpo.processes.worker_main`) as the program. Importing torch takes seconds, in
which the parent may die and imports may fail: so this is begun before.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from pathlib import Path

from awpo.processes import LOG, end_with_parent, log_of_rank, rank


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m awpo.worker MODULE JOB.json")
    module, job_file = sys.argv[1:]
    end_with_parent()
    if (log := log_of_rank(rank())) != LOG:
        with open(Path(job_file).parent / log, "a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    faulthandler.enable()  # where a native library crashes, the log says what was running
    sys.argv = [module, job_file]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
