"""What a node was told of the server's ledger, kept beside its own: with it the site can tell lines that are gone.

A server chooses the names of runs, and so how many there are. `MAXIMUM` of them are kept, and the day that has the most
gives one up, the one that was told last. So messages of today, however many runs they name, push out neither what was
told on other days, nor what was told earlier today; and a head of an earlier day is replaced by nothing. Whoever takes
lines away later finds the head of the day on which they were written. A server that tells false heads on the day itself
needs no such trick, and anchors are for that (`docs/privacy.md`).
"""

import fcntl
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path

from cloister.client.request import TrainRequest
from cloister.core.files import atomic_path
from cloister.privacy.accounting.ledger import today

logger = logging.getLogger("cloister.client")
Heads = dict[str, dict[str, dict[str, str | int]]]
"""By day and run the last head that was told, and in which round."""
MAXIMUM = 1000
"""Heads in a file, of 150 bytes each: with one run a day, of nearly three years."""


def heads_beside(ledger: Path) -> Path:
    """The file of the heads that a node was told."""
    return ledger.with_suffix(".heads.json")


def keep_head(ledger: Path, request: TrainRequest) -> None:
    """Keep the head of the server's ledger: by day and run the last one, which no ledger has without all lines before.

    A file that cannot be read or written is left as it is, and the node goes on: what it replies must not depend on it.

    Args:
        ledger: of the node.
        request: of the server.
    """
    if not request.ledger_head:
        return
    path = heads_beside(ledger)
    try:
        with _locked(ledger):
            kept: Heads = json.loads(path.read_text()) if path.exists() else {}
            kept.setdefault(_day(), {})[request.run] = {"head": request.ledger_head, "round": request.round}
            _forget(kept)
            with atomic_path(path) as partial:
                partial.write_text(json.dumps(kept, indent=2) + "\n")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.log(WARNING, "the head of the server's ledger was not kept: %s", type(error).__name__)


def _day() -> str:
    """Today (UTC)."""
    return time.strftime("%Y-%m-%d", time.gmtime(today()))


def _forget(kept: Heads) -> None:
    """Take heads away until there are no more than `MAXIMUM`: of the fullest day, the oldest such, its last run."""
    while sum(map(len, kept.values())) > MAXIMUM:
        fullest = max(kept, key=lambda day: len(kept[day]))
        kept[fullest].popitem()
        if not kept[fullest]:
            del kept[fullest]


@contextmanager
def _locked(ledger: Path) -> Iterator[None]:
    """The block, in which no other process writes to the ledger or keeps a head: each writes all heads anew."""
    with ledger.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
