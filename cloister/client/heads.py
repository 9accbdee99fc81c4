"""What a node was told of the server's ledger, kept beside its own: with it the site can tell lines that are gone."""

import json
import logging
from logging import WARNING
from pathlib import Path

from cloister.client.request import TrainRequest
from cloister.core.files import atomic_path
from cloister.privacy.accounting.ledger import today

logger = logging.getLogger("cloister.client")


def heads_beside(ledger: Path) -> Path:
    """The file of the heads that a node was told."""
    return ledger.with_suffix(".heads.json")


def keep_head(ledger: Path, request: TrainRequest) -> None:
    """Keep the head of the server's ledger: by run the last one, which no ledger has without all lines before it.

    A file that cannot be read or written is left as it is, and the node goes on: what it replies must not depend on it.

    Args:
        ledger: of the node.
        request: of the server.
    """
    if not request.ledger_head:
        return
    path = heads_beside(ledger)
    try:
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept |= {request.run: {"head": request.ledger_head, "round": request.round, "day": today()}}
        with atomic_path(path) as partial:
            partial.write_text(json.dumps(kept, indent=2) + "\n")
    except (OSError, ValueError, TypeError) as error:
        logger.log(WARNING, "the head of the server's ledger was not kept: %s", type(error).__name__)
