"""Moves an MLflow store to another database: SQLite of one person to the Postgres of a team.

MLflow has no command for it. Its tables are copied as they are, both sides at the schema of the installed MLflow, in one
transaction: either the target holds everything afterwards, counted table by table, or what it held before. Ids stay, so
that links, tags and the folders' own notes (`tasks.tracking.RunFile`) still name the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa
from alembic.migration import MigrationContext
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from awpo.errors import UserError
from tasks.layout import without_password

ROWS_AT_ONCE = 2000
# What MLflow itself puts into a store that it makes.
OF_ITS_OWN = {"alembic_version": 1, "experiments": 1, "workspaces": 1}
VERSION = "alembic_version"


@dataclass(frozen=True)
class Moved:
    """What a migration moved: rows by table, for tables that have any, and files of artifacts."""

    rows: Mapping[str, int]
    files: int


def migrate(
    source: str,
    target: str,
    old_root: str | None = None,
    new_root: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Moved:
    """Copies the store at `source` into the empty one at `target`, both addresses of databases as MLflow takes them.

    With `new_root`, the files of artifacts under `old_root` (file:///...) are copied there (file:///..., s3://...)
    first, and addresses in the store that begin with `old_root` are written anew. The source is only read. Raises
    UserError where a store cannot be opened, has another schema than the installed MLflow's, or the target has runs.
    """
    for uri, name in ((source, "the present store"), (target, "--to")):
        if not uri.startswith(("sqlite:", "postgresql", "mysql", "mssql")):
            raise UserError(
                f"{name} is {without_password(uri)}, which is no database; give one, or its server's database"
            )
    if urlsplit(source)._replace(query="") == urlsplit(target)._replace(query=""):
        raise UserError(f"{without_password(target)} is the store that is used already; give another with --to")
    with opened(source, create=False) as old, opened(target) as new:
        tables = _same_tables(old, new)
        _require_empty(new, tables, target)
        files = copy_artifacts(old_root, new_root, say) if old_root and new_root else 0
        change = _change(old_root, new_root)
        rows: dict[str, int] = {}
        with old.connect() as read, new.begin() as write:
            for table in reversed(tables):
                write.execute(table.delete())
            for table in tables:
                count = _copy(table, read, write, change)
                if count:
                    say(f"{table.name}: {count} rows")
                    rows[table.name] = count
            _set_sequences(write, tables)
        return Moved(rows, files)


@contextmanager
def opened(uri: str, *, create: bool = True) -> Iterator[sa.Engine]:
    """The database, with MLflow's tables in it; without `create` it must be there. Raises UserError where it isn't."""
    file = urlsplit(uri).path.removeprefix("/") if uri.startswith("sqlite:") else ""
    if file and not Path(file).exists() and not create:
        raise UserError(f"there is no store at {without_password(uri)}; nothing to move")
    try:
        # Asked by itself first: MLflow tries for two minutes to reach a database that is not there.
        engine = sa.create_engine(uri, poolclass=sa.NullPool)
        engine.connect().close()
        # Makes the tables where there are none, and refuses a schema that is not the installed MLflow's.
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except ImportError as error:
        raise UserError(
            f"{without_password(uri)} needs the package {error.name}; "
            + (
                "pip install 'awpo[cluster]'"
                if uri.startswith("postgresql")
                else "install it, or give postgresql://..."
            )
        ) from None
    except (MlflowException, sa.exc.SQLAlchemyError, OSError) as error:
        raise UserError(f"cannot open {without_password(uri)}: {str(error).splitlines()[0]}") from None
    try:
        yield engine
    finally:
        engine.dispose()


def _same_tables(old: sa.Engine, new: sa.Engine) -> list[sa.Table]:
    """The target's tables, those that others refer to first. Raises UserError where the source has others."""
    versions = []
    for engine in (old, new):
        with engine.connect() as connection:
            versions.append(MigrationContext.configure(connection).get_current_revision())
    here, there = sa.MetaData(), sa.MetaData()
    here.reflect(old)
    there.reflect(new)
    columns = [
        {name: {column.name for column in table.columns} for name, table in tables.tables.items()}
        for tables in (here, there)
    ]
    if versions[0] != versions[1] or columns[0] != columns[1]:
        raise UserError(
            f"the stores have other schemas ({versions[0]} and {versions[1]}); bring both to the installed MLflow's by "
            "`mlflow db upgrade ADDRESS`"
        )
    return [table for table in there.sorted_tables if table.name != VERSION]


def _require_empty(engine: sa.Engine, tables: list[sa.Table], uri: str) -> None:
    with engine.connect() as connection:
        for table in tables:
            found = _count(connection, table)
            if found > OF_ITS_OWN.get(table.name, 0):
                raise UserError(
                    f"{without_password(uri)} is not empty: {found} rows in {table.name}; make a new database, as two "
                    "stores cannot be merged"
                )


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def _copy(table: sa.Table, read: sa.Connection, write: sa.Connection, change: Callable[[Any], Any]) -> int:
    """Copies one table; returns how many rows it has on both sides. Raises UserError where a value isn't taken."""
    written = [column for column in table.columns if column.computed is None]
    # The target's columns with types that both databases know: SQLite's booleans are numbers, its JSON is text.
    wanted = sa.table(table.name, *(sa.column(column.name, _generic(column.type)) for column in written))
    insert = table.insert()
    found = read.execution_options(yield_per=ROWS_AT_ONCE).execute(sa.select(wanted))
    try:
        for rows in found.mappings().partitions():
            write.execute(insert, [{name: change(value) for name, value in row.items()} for row in rows])
    except sa.exc.DBAPIError as error:
        reason = str(error.orig).splitlines()[0]
        raise UserError(f"a row of {table.name} is not taken: {reason}; nothing was moved") from None
    before, after = _count(read, table), _count(write, table)
    if before != after:
        raise UserError(
            f"{table.name} has {after} rows instead of {before}; nothing was moved; is the store being used?"
        )
    return after


def _generic(kind: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    try:
        return kind.as_generic()
    except NotImplementedError:
        return kind


def _set_sequences(connection: sa.Connection, tables: list[sa.Table]) -> None:
    """Lets a database that counts by itself go on behind the highest number that was copied."""
    if connection.dialect.name != "postgresql":
        return
    for table in tables:
        for column in table.primary_key:
            name = connection.execute(
                sa.select(sa.func.pg_get_serial_sequence(f'"{table.name}"', column.name))
            ).scalar_one()
            if name is not None:
                highest = connection.execute(sa.select(sa.func.max(column))).scalar_one()
                if highest:
                    connection.execute(sa.select(sa.func.setval(name, highest)))


def _change(old_root: str | None, new_root: str | None) -> Callable[[Any], Any]:
    """What becomes of a value: addresses under the old root are under the new one, everything else stays."""
    if not old_root or not new_root:
        return lambda value: value
    old, new = old_root.rstrip("/"), new_root.rstrip("/")

    def changed(value: Any) -> Any:
        if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
            return new + value[len(old) :]
        return value

    return changed


def copy_artifacts(old_root: str, new_root: str, say: Callable[[str], None] = lambda _: None) -> int:
    """Copies all files under `old_root`, a local folder's address, and compares; returns how many there are.

    May be called again after a failure: files are written over by themselves. Raises UserError where they cannot be
    copied, or not all of them arrived.
    """
    parts = urlsplit(old_root)
    if parts.scheme not in ("", "file"):
        raise UserError(f"artifacts are copied from a local folder, and {old_root} is none; leave out --artifacts")
    folder = Path(unquote(parts.path))
    wanted = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if not wanted:
        return 0
    say(f"copying {len(wanted)} files of artifacts to {new_root}")
    try:
        repository = get_artifact_repository(new_root)
        repository.log_artifacts(str(folder))
        arrived = dict(_listed(repository))
    except ImportError as error:
        raise UserError(f"{new_root} needs the package {error.name}; pip install 'awpo[cluster]'") from None
    except Exception as error:  # noqa: BLE001 - each kind of store has its own errors
        raise UserError(f"cannot copy artifacts to {new_root}: {str(error).splitlines()[0]}") from None
    missing = [name for name, size in wanted.items() if arrived.get(name) != size]
    if missing:
        raise UserError(f"{len(missing)} of {len(wanted)} artifacts did not arrive in {new_root}, such as {missing[0]}")
    return len(wanted)


def _listed(repository: Any, path: str | None = None) -> Iterator[tuple[str, int]]:
    for item in repository.list_artifacts(path):
        if item.is_dir:
            yield from _listed(repository, item.path)
        else:
            yield item.path, int(item.file_size)
