"""Moving an alias of the registry as a transaction: it points at the new version for good, or where it pointed before.

The alias moves first, so that what is tried is what everybody would get. From then until the end a tag on the
registered model, `awpo.promoting.ALIAS`, says where it came from: where the process is killed in between, the next
promotion finds the tag and puts the alias back, and `awpo doctor` tells of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from prefect.runtime import flow_run
from prefect.transactions import CommitMode, Transaction, transaction

from awpo.errors import UserError
from awpo.processes import is_gone, process_identity
from tasks.registry import SCHEME, aliased_version, checked_checkpoint, find_version
from tasks.stage_run import log
from tasks.tracking_store import Tracking

PROMOTING = "awpo.promoting."

# The promotions that this process is in the middle of: it may live on after one that it could not undo.
_under_way: set[str] = set()


@dataclass(frozen=True)
class Promotion:
    """An alias on its way from a version (None: it stood for none) to another."""

    name: str
    alias: str
    before: str | None
    after: str
    process: str
    run: str

    @property
    def tag(self) -> str:
        return f"{PROMOTING}{self.alias}"

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.name}@{self.alias}"

    @property
    def abandoned(self) -> bool:
        """Whether the process that made it is known to be gone, or has given it up."""
        if self.process == process_identity():
            return self.uri not in _under_way
        return is_gone(self.process)

    def __str__(self) -> str:
        before = f"version {self.before}" if self.before else "no version"
        return f"{self.uri} from {before} to version {self.after} by {self.run or 'a command'}"


class NotPutBack(RuntimeError):
    """An alias could not be put back; the tag of its promotion stands, so that the next one does it."""


@contextmanager
def promoted(version: Any, tracking: Tracking, alias: str) -> Iterator[Path]:
    """Gives `alias` to `version` for the block, and for good where the block ends well; else it goes back.

    Yields the checkpoint that the alias stands for now, its files being those that were registered. Whatever ends the
    block, a cancellation too, is raised again once the alias is back. Raises UserError where the alias is being moved
    already, NotPutBack where it could not be put back.
    """
    mend_promotions(tracking, version.name, alias)
    before = aliased_version(tracking, alias, name=version.name)
    run = str(flow_run.name or "")
    former = str(before.version) if before else None  # some stores give a version as a number
    made = Promotion(version.name, alias, former, str(version.version), process_identity(), run)
    client = tracking.client()
    failed: list[BaseException] = []

    def put_alias_back(_: Transaction) -> None:
        try:
            put_back(made, tracking)
        except BaseException as error:
            failed.append(error)  # Prefect only writes it to the log
            raise

    _under_way.add(made.uri)
    try:
        # On its own, whatever it is within: once the block has ended the alias stays.
        with transaction(commit_mode=CommitMode.EAGER) as moving:
            moving.stage(made.after, on_rollback_hooks=[put_alias_back])
            client.set_registered_model_tag(made.name, made.tag, json.dumps(asdict(made)))
            client.set_registered_model_alias(made.name, alias, made.after)
            yield checked_checkpoint(find_version(made.uri, tracking))
            if not moving.is_staged():  # a task within failed, which rolls back at once, and was tried again
                raise RuntimeError(f"{made.uri} went back to where it was, because a task failed meanwhile")
        client.delete_registered_model_tag(made.name, made.tag)
    except BaseException as error:
        if failed:
            raise NotPutBack(
                f"{error}; and {made.uri} could not be put back ({failed[0]}): the next promotion does it"
            ) from error
        raise
    finally:
        _under_way.discard(made.uri)


def put_back(promotion: Promotion, tracking: Tracking) -> None:
    """Gives the alias back to the version that it had. An alias that a person has moved on since stays."""
    client = tracking.client()
    now = aliased_version(tracking, promotion.alias, name=promotion.name)
    if now is not None and str(now.version) == promotion.after != promotion.before:
        if promotion.before is None:
            client.delete_registered_model_alias(promotion.name, promotion.alias)
        else:
            client.set_registered_model_alias(promotion.name, promotion.alias, promotion.before)
    client.delete_registered_model_tag(promotion.name, promotion.tag)
    log(
        f"{promotion.uri} is version {promotion.before} again" if promotion.before else f"{promotion.uri} is gone again"
    )


def unfinished_promotions(tracking: Tracking) -> list[Promotion]:
    """The promotions that have begun and not ended, of all registered models, under way or abandoned."""
    found = []
    for model in tracking.client().search_registered_models():
        for key, value in model.tags.items():
            if key.startswith(PROMOTING):
                found.append(Promotion(**json.loads(value)))
    return found


def mend_promotions(tracking: Tracking, name: str, alias: str) -> None:
    """Puts the alias back where a promotion of it was abandoned.

    Raises UserError where one is under way, or nobody here can tell: its process is on another machine.
    """
    try:
        tags = tracking.client().get_registered_model(name).tags
    except MlflowException:
        return
    if (text := tags.get(f"{PROMOTING}{alias}")) is None:
        return
    promotion = Promotion(**json.loads(text))
    if not promotion.abandoned:
        host = promotion.process.partition(":")[0]
        raise UserError(
            f"{promotion} is under way, on {host}; wait for it. If that is gone, set the alias back and delete the "
            f"model's tag {promotion.tag} in MLflow's UI"
        )
    log(f"an earlier promotion of {promotion} was never finished: its process is gone")
    put_back(promotion, tracking)
