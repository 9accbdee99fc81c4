"""New databases of a SuperLink, copied: Flower takes each through all versions of its tables, which takes long."""

import sqlite3
from pathlib import Path

from flwr.supercore import sql_mixin

MIGRATE = sql_mixin.run_migrations
NEW = {}
"""The bytes of a new database, by the pragmas that were in force: some are written into the file."""
OF_A_CONNECTION = ("busy_timeout", "max_page_count")
"""Pragmas that are not."""


class Copies:
    """Stands in for Flower's migrations of a test."""

    def __init__(self):
        self.paths = set()

    def __call__(self, engine):
        """Give a database its tables: a new one those of the first new one, any other as Flower does.

        A copy has them already.
        """
        path = Path(engine.url.database)
        if path in self.paths and path.exists():
            return
        new = not path.exists()
        pragmas = tuple(each for each in sql_mixin.SQLITE_PRAGMAS if each[0] not in OF_A_CONNECTION)
        if new and pragmas in NEW:
            path.write_bytes(NEW[pragmas])
            self.paths.add(path)
            return
        MIGRATE(engine)
        if new:
            NEW[pragmas] = content(engine, path)


def content(engine, path):
    """The bytes of a database, with what waits beside its file."""
    engine.dispose()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.read_bytes()
