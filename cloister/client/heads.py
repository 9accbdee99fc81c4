"""Heads of the server's ledger that a node received, stored beside its own ledger to detect deleted lines.

A server chooses the names of runs, and so their number. The file contains at most `MAXIMUM` heads. Beyond that, the day
with the most heads drops the one that was received last. So days with fewer heads keep theirs, and the fullest day
keeps its earlier ones, for any number of runs in today's messages. No message overwrites a head of an earlier day. A
server that later deletes lines contradicts the head of the day on which they were written. A server that sends false
heads on the day itself needs no deletion, and anchors detect it (`docs/privacy.md`).
"""

import fcntl
import json
import logging
import time
from logging import WARNING
from pathlib import Path

from cloister.client.request import TrainRequest
from cloister.core.files import atomic_path
from cloister.privacy.accounting.ledger import today

logger = logging.getLogger("cloister.client")
Heads = dict[str, dict[str, dict[str, str | int]]]
"""By day and run: the last received head, and its round."""
MAXIMUM = 1000
"""Maximum heads in a file, of 150 bytes each; enough for nearly three years of one run a day."""


def heads_beside(ledger: Path) -> Path:
    """Return the path of the file of received heads."""
    return ledger.with_suffix(".heads.json")


def keep_head(ledger: Path, request: TrainRequest) -> None:
    """Store the head of the server's ledger, by day and run.

    Only a ledger with all lines before it has this head. If the file cannot be read or written, it stays unchanged and
    the node continues: replies must not depend on it.

    Args:
        ledger: of the node.
        request: of the server.
    """
    if not request.ledger_head:
        return
    path, day = heads_beside(ledger), time.strftime("%Y-%m-%d", time.gmtime(today()))
    try:
        with ledger.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # each process rewrites all heads
            kept: Heads = json.loads(path.read_text()) if path.exists() else {}
            kept.setdefault(day, {})[request.run] = {"head": request.ledger_head, "round": request.round}
            while sum(map(len, kept.values())) > MAXIMUM:
                fullest = max(kept, key=lambda day: len(kept[day]))
                kept[fullest].popitem()
                if not kept[fullest]:
                    del kept[fullest]
            with atomic_path(path) as partial:
                partial.write_text(json.dumps(kept, indent=2) + "\n")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.log(WARNING, "the head of the server's ledger was not kept: %s", type(error).__name__)
