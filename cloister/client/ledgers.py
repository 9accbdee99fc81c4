"""Ledger of a node: its path, the name of its data, the server's heads beside it; the account of a node without one.

A server chooses the names of runs, and so their number. The file of heads contains at most `MAXIMUM` heads. Beyond
that, the day with the most heads drops the one that was received last. So days with fewer heads keep theirs, and the
fullest day keeps its earlier ones, for any number of runs in today's messages. No message overwrites a head of an
earlier day. A server that later deletes lines contradicts the head of the day on which they were written. A server
that sends false heads on the day itself needs no deletion, and anchors detect it (`docs/privacy.md`).
"""

import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from logging import WARNING
from pathlib import Path

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from cloister.client.node import NodeConfig
from cloister.client.request import TrainRequest
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Event, from_json, to_json
from cloister.privacy.accounting.filters import Filter, FilterKind
from cloister.privacy.accounting.ledger import Ledger, Opening, other_names, today, warning
from cloister.privacy.accounting.vocabulary import Relation, Unit
from cloister.tasks import TASKS
from cloister.utils.errors import PrivacyError
from cloister.utils.files import atomic_path, expanded
from cloister.utils.wire import ASSUMED, ASSUMED_ROUNDS, LEAKAGE, NOISED_LEAKAGE, config_of, number

logger = logging.getLogger("cloister.client")
WITHOUT_LEDGER = {"partition_id", "num_partitions", "public_size", "group", "min_radius", "model_dir", "device"}
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
    ledger = _ledger(_path(node, task))
    ledger.refresh()
    return ledger


def _path(node: NodeConfig, task: str) -> Path:
    TASKS.load(task)  # refuse unknown names: the server's name becomes part of a file name
    return node.ledger_folder / f"{identity_of(node, task)}.jsonl"


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


def warn_of_other_names(ledger: Ledger, node: NodeConfig, task: str) -> None:
    """Log and record, once in a process, other names of data at this place.

    Args:
        ledger: of the node.
        node, task: as in `identity_of`.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    _warned(ledger, place_of(node, task))


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


Heads = dict[str, dict[str, dict[str, str | int]]]
"""By day and run: the last received head, and its round."""
MAXIMUM = 1000
"""Maximum heads in a file, of 150 bytes each; enough for nearly three years of one run a day."""


def server_heads_path(ledger: Path) -> Path:
    """Return the path of the file of received heads."""
    return ledger.with_suffix(".heads.json")


def save_server_head(ledger: Path, request: TrainRequest) -> None:
    """Store the head of the server's ledger, by day and run.

    Only a ledger with all lines before it has this head. If the file cannot be read or written, it stays unchanged and
    the node continues: replies must not depend on it.

    Args:
        ledger: of the node.
        request: of the server.
    """
    if not request.ledger_head:
        return
    path, day = server_heads_path(ledger), time.strftime("%Y-%m-%d", time.gmtime(today()))
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


SPENT, RELEASES = "spent", "releases"
CHOICE = "choice"
"""Mechanism of a choice among hypotheses that is counted beside the noised model."""


class InMemoryLedger:
    """Counts of the events that a simulated client has released about each unit.

    Args:
        state: of the node, changed in place.
    """

    name = "this client"

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def catch_up(self, unit: Unit, events: Sequence[Event]) -> None:
        """Count, once per unit, earlier rounds that may have drawn this client.

        Args:
            unit: that the events are about.
            events: of one round: the update, then a choice among hypotheses.
        """
        assumed = config_of(self._state, ASSUMED)
        if not assumed or assumed.get(unit):
            return
        for place, event in enumerate(events):
            self._count(event, unit, int(number(assumed, ASSUMED_ROUNDS)), is_choice=place > 0)
        assumed[unit] = True

    def limit(self, run: str, unit: Unit, delta: float, epsilon: float, kind: FilterKind, relation: Relation) -> None:
        """Do nothing, since this state contains one run only.

        Args: as `Store.limit`.
        """

    def filter_of(self, unit: Unit) -> Filter | None:
        """Return None: no filter is recorded, and that of the run's budget applies."""
        return None

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """Return the requested relation.

        Args: as `Store.relation_of`.
        """
        return relation

    def account(self, unit: Unit, relation: Relation, insiders: bool) -> Account:
        """Return the account of all counted events about a unit.

        Args: as `Store.account`.
        """
        account, counts = Account((), relation, insiders), self._counts(unit)
        for event in counts:
            account = account.plus(from_json(json.loads(event)), int(number(counts, event)))
        return account

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """Return the cost of all releases about a unit under a filter.

        Args: as `Store.spent`.
        """
        return chosen.spent(self.account(unit, relation, insiders=True))

    def open_all(self, openings: Sequence[Opening], allow: Callable[[], None]) -> list[str]:
        """Count releases before they are made, unless `allow` raises.

        Args: as `Store.open_all`.
        """
        allow()
        for opening in openings:
            self._count(opening.event, opening.unit, is_choice=opening.mechanism == CHOICE)
        return [""] * len(openings)

    def done(self, *releases: str) -> None:
        """Do nothing, since a counted release stays counted."""

    def _counts(self, unit: Unit) -> ConfigRecord:
        name = f"{unit}-releases"
        if not isinstance(self._state.get(name), ConfigRecord):
            self._state[name] = ConfigRecord()
        return config_of(self._state, name)

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        # A round of DP-SGD repeats one release many times: a count keeps the state small.
        single, count = event.parts()
        count *= times
        name, counts = json.dumps(to_json(single), sort_keys=True), self._counts(unit)
        counts[name] = count + (int(number(counts, name)) if name in counts else 0)


class InMemoryLeakage(InMemoryLedger):
    """Leakage of a simulated client within its neighbourhood: in total, by noised models, and their number."""

    @property
    def _record(self) -> MetricRecord:
        record = self._state.metric_records.setdefault(LEAKAGE, MetricRecord({SPENT: 0.0, RELEASES: 0}))
        record.setdefault(NOISED_LEAKAGE, number(record, SPENT))  # state of a run that began without this number
        return record

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """Return the leakage of all releases; ∞ after a release without noise.

        Args: as `Store.spent`.
        """
        return number(self._record, SPENT)

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        record = self._record
        record[SPENT] = number(record, SPENT) + times * event.leakage
        if not is_choice:
            record[NOISED_LEAKAGE] = number(record, NOISED_LEAKAGE) + times * event.leakage
            record[RELEASES] = int(number(record, RELEASES)) + times
