"""Imported first by every module with a flow: sets the environment, and makes Prefect's home.

Prefect makes its home folder but not the folders above it, and without one its temporary server does not start.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import flows.environment  # noqa: F401 - sets defaults

with contextlib.suppress(OSError):  # Prefect itself says what is wrong with its home
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
