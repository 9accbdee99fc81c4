"""A node's own ledger: where it lies, what data it is about, and the limits that the node sets itself."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from flwr.app import UserConfig

from cloister.client.data import DATA_PATH, LEDGER_FOLDER, ledger_folder
from cloister.client.policy import POLICY, budgets_of
from cloister.core import check
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.ledger import Ledger
from cloister.tasks import TASKS

IDENTITY = "data-identity"
BUDGET = "max-epsilon"
EXAMPLE_BUDGET = "max-example-epsilon"
MAX_LEAKAGE = "max-leakage"
DELTA = "target-delta"
KEYS = {DATA_PATH, LEDGER_FOLDER, BUDGET, EXAMPLE_BUDGET, MAX_LEAKAGE, DELTA, IDENTITY, POLICY}
"""A node whose configuration says any of these keeps a ledger on disk."""


def keeps_ledger(node: UserConfig) -> bool:
    """Whether the node has data of its own, or its configuration says anything about a ledger."""
    return bool(KEYS & set(node))


def ledger_of(node: UserConfig, task: str) -> Ledger:
    """The ledger of the node with this node configuration, with all that other processes have written to it.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.

    Raises:
        ConfigError: `data-identity` is no name for a file.
        LedgerError: the ledger is broken.
    """
    TASKS.load(task)  # the name comes from the server, and is to name a file here
    ledger = _ledger(ledger_folder(node) / f"{identity_of(node, task)}.jsonl")
    ledger.refresh()
    return ledger


@lru_cache(maxsize=4096)
def _ledger(path: Path) -> Ledger:
    """One for each file: it reads on from where it was, and need not check the whole chain for every message."""
    return Ledger(path)


def identity_of(node: UserConfig, task: str) -> str:
    """The name of the node's data: as given, or a digest of where it lies, or of the part of a task that it is.

    Args:
        node: the node's configuration.
        task: the name of the learning problem.
    """
    if IDENTITY in node:
        if not re.fullmatch(r"[\w.-]+", str(node[IDENTITY])):
            raise ConfigError(f"{IDENTITY} in the node configuration must be letters, digits, '.', '_' and '-'")
        return str(node[IDENTITY])
    # However a path is written, and whatever a server calls the task, it is the same data.
    if DATA_PATH in node:
        path = Path(str(node[DATA_PATH])).expanduser().resolve()
        return f"data-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    place = f"{task} {node.get('partition-id', '')}"
    return f"{task}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def limits_of(node: UserConfig) -> dict[str, float]:
    """The node's δ and its budgets, the stricter of what its configuration and its policy say; a budget of 0 is none.

    Raises:
        ConfigError: one is no number in its range.
        PolicyError: the policy cannot be read.
    """
    numbers = {
        BUDGET: node.get(BUDGET, 0.0),
        EXAMPLE_BUDGET: node.get(EXAMPLE_BUDGET, 0.0),
        DELTA: node.get(DELTA, 1e-5),
    }
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} = {value!r} in the node configuration must be a number")
    check.positive(**{f"{DELTA} in the node configuration": float(numbers[DELTA])})
    check.non_negative(**{f"{key} in the node configuration": float(numbers[key]) for key in (BUDGET, EXAMPLE_BUDGET)})
    budget, example_budget, delta = budgets_of(node, *(float(value) for value in numbers.values()))
    return {BUDGET: budget, EXAMPLE_BUDGET: example_budget, DELTA: delta}


@contextmanager
def folder_unnamed(node: UserConfig) -> Iterator[None]:
    """The block, whose errors may leave: how a site names its folders is its own business."""
    try:
        yield
    except PrivacyError as error:
        raise type(error)(str(error).replace(str(ledger_folder(node)), LEDGER_FOLDER)) from None
