"""The ledger: what was released, on disk before it was released.

One file of JSON lines per data identity and owner (a server, or a node). A line is never changed. Each carries the hash
of the line before it and its own, so that a change, a gap or a swap anywhere but at the end shows.

    budget  written when a run begins under another budget than the one before it: so a raised one shows; the first
            about a unit names the filter that keeps all of them
    open    written and synced before the noise is drawn: from here on the release counts as spent
    done    written after the release was handed on; a release that was opened and is not done counts all the same
    place   where the data lies, and new names of ledgers about data there (`cloister.privacy.accounting.identities`)

A crash may therefore count a release that never left, and can never miss one that did. A line that a crash tore is the
last one and has no newline; whatever it was about cannot have been released, because its sync never returned. Readers
pass over it and the next writer cuts it off.

Times are days: where the draw of a cohort is secret, the seconds between two lines would tell how large it was.
"""

import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, get_args
from uuid import uuid4

from cloister.core.errors import LedgerError, PrivacyError
from cloister.core.files import DAY, sync_folder
from cloister.privacy.accounting import filters
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Event, from_json, to_json
from cloister.privacy.accounting.filters import Filter, FilterKind
from cloister.privacy.accounting.vocabulary import Relation, Unit

VERSION = 3
GENESIS = "0" * 64
FIELDS = {
    "budget": {
        *("v", "seq", "time", "kind", "run", "unit", "delta", "epsilon", "relation", "filter"),
        *("previous", "hash"),
    },
    "open": {
        *("v", "seq", "time", "kind", "release", "run", "round", "unit", "mechanism", "clip", "event"),
        *("previous", "hash"),
    },
    "done": {"v", "seq", "time", "kind", "release", "previous", "hash"},
    "place": {"v", "seq", "time", "kind", "place", "others", "previous", "hash"},
}


@dataclass(frozen=True)
class Entry:
    """One release, as the ledger has it.

    Attributes:
        release: its id.
        run, round: where it belongs.
        unit: whose protection the event is about.
        mechanism: by which it was released, for whoever reads; what is composed is the event.
        clip: largest L2 norm of one unit's contribution, in force; 0 where there is none.
        event: what happened.
        time: the day it was opened, in seconds since 1970.
        done: whether it is known to have been handed on. It counts either way.
    """

    release: str
    run: str
    round: int
    unit: Unit
    mechanism: str
    clip: float
    event: Event
    time: float
    done: bool = False


@dataclass(frozen=True)
class Budget:
    """What may be spent from here on: ε at δ, over all releases about this unit; ε 0: no limit.

    Attributes:
        relation: which datasets are neighbours; all budgets about a unit are kept for the strictest that any had.
        filter: by which it is kept: the same for all budgets about a unit.
        time: the day it was set, in seconds since 1970.
    """

    run: str
    unit: Unit
    delta: float
    epsilon: float
    relation: Relation
    filter: Filter
    time: float


@dataclass(frozen=True)
class Place:
    """Where the data of a ledger lies, and other names under which data there has a ledger."""

    place: str
    others: tuple[str, ...]


class Ledger:
    """Append-only record of releases in one file, safe against crashes and against a second process.

    Args:
        path: of the file; it and its folder are made when the first line is written.

    Raises:
        LedgerError: the file is not an unbroken ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._budgets: list[Budget] = []
        self._places: list[Place] = []
        self._offset = 0
        self._count = 0
        self._last_hash = self._last_release = GENESIS
        self._accounts: dict[tuple[Unit, Relation, bool], Account] = {}
        self._spent: dict[tuple[Unit, Filter, Relation], float] = {}
        self._filters: dict[Unit, Filter] = {}
        self._released: set[Unit] = set()
        self._set_late: set[Unit] = set()
        self._name_is_on_disk = False
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written since this one looked.

        Raises:
            LedgerError: the file is not an unbroken ledger.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                self._catch_up(file)

    @property
    def name(self) -> str:
        """What to call it in a refusal: its path."""
        return str(self.path)

    @property
    def entries(self) -> list[Entry]:
        """Every release so far, in order."""
        return list(self._entries.values())

    @property
    def budgets(self) -> list[Budget]:
        """Every budget that was ever in force, in order."""
        return list(self._budgets)

    @property
    def places(self) -> set[str]:
        """Where its data lay, as far as that was noted."""
        return {place.place for place in self._places}

    @property
    def others(self) -> tuple[str, ...]:
        """Other names under which data at the same place has a ledger, in the order in which they were noted."""
        return tuple(dict.fromkeys(name for place in self._places for name in place.others))

    @property
    def head(self) -> str:
        """The hash of the last line: who notes it can later tell whether lines were cut off at the end."""
        return self._last_hash

    @property
    def release_head(self) -> str:
        """The hash of the last line about a release, which has a random id; that of an empty ledger before the first.

        A party that gets this hash, and knows all heads before it, can test no guess of a line: it lacks the id.
        """
        return self._last_release

    def heads(self) -> set[str]:
        """Every head that it had: the hash of each line, and that of a ledger without lines."""
        lines = self.path.read_bytes()[: self._offset].splitlines() if self.path.exists() else []
        return {GENESIS, *(json.loads(line)["hash"] for line in lines)}

    def account(self, unit: Unit, relation: Relation = "add-or-remove", insiders: bool = False) -> Account:
        """The composition of every release about a unit.

        Args:
            unit: of which.
            relation, insiders: as in `Account`.
        """
        key = (unit, relation, insiders)
        if key not in self._accounts:
            events = (entry.event for entry in self._entries.values() if entry.unit == unit)
            self._accounts[key] = Account(events, relation, insiders)
        return self._accounts[key]

    def filter_of(self, unit: Unit) -> Filter | None:
        """The filter that keeps the budgets about this unit, from the first of them on; None before."""
        return self._filters.get(unit)

    def has_released(self, unit: Unit) -> bool:
        """Whether there is a release about this unit."""
        return unit in self._released

    def was_set_beforehand(self, unit: Unit) -> bool:
        """Whether there is a budget about this unit, and none was set or changed after a release about it."""
        return unit in self._filters and unit not in self._set_late

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """What all releases about a unit cost under a filter: a running sum, a term more for each release.

        Args:
            unit: of which.
            chosen: the filter.
            relation: which datasets are neighbours.
        """
        key = (unit, chosen, relation)
        if key not in self._spent:
            events = (entry.event for entry in self._entries.values() if entry.unit == unit)
            self._spent[key] = sum(filters.cost(chosen, event, relation) for event in events)
        return self._spent[key]

    def leakage(self) -> float:
        """Σ ε·radius of all Laplace releases; ∞ if a release about the neighbourhood is none of those."""
        return self.account("neighbourhood").leakage()

    def open(
        self,
        event: Event,
        unit: Unit,
        run: str,
        server_round: int,
        allow: Callable[[], None],
        mechanism: str = "",
        clip: float = 0.0,
    ) -> str:
        """Record that a release is about to be made; it counts as spent when this returns.

        Args:
            event: what is about to happen.
            unit: whose protection it is about.
            run, server_round: where it belongs.
            allow: is called with the file locked against other processes and everything read that they wrote; raises
                `BudgetExhausted` to refuse.
            mechanism, clip: for whoever reads the ledger.

        Returns:
            The release's id, for `done`.

        Raises:
            BudgetExhausted: `allow` refused; nothing was written.
            LedgerError: the file is not an unbroken ledger, or the disk did not take the line.
        """
        release = uuid4().hex
        content = {"release": release, "run": run, "round": server_round, "unit": unit, "event": to_json(event)}
        content |= {"mechanism": mechanism, "clip": clip}
        with self._locked() as file:
            allow()
            self._append(file, "open", content)
        return release

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """What budgets about a unit are kept for.

        Args:
            unit: of which.
            relation: that a run asks for; `replace-one` counts in its place once any budget was about that.
        """
        strict = any(budget.unit == unit and budget.relation == "replace-one" for budget in self._budgets)
        return "replace-one" if strict else relation

    def limit(
        self,
        run: str,
        unit: Unit,
        delta: float,
        epsilon: float,
        kind: FilterKind = "gaussian",
        relation: Relation = "add-or-remove",
    ) -> None:
        """Record under which budget a run begins, if it is another than the last one about this unit.

        The first budget about a unit chooses the filter, of its own ε and δ alone, and later ones keep it: an order
        picked anew could depend on what was released. A larger budget gives the same filter a larger limit. All
        together is then within the larger one; that is a promise if raising it was no answer to what was released,
        and the line that says so stays.

        Args:
            run: that begins.
            unit, delta, epsilon: of the budget; ε 0: none.
            kind: of the filter, where there is none yet.
            relation: which datasets are neighbours.
        """
        with self._locked() as file:
            last = next((budget for budget in reversed(self._budgets) if budget.unit == unit), None)
            new = (delta, epsilon, relation)
            if (last.delta, last.epsilon, last.relation) != new if last else epsilon:
                chosen = last.filter if last else filters.filter_for(kind, epsilon, delta)
                content = {"run": run, "unit": unit, "delta": delta, "epsilon": epsilon, "relation": relation}
                self._append(file, "budget", content | {"filter": filters.to_json(chosen)})

    def note_place(self, place: str, others: Sequence[str]) -> None:
        """Record where the data lies, and under which other names data there has a ledger.

        Args:
            place: names it.
            others: that are not noted yet.
        """
        with self._locked() as file:
            self._append(file, "place", {"place": place, "others": list(others)})

    def done(self, release: str) -> None:
        """Record that an opened release was handed on."""
        with self._locked() as file:
            if release not in self._entries:
                raise LedgerError(f"{self.path}: release {release} was never opened")
            self._append(file, "done", {"release": release})

    def sync(self) -> None:
        """Wait until the disk has every line: whoever wrote the last one may have died before it did.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        if self.path.exists():
            with self._locked() as file:
                os.fsync(file.fileno())
                sync_folder(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, locked, with everything read that others wrote and a torn line cut off."""
        try:
            _make_folder(self.path.parent)
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._catch_up(file)
                file.truncate(self._offset)
                yield file
        except OSError as error:
            raise LedgerError(f"{self.path}: the ledger cannot be written: {error.strerror}") from error

    def _append(self, file: IO[bytes], kind: str, content: dict[str, Any]) -> None:
        """Write a line and wait until the disk has it."""
        line = {"v": VERSION, "seq": self._count, "time": today(), "kind": kind, **content}
        line["previous"] = self._last_hash
        line["hash"] = line_hash(line)
        # Read as it will be read: what could not be understood later is not written.
        item = self._item_of(line)
        data = (json.dumps(line, sort_keys=True) + "\n").encode()
        self._write(file, data)
        self._take(line, item)
        self._offset += len(data)

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Write bytes at the end that was read, and wait until the disk has them.

        Raises:
            LedgerError: the end has moved; nothing was written.
        """
        if os.fstat(file.fileno()).st_size != self._offset:
            raise LedgerError(
                f"{self.path}: somebody else wrote to it while it was locked: locks of this folder do not reach other "
                "machines; keep the ledger on a disk that one machine alone writes to"
            )
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        if not self._name_is_on_disk:
            # Whoever made the file may have died before its name was safe.
            sync_folder(self.path.parent)
            self._name_is_on_disk = True

    def _catch_up(self, file: IO[bytes]) -> None:
        """Read and check the lines that have been written since the last time."""
        if file.seek(0, os.SEEK_END) < self._offset:
            raise LedgerError(f"{self.path}: lines that were read from this file before are no longer in it")
        file.seek(self._offset)
        for data in file:
            # Torn by a crash while it was written: nothing was released on the strength of it.
            if not data.endswith(b"\n"):
                break
            line = self._checked(data)
            self._take(line, self._item_of(line))
            self._offset += len(data)

    @property
    def _where(self) -> str:
        """The next line, for errors."""
        return f"{self.path}, line {self._count + 1}"

    def _checked(self, data: bytes) -> dict[str, Any]:
        """A line that is whole and follows from the one before it."""
        where = self._where
        try:
            line = json.loads(data)
        except ValueError:
            raise LedgerError(f"{where}: not JSON") from None
        if not isinstance(line, dict) or line.get("v") != VERSION:
            raise LedgerError(f"{where}: not a line of a ledger of version {VERSION}{_what_to_do(line)}")
        if str(line.get("kind")) not in FIELDS or set(line) != FIELDS[line["kind"]]:
            raise LedgerError(f"{where}: unknown kind or fields")
        if line["hash"] != line_hash(line):
            raise LedgerError(f"{where}: the line was changed: its hash does not fit it")
        if line["previous"] != self._last_hash or line["seq"] != self._count:
            raise LedgerError(f"{where}: the chain is broken: lines before it were changed, removed or swapped")
        return line

    def _item_of(self, line: dict[str, Any]) -> Entry | Budget | Place:
        """The budget, the release or the place that a line is about. What is not understood is refused, not skipped."""
        if "unit" in line and line["unit"] not in get_args(Unit):
            raise LedgerError(f"{self._where}: unknown unit {line['unit']!r}; known: {', '.join(get_args(Unit))}")
        if line["kind"] == "place":
            if not isinstance(line["others"], list):
                raise LedgerError(f"{self._where}: others must be names, found {type(line['others']).__name__}")
            return Place(str(line["place"]), tuple(map(str, line["others"])))
        if line["kind"] == "budget":
            return self._budget_of(line)
        return self._entry_of(line)

    def _budget_of(self, line: dict[str, Any]) -> Budget:
        """A budget, kept by the filter of those before it."""
        try:
            chosen = filters.from_json(line["filter"])
        except PrivacyError as error:
            raise LedgerError(f"{self._where}: {error}") from None
        if chosen != self._filters.get(line["unit"], chosen):
            raise LedgerError(
                f"{self._where}: the filter of unit {line['unit']!r} is another than that of its first budget"
            )
        if line["relation"] not in get_args(Relation):
            raise LedgerError(f"{self._where}: unknown relation {line['relation']!r}")
        names = ("run", "unit", "delta", "epsilon", "relation", "time")
        return Budget(filter=chosen, **{name: line[name] for name in names})

    def _entry_of(self, line: dict[str, Any]) -> Entry:
        """A release as it is after a line about it."""
        where, release = self._where, line["release"]
        known = self._entries.get(release) if isinstance(release, str) else None
        if line["kind"] == "done":
            if known is None:
                raise LedgerError(f"{where}: release {release!r} was never opened")
            return replace(known, done=True)
        if known is not None or not isinstance(release, str):
            raise LedgerError(f"{where}: {release!r} is no id of a new release")
        try:
            event = from_json(line["event"])
        except PrivacyError as error:
            raise LedgerError(f"{where}: {error}") from None
        return Entry(
            event=event,
            **{name: line[name] for name in ("release", "run", "round", "unit", "mechanism", "clip", "time")},
        )

    def _take(self, line: dict[str, Any], item: Entry | Budget | Place) -> None:
        """Add a checked line to what is known."""
        if isinstance(item, Place):
            self._places.append(item)
        elif isinstance(item, Budget):
            self._budgets.append(item)
            self._filters.setdefault(item.unit, item.filter)
            self._set_late |= self._released & {item.unit}
        else:
            self._entries[item.release] = item
        if line["kind"] == "open" and isinstance(item, Entry):
            self._released.add(item.unit)
            for key, account in self._accounts.items():
                if key[0] == item.unit:
                    self._accounts[key] = account.plus(item.event)
            for unit, chosen, relation in self._spent:
                if unit == item.unit:
                    self._spent[unit, chosen, relation] += filters.cost(chosen, item.event, relation)
        self._count += 1
        self._last_hash = line["hash"]
        if "release" in line:
            self._last_release = self._last_hash


class DraftLedger(Ledger):
    """A ledger in memory: it goes on from the lines of a file, and what is entered in it is written nowhere.

    Args:
        path: of a ledger; there may be none yet.

    Raises:
        LedgerError: the file is not an unbroken ledger.
    """

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """No file: nothing is read again, either, so that what was drafted stays the end of the ledger."""
        yield io.BytesIO()

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Write nothing."""


def today() -> float:
    """The beginning of this day (UTC), in seconds since 1970."""
    return float(time.time() // DAY * DAY)


def _what_to_do(line: object) -> str:
    """How to go on from a ledger of an older version."""
    version = line.get("v") if isinstance(line, dict) else None
    if type(version) is not int or not 0 < version < VERSION:
        return ""
    return (
        f": it is of version {version}, whose budgets were kept by another rule. Move the file away to begin a new "
        "ledger, and lower the budget by what the old one has spent"
    )


def line_hash(line: dict[str, Any]) -> str:
    """SHA-256 of a line without its own hash, in canonical JSON."""
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, the name of each on disk before anything is put into it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)
