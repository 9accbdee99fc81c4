"""The SuperLink's state: a SQLite database that waits when it is busy, gives back what it frees, and has a limit."""

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
"""For which a transaction waits for others; Flower's own 5 s were too few for 50 nodes on a loaded machine."""
PAGE = 4096
INCREMENTAL = 2
"""SQLite's mode in which freed pages are given back on demand."""
AT_ONCE = 64 * 2**20 // PAGE
"""Pages given back in one go: others wait meanwhile."""
ABSENCE = 180.0
"""Seconds: the 60 that Flower waits for a heartbeat, and those that a busy machine takes to start this server."""
INTERVAL = 60.0
"""Seconds between two looks at the size."""
NEARLY = 0.8
"""Of the limit, from which on every look says so."""
SPARE = 2**30
"""Bytes of the disk below which every look says so."""


def file_of(name: str) -> Path | None:
    """Return the file of a state database, if it has one.

    Args:
        name: of the database, as Flower is told it.
    """
    return None if name == FLWR_IN_MEMORY_DB_NAME or "://" in name else Path(name).resolve()


def set_up(max_bytes: int) -> None:
    """Have Flower open its databases with our waiting time and limit, and call a busy one a passing trouble."""
    ours = {"busy_timeout": str(int(1000 * BUSY_SECONDS)), "max_page_count": str(max(max_bytes // PAGE, 1))}
    names = vars(sql_mixin)
    kept = tuple((name, value) for name, value in names["SQLITE_PRAGMAS"] if name not in ours)
    names["SQLITE_PRAGMAS"] = (*ours.items(), *kept)
    mixin: Any = sql_mixin.SqlMixin
    if not hasattr(mixin.session, "plain"):
        mixin.session = patient(mixin.session)


def patient(session: Callable[..., AbstractContextManager[T]]) -> Callable[..., AbstractContextManager[T]]:
    """Return Flower's `session`, with 503 in place of the error of a locked database.

    Flower's clients then ask again.
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
    """Compact a database that no SuperLink has open, and have it give back what it frees from now on."""
    with closing(sqlite3.connect(path)) as connection:
        before = path.stat().st_size
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if (freed := before - path.stat().st_size) > SPARE // 100:
        log(INFO, "the state database gave back %d MB", freed // 10**6)


def wait_for_tasks(path: Path) -> None:
    """Give each process that worked at a task when the SuperLink ended new time to be heard.

    Args:
        path: of a database that no SuperLink has open.
    """
    until = (datetime.now(UTC) + timedelta(seconds=ABSENCE)).isoformat(sep=" ")
    running = "running_at IS NOT NULL AND finished_at IS NULL AND token IS NOT NULL"
    with closing(sqlite3.connect(path)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'task'").fetchone():
            connection.execute(f"UPDATE task SET active_until = ? WHERE {running}", (until,))


def give_back(path: Path) -> int:
    """Give freed pages of a database in use back to the disk.

    Returns:
        Its size in bytes, with its log.
    """
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        # As a script: `execute` takes one step, which is one page.
        connection.executescript(f"PRAGMA incremental_vacuum({AT_ONCE})")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def look(path: Path, max_bytes: int) -> list[str]:
    """Give back what is free; say what is scarce."""
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
    """Look at a database now and then, in a thread that ends with the process or once the event is set."""
    ended = Event()

    def work() -> None:
        while not ended.wait(interval):
            for line in look(path, max_bytes):
                log(WARNING, "%s", line)

    Thread(target=work, name="state-database", daemon=True).start()
    return ended
