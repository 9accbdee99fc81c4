"""Ledger of a node: its path, and the name of its data."""

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
"""Settings of a node that may keep no ledger. With any other setting, the node keeps one on disk."""


def keeps_ledger(node: NodeConfig) -> bool:
    """Return whether the node has its own data, or a setting about a ledger."""
    return bool(node.model_fields_set - WITHOUT_LEDGER)


def ledger_of(node: NodeConfig, task: str) -> Ledger:
    """Return the ledger of the node, refreshed from disk.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.

    Raises:
        LedgerError: the ledger is damaged.
    """
    TASKS.load(task)  # refuse unknown names: the server's name becomes part of a file name
    ledger = _ledger(node.ledger_folder / f"{identity_of(node, task)}.jsonl")
    ledger.refresh()
    return ledger


@lru_cache(maxsize=4096)
def _ledger(path: Path) -> Ledger:
    """Return the cached ledger of a file.

    So each message verifies only new lines.
    """
    return Ledger(path)


def identity_of(node: NodeConfig, task: str) -> str:
    """Return the configured name of the node's data, or `place_of`.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.
    """
    return node.data_identity or place_of(node, task)


def place_of(node: NodeConfig, task: str) -> str:
    """Return the default name of the node's data, a digest of its place.

    Args: as `identity_of`.
    """
    # Different spellings of a path, and different task names, refer to the same data.
    if node.data_path:
        return _digested("data", str(expanded(node.data_path).resolve()))
    return _digested(task, f"{task} {'' if node.partition_id is None else node.partition_id}")


def warn_of_other_names(node: NodeConfig, task: str) -> None:
    """Log and record, once in a process, other names of data at this place.

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
    """Replace the ledger's folder in error messages that leave the site."""
    try:
        yield
    except PrivacyError as error:
        # The cause is for the node's own log and keeps its paths.
        raise type(error)(str(error).replace(str(node.ledger_folder), "ledger-dir")) from error.__cause__
