"""The store of MLflow that runs are recorded in: found, opened, and made where it is missing.

It is `MLFLOW_TRACKING_URI`, or SQLite under the runs folder.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from awpo.errors import UserError
from tasks.layout import artifact_root, tracking_uri, without_password
from tasks.patience import in_a_line, patient

EXPERIMENT = "awpo"
# What MLflow's pages go by: they open with runs and models instead of what agents are watched by.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}

# One writer at a time: SQLite has one lock for the whole store, and its first connection creates the tables.
store_lock = threading.RLock()


@dataclass(frozen=True)
class Tracking:
    """Where runs are recorded; small and serialisable, handed from flows to tasks.

    `group` is the outermost run that all of it belongs to: a sweep's training runs are children of its cells.
    """

    uri: str
    experiment_id: str
    parent_run_id: str | None = None
    group: str | None = None

    def client(self) -> MlflowClient:
        """A client that waits for a store that is away for a while."""
        return patient(MlflowClient(tracking_uri=self.uri))

    @property
    def store(self) -> str:
        """The store's address without its password."""
        return without_password(self.uri)


def connect(experiment: str = EXPERIMENT, *, patience: float = 0.0) -> Tracking:
    """Opens the store and the experiment, making both where they are missing.

    `patience` is how many seconds a store that is away is waited for, beyond MLflow's own retries. Raises UserError where the store cannot be reached.
    """
    uri = tracking_uri()
    with store_lock, ExitStack() as stack:
        try:
            local = uri.startswith("sqlite:")
            if local and (path := Path(uri.removeprefix("sqlite:///"))).name:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_alone(path))
            # Versions of registered models look their source up in the process's own store, not the client's.
            mlflow.set_tracking_uri(uri)
            client = patient(MlflowClient(tracking_uri=uri), patience)
            known = client.get_experiment_by_name(experiment)
            if known is None:
                location = None if uri.startswith("http") else artifact_root()
                try:
                    made = client.create_experiment(experiment, artifact_location=location, tags=EXPERIMENT_TAGS)
                    return Tracking(uri, made)
                except MlflowException as error:
                    known = client.get_experiment_by_name(experiment)
                    if error.error_code != "RESOURCE_ALREADY_EXISTS" or known is None:
                        raise
            if known.lifecycle_stage != "active":
                client.restore_experiment(known.experiment_id)
            return Tracking(uri, known.experiment_id)
        except (MlflowException, OSError) as error:
            raise UserError(
                f"cannot open the MLflow store {without_password(uri)} ({in_a_line(error)}); start its server, or unset "
                "MLFLOW_TRACKING_URI"
            ) from None
        except ImportError as error:
            raise UserError(
                f"the MLflow store {without_password(uri)} needs the package {error.name}; make install, or "
                "pip install 'awpo[cluster]'"
            ) from None


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Lets one process at a time open a store of SQLite: two that make its tables at once both fail."""
    with open(store.with_name(f"{store.name}.lock"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
