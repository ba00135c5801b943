"""A model server as a child process: started on a free port, waited for, stopped with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from awpo.errors import UserError
from awpo.processes import StageFailed, end_group, ends_with_this, last_lines
from awpo.serving.server import ENGINES

START_SECONDS = 600.0
LOG = "server.log"


class ModelServer:
    """Serves a checkpoint for the time of a `with` block; `url` ends in /v1, `name` is what to ask for.

    `engine` is one of `awpo.serving.server.ENGINES`; `further` are arguments for vLLM, `environment` variables for it.
    The server has a process group of its own and ends with this process, however that ends. Its log is `server.log` in
    `folder` (a temporary one where none is given). Raises UserError where the checkpoint cannot be served, StageFailed
    where the server ends or does not answer in time.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        name: str | None = None,
        port: int = 0,
        threads: int = 1,
        folder: Path | None = None,
        engine: str = "transformers",
        further: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.location, self.port, self.threads, self.engine = str(location), port, threads, engine
        self._further, self._environment = further, environment or {}
        self.url, self.name = "", name or ""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="awpo-serving-")
        folder = self._folder or Path(self._temporary.name)
        folder.mkdir(parents=True, exist_ok=True)
        address, log = Path(self._temporary.name) / "address.json", folder / LOG
        command = [sys.executable, "-m", ENGINES[self.engine], self.location, "--port", str(self.port)]
        command += ["--address-file", str(address), "--with-parent", *(["--name", self.name] if self.name else [])]
        command += ["--", *self._further] if self._further else []
        threads = str(self.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            **self._environment,
            **ends_with_this(),
        }
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait(address, log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self, address: Path, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not (address.exists() and self._answers(address)):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                last = last_lines(log, 12)
                if code == 2 and last:
                    raise UserError(last[-1].removeprefix("error: "))
                raise StageFailed(f"the server of {self.location} did not come up; see {log}\n" + "\n".join(last))
            time.sleep(0.05)

    def _answers(self, address: Path) -> bool:
        told = json.loads(address.read_text("utf-8"))
        self.url, self.name = told["url"], told["name"]
        with suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=5) as response:
                return bool(response.status == 200)
        return False

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_group(self._process)
            self._process = None
        self._temporary.cleanup()
