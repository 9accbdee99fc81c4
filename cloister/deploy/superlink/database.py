"""The SuperLink's state in SQLite, with a longer wait for locks, return of freed pages to the disk, and a limit."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from logging import INFO, WARNING
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from fastapi import HTTPException
from sqlalchemy.exc import OperationalError

from cloister.flower import log
from cloister.flower.superlink import FLWR_IN_MEMORY_DB_NAME, sql_mixin

T = TypeVar("T")
BUSY_SECONDS = 30.0
"""Time that a transaction waits for others. Flower's own 5 s are too few for 50 nodes on a loaded machine."""
PAGE = 4096
INCREMENTAL = 2
"""SQLite's mode that returns freed pages to the disk on demand."""
AT_ONCE = 64 * 2**20 // PAGE
"""Pages returned in one step. Other transactions wait meanwhile."""
ABSENCE = 180.0
"""Seconds: Flower's 60 for a missing heartbeat, and the start of this server on a busy machine."""
INTERVAL = 60.0
"""Seconds between two checks of the size."""
NEARLY = 0.8
"""Share of the limit above which each check logs a warning."""
SPARE = 2**30
"""Free bytes of the disk below which each check logs a warning."""


def file_of(name: str) -> Path | None:
    """Return the file of a state database, if it has one.

    Args:
        name: of the database, as configured for Flower.
    """
    return None if name == FLWR_IN_MEMORY_DB_NAME or "://" in name else Path(name).resolve()


def set_up(max_bytes: int) -> None:
    """Set the waiting time and the limit of Flower's databases, and answer 503 while one is busy."""
    ours = {"busy_timeout": str(int(1000 * BUSY_SECONDS)), "max_page_count": str(max(max_bytes // PAGE, 1))}
    names = vars(sql_mixin)
    kept = tuple((name, value) for name, value in names["SQLITE_PRAGMAS"] if name not in ours)
    names["SQLITE_PRAGMAS"] = (*ours.items(), *kept)
    mixin: Any = sql_mixin.SqlMixin
    if not hasattr(mixin.session, "plain"):
        mixin.session = patient(mixin.session)


def patient(session: Callable[..., AbstractContextManager[T]]) -> Callable[..., AbstractContextManager[T]]:
    """Return Flower's `session`, which answers 503 for a locked database and 507 for a full one.

    After a 503 Flower's clients send the request again.
    """

    @contextmanager
    def asked_again(self: object) -> Iterator[T]:
        try:
            with session(self) as inner:
                yield inner
        except OperationalError as error:
            reason = str(error.orig)
            if "locked" in reason:
                log(WARNING, "the state database was locked for %g s: the client is asked to try again", BUSY_SECONDS)
                raise HTTPException(503, "the state database is busy: try again") from None
            if "full" in reason:
                log(WARNING, "the state database is at its limit, or its disk is full")
                raise HTTPException(507, "the state database is full") from None
            raise

    vars(asked_again)["plain"] = session
    return asked_again


def prepare(path: Path) -> None:
    """Compact a database that no SuperLink has open, and let it return freed pages on demand from now on."""
    with closing(sqlite3.connect(path)) as connection:
        before = path.stat().st_size
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if (freed := before - path.stat().st_size) > SPARE // 100:
        log(INFO, "the state database gave back %d MB", freed // 10**6)


def wait_for_tasks(path: Path) -> None:
    """Extend the deadline of each task that ran when the SuperLink ended, for the next heartbeat of its process.

    Args:
        path: of a database that no SuperLink has open.
    """
    until = (datetime.now(UTC) + timedelta(seconds=ABSENCE)).isoformat(sep=" ")
    running = "running_at IS NOT NULL AND finished_at IS NULL AND token IS NOT NULL"
    with closing(sqlite3.connect(path)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'task'").fetchone():
            connection.execute(f"UPDATE task SET active_until = ? WHERE {running}", (until,))


def give_back(path: Path) -> int:
    """Return freed pages of a database in use to the disk.

    Returns:
        Its size in bytes, with its log.
    """
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        # As a script: `execute` takes one step, which is one page.
        connection.executescript(f"PRAGMA incremental_vacuum({AT_ONCE})")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def look(path: Path, max_bytes: int) -> list[str]:
    """Return freed pages to the disk; return a warning for each scarce resource."""
    try:
        size = give_back(path)
    except sqlite3.OperationalError as error:
        return [f"the state database could not be compacted: {error}"]
    said = []
    if size > NEARLY * max_bytes:
        said.append(f"the state database has {size // 10**6} MB of the {max_bytes // 10**6} MB it may have")
    if (free := shutil.disk_usage(path).free) < SPARE:
        said.append(f"the disk of the state database has {free // 10**6} MB left")
    return said


def watch(path: Path, max_bytes: int, interval: float = INTERVAL) -> Event:
    """Check a database at intervals, in a thread that ends with the process or when the returned event is set."""
    ended = Event()

    def work() -> None:
        while not ended.wait(interval):
            for line in look(path, max_bytes):
                log(WARNING, "%s", line)

    Thread(target=work, name="state-database", daemon=True).start()
    return ended
