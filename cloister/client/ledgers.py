"""A node's own ledger: where it lies, and what data it is about."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging import WARNING
from pathlib import Path

from cloister.client.node import NodeConfig
from cloister.core.errors import PrivacyError
from cloister.core.files import expanded
from cloister.privacy.accounting.identities import other_names, warning
from cloister.privacy.accounting.ledger import Ledger
from cloister.tasks import TASKS

logger = logging.getLogger("cloister.client")
WITHOUT_LEDGER = {"partition_id", "num_partitions", "public_size", "group", "min_radius", "model_dir"}
"""All that the configuration of a node without a ledger may say; whatever else it says, the node keeps one on disk."""


def keeps_ledger(node: NodeConfig) -> bool:
    """Whether the node has data of its own, or its configuration says anything about a ledger."""
    return bool(node.model_fields_set - WITHOUT_LEDGER)


def ledger_of(node: NodeConfig, task: str) -> Ledger:
    """The ledger of the node with this node configuration, with all that other processes have written to it.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.

    Raises:
        LedgerError: the ledger is broken.
    """
    TASKS.load(task)  # the name comes from the server, and is to name a file here
    ledger = _ledger(node.ledger_folder / f"{identity_of(node, task)}.jsonl")
    ledger.refresh()
    return ledger


@lru_cache(maxsize=4096)
def _ledger(path: Path) -> Ledger:
    """One for each file: it reads on from where it was, and need not check the whole chain for every message."""
    return Ledger(path)


def identity_of(node: NodeConfig, task: str) -> str:
    """The name of the node's data: as given, or a digest of where it lies, or of the part of a task that it is.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.
    """
    return node.data_identity or place_of(node, task)


def place_of(node: NodeConfig, task: str) -> str:
    """Return a digest of where the node's data lies: the name of data that was given none.

    Args: as `identity_of`.
    """
    # However a path is written, and whatever a server calls the task, it is the same data.
    if node.data_path:
        return _digested("data", str(expanded(node.data_path).resolve()))
    return _digested(task, f"{task} {'' if node.partition_id is None else node.partition_id}")


def warn_of_other_names(node: NodeConfig, task: str) -> None:
    """Log, once in this process, under which other names data at this place was counted, and note it in the ledgers.

    Args: as `identity_of`.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    _warned(ledger_of(node, task), place_of(node, task))


@lru_cache(maxsize=4096)
def _warned(ledger: Ledger, place: str) -> None:
    if others := other_names(ledger, place):
        logger.log(WARNING, "%s", warning(ledger.path.stem, others, "data-identity"))


def _digested(kind: str, place: str) -> str:
    return f"{kind}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


@contextmanager
def folder_unnamed(node: NodeConfig) -> Iterator[None]:
    """The block, whose errors may leave: how a site names its folders is its own business."""
    try:
        yield
    except PrivacyError as error:
        # The cause is for the node's own log, and keeps its paths.
        raise type(error)(str(error).replace(str(node.ledger_folder), "ledger-dir")) from error.__cause__
