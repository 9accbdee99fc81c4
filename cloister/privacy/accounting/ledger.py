"""Ledger of releases, which are written to disk before they are made.

One file of JSON lines per data identity and owner (a server, or a node). Lines are only appended. Each contains its own
hash and that of the preceding line. So a change, a gap or a swap is detectable, except at the end.

    budget  written when a run begins under another budget than the last run, so that an increase is visible; the first
            about a unit contains the filter that keeps all of them
    open    written and synced before the noise is drawn: from then on the release is charged
    done    written after the release was handed on; an opened release without this line is charged too
    place   location of the data, and new names of its ledgers (`other_names`)

After a crash, a release may be charged that was never made, but every release that was made is charged. A line that a
crash tore is the last one and has no newline. Its release cannot have been made, because its sync never returned.
Readers ignore such a line, and the next writer removes it.

The releases of a message have one write and one sync for all `open` lines, and one for all `done` lines. `open_all` and
`done` return after the sync, and change the state in memory after it. So a caller that opens before it draws noise lets
no release out whose charge is not on disk. A head that it reads after `done`, without a refresh, is the hash of a line
on disk. After a crash within such a write, its complete lines are charged, and the torn one is removed.

Times are days: if the draw of a cohort is secret, the seconds between two lines would reveal its size.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import IO, get_args
from uuid import uuid4

from cloister.privacy.accounting import filters
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Event, from_json, to_json
from cloister.privacy.accounting.filters import Filter, FilterKind
from cloister.privacy.accounting.vocabulary import Relation, Unit
from cloister.utils.errors import LedgerError, PrivacyError
from cloister.utils.files import DAY, JsonTable, sync_folder

logger = logging.getLogger("cloister.ledger")
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
    """Release, as stored in the ledger.

    Attributes:
        release: its id.
        run, round: of the release.
        unit: of privacy of the event.
        mechanism: name of the mechanism, for readers; composition uses the event.
        clip: largest L2 norm of one unit's contribution, in force; 0: no bound.
        event: of the release.
        time: the day it was opened, in seconds since 1970.
        done: whether it was recorded as handed on. It is charged either way.
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
class Opening:
    """Release that is about to be made; attributes as in `Entry`."""

    event: Event
    unit: Unit
    run: str
    round: int
    mechanism: str = ""
    clip: float = 0.0


@dataclass(frozen=True)
class Budget:
    """Budget that begins with this line: ε at δ, over all releases about this unit; ε 0: no limit.

    Attributes:
        relation: neighbouring relation of datasets; all budgets about a unit are kept for the strictest one so far.
        filter: that keeps it: the same for all budgets about a unit.
        time: the day of the record, in seconds since 1970.
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
    """Location of a ledger's data, and further names under which data there has a ledger."""

    place: str
    others: tuple[str, ...]


class Ledger:
    """Append-only record of releases in one file, safe against crashes and against a second process.

    Args:
        path: of the file; it and its folder are created with the first line.

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
        self._last_hash = GENESIS
        self._accounts: dict[tuple[Unit, Relation, bool], Account] = {}
        self._spent: dict[tuple[Unit, Filter, Relation], float] = {}
        self._filters: dict[Unit, Filter] = {}
        self._released: set[Unit] = set()
        self._set_late: set[Unit] = set()
        self._name_is_on_disk = False
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that other processes have appended.

        Raises:
            LedgerError: the file is not an unbroken ledger.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                self._catch_up(file)

    @property
    def name(self) -> str:
        """Return the name in refusals: its path."""
        return str(self.path)

    @property
    def entries(self) -> list[Entry]:
        """Return every release so far, in order."""
        return list(self._entries.values())

    @property
    def budgets(self) -> list[Budget]:
        """Return every budget so far, in order."""
        return list(self._budgets)

    @property
    def places(self) -> set[str]:
        """Return the recorded locations of its data."""
        return {place.place for place in self._places}

    @property
    def others(self) -> tuple[str, ...]:
        """Return further names of data at the same place, in the order of record."""
        return tuple(dict.fromkeys(name for place in self._places for name in place.others))

    @property
    def head(self) -> str:
        """Return the hash of the last line; a copy of it can reveal a cut later."""
        return self._last_hash

    def heads(self) -> set[str]:
        """Return every head so far: each line's hash, and that of an empty ledger."""
        lines = self.path.read_bytes()[: self._offset].splitlines() if self.path.exists() else []
        return {GENESIS, *(json.loads(line)["hash"] for line in lines)}

    def account(self, unit: Unit, relation: Relation = "add-or-remove", insiders: bool = False) -> Account:
        """Return the composition of every release about a unit.

        Args:
            unit: of privacy.
            relation, insiders: as in `Account`.
        """
        key = (unit, relation, insiders)
        if key not in self._accounts:
            events = (entry.event for entry in self._entries.values() if entry.unit == unit)
            self._accounts[key] = Account(events, relation, insiders)
        return self._accounts[key]

    def filter_of(self, unit: Unit) -> Filter | None:
        """Return the filter of the unit's budgets; None without a budget."""
        return self._filters.get(unit)

    def has_released(self, unit: Unit) -> bool:
        """Return whether there is a release about this unit."""
        return unit in self._released

    def was_set_beforehand(self, unit: Unit) -> bool:
        """Return whether the unit's budgets precede all releases about it.

        It is False without a budget.
        """
        return unit in self._filters and unit not in self._set_late

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """Return the cost of all releases about a unit under a filter, from a running sum.

        Args:
            unit: of privacy.
            chosen: the filter.
            relation: neighbouring relation of datasets.
        """
        key = (unit, chosen, relation)
        if key not in self._spent:
            events = (entry.event for entry in self._entries.values() if entry.unit == unit)
            self._spent[key] = sum(filters.cost(chosen, event, relation) for event in events)
        return self._spent[key]

    def leakage(self) -> float:
        """Return the leakage of all releases about the neighbourhood; or ∞."""
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
        """Record one release; see `open_all`.

        Args:
            event, unit, run, server_round, mechanism, clip: as in `Opening`.
            allow: as in `open_all`.
        """
        (release,) = self.open_all([Opening(event, unit, run, server_round, mechanism, clip)], allow)
        return release

    def open_all(self, openings: Sequence[Opening], allow: Callable[[], None]) -> list[str]:
        """Record releases that are about to be made; all are on disk and charged when this method returns.

        Args:
            openings: the releases.
            allow: is called with the file locked against other processes and all of their lines read; raises
                `BudgetExhausted` to refuse.

        Returns:
            An id of each release, for `done`.

        Raises:
            BudgetExhausted: `allow` refused; nothing is written.
            LedgerError: the file is not an unbroken ledger, or the lines cannot be written.
        """
        releases = [uuid4().hex for _ in openings]
        lines = [
            {**vars(opening), "release": release, "event": to_json(opening.event)}
            for release, opening in zip(releases, openings, strict=True)
        ]
        with self._locked() as file:
            allow()
            self._append(file, "open", *lines)
        return releases

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """Return the relation for which budgets about a unit are kept.

        Args:
            unit: of privacy.
            relation: of the run. After any budget under `replace-one` the result is `replace-one`.
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
        """Record the budget of a run, if it differs from the unit's last one.

        The first budget about a unit determines the filter, from its own ε and δ alone. Later budgets keep it, since a
        new order could depend on releases. A larger budget gives the same filter a larger limit, which covers all
        releases together. That is a guarantee if the increase did not depend on releases. Its line in the ledger is
        permanent.

        Args:
            run: that begins.
            unit, delta, epsilon: of the budget; ε 0: no budget.
            kind: of the filter, if the unit has none yet.
            relation: neighbouring relation of datasets.
        """
        with self._locked() as file:
            last = next((budget for budget in reversed(self._budgets) if budget.unit == unit), None)
            new = (delta, epsilon, relation)
            if (last.delta, last.epsilon, last.relation) != new if last else epsilon:
                chosen = last.filter if last else filters.filter_for(kind, epsilon, delta)
                content = {"run": run, "unit": unit, "delta": delta, "epsilon": epsilon, "relation": relation}
                self._append(file, "budget", content | {"filter": filters.to_json(chosen)})

    def note_place(self, place: str, others: Sequence[str]) -> None:
        """Record the location of the data, and its further names.

        Args:
            place: identifier of the location.
            others: names that are not recorded yet.
        """
        with self._locked() as file:
            self._append(file, "place", {"place": place, "others": list(others)})

    def done(self, *releases: str) -> None:
        """Record that opened releases were handed on; it is on disk when this method returns.

        Raises:
            LedgerError: one was never opened, or the lines cannot be written.
        """
        with self._locked() as file:
            if unknown := set(releases) - self._entries.keys():
                raise LedgerError(f"{self.path}: release {min(unknown)} was never opened")
            self._append(file, "done", *({"release": release} for release in releases))

    def sync(self) -> None:
        """Wait until the disk has every line, for instance of a crashed process.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        if self.path.exists():
            with self._locked() as file:
                os.fsync(file.fileno())
                sync_folder(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Yield the locked file, up to date and without a torn line."""
        try:
            _make_folder(self.path.parent)
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._catch_up(file)
                file.truncate(self._offset)
                yield file
        except OSError as error:
            raise LedgerError(f"{self.path}: the ledger cannot be written: {error.strerror}") from error

    def _append(self, file: IO[bytes], kind: str, *contents: Mapping[str, object]) -> None:
        """Write lines of one kind and wait until the disk has all of them."""
        made: list[tuple[JsonTable, Entry | Budget | Place]] = []
        data, previous = b"", self._last_hash
        for number, content in enumerate(contents, start=self._count):
            line: JsonTable = {"v": VERSION, "seq": number, "time": today(), "kind": kind, **content}
            line["previous"] = previous
            line["hash"] = previous = line_hash(line)
            # Parse each line first: a line that readers would refuse is not written.
            made.append((line, self._item_of(line)))
            data += (json.dumps(line, sort_keys=True) + "\n").encode()
        self._write(file, data)
        for line, item in made:
            self._take(line, item)
        self._offset += len(data)

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Write bytes at the end of the read lines, and wait until the disk has them.

        Raises:
            LedgerError: the end of the file has moved; nothing is written.
        """
        if os.fstat(file.fileno()).st_size != self._offset:
            raise LedgerError(
                f"{self.path}: another process wrote to it while it was locked: locks of this folder do not reach "
                "other machines; keep the ledger on a disk that one machine alone writes to"
            )
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        if not self._name_is_on_disk:
            # The process that created the file may have crashed before its name was on disk.
            sync_folder(self.path.parent)
            self._name_is_on_disk = True

    def _catch_up(self, file: IO[bytes]) -> None:
        """Read and verify the lines appended since the last call."""
        if file.seek(0, os.SEEK_END) < self._offset:
            raise LedgerError(f"{self.path}: lines that were read from this file before are no longer in it")
        file.seek(self._offset)
        for data in file:
            # Torn by a crash while it was written: its release was not made.
            if not data.endswith(b"\n"):
                break
            line = self._checked(data)
            self._take(line, self._item_of(line))
            self._offset += len(data)

    @property
    def _where(self) -> str:
        """Return the position of the next line, for errors."""
        return f"{self.path}, line {self._count + 1}"

    def _checked(self, data: bytes) -> JsonTable:
        """Return a parsed line after verifying its version, fields, hash and chain."""
        where = self._where
        try:
            line = json.loads(data)
        except ValueError:
            raise LedgerError(f"{where}: not JSON") from None
        version = line.get("v") if isinstance(line, dict) else None
        if version != VERSION:
            hint = ""
            if type(version) is int and 0 < version < VERSION:
                hint = (
                    f": it is of version {version}, whose budgets were kept by another rule. Move the file away to "
                    "begin a new ledger, and lower the budget by what the old one has spent"
                )
            raise LedgerError(f"{where}: not a line of a ledger of version {VERSION}{hint}")
        if str(line.get("kind")) not in FIELDS or set(line) != FIELDS[line["kind"]]:
            raise LedgerError(f"{where}: unknown kind or fields")
        if line["hash"] != line_hash(line):
            raise LedgerError(f"{where}: the line was changed: its hash does not fit it")
        if line["previous"] != self._last_hash or line["seq"] != self._count:
            raise LedgerError(f"{where}: the chain is broken: lines before it were changed, removed or swapped")
        return line

    def _item_of(self, line: JsonTable) -> Entry | Budget | Place:
        """Return the budget, release or place of a line; refuse unknown content."""
        if "unit" in line and line["unit"] not in get_args(Unit):
            raise LedgerError(f"{self._where}: unknown unit {line['unit']!r}; known: {', '.join(get_args(Unit))}")
        if line["kind"] == "place":
            if not isinstance(line["others"], list):
                raise LedgerError(f"{self._where}: others must be names, found {type(line['others']).__name__}")
            return Place(str(line["place"]), tuple(map(str, line["others"])))
        if line["kind"] == "budget":
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
        return self._entry_of(line)

    def _entry_of(self, line: JsonTable) -> Entry:
        """Return the release of a line, updated by this line."""
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

    def _take(self, line: JsonTable, item: Entry | Budget | Place) -> None:
        """Add a verified line to the state in memory."""
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


class DraftLedger(Ledger):
    """Ledger in memory that continues the lines of a file; its entries are not written to disk.

    Args:
        path: of a ledger; the file may be missing.

    Raises:
        LedgerError: the file is not an unbroken ledger.
    """

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Yield an empty buffer; read nothing, so that drafted lines stay last."""
        yield io.BytesIO()

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Write nothing."""


def today() -> float:
    """Return the beginning of this day (UTC), in seconds since 1970."""
    return float(time.time() // DAY * DAY)


def line_hash(line: Mapping[str, object]) -> str:
    """Return the SHA-256 of a line without its own hash, in canonical JSON."""
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, each name on disk before its content."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def other_names(ledger: Ledger, place: str) -> tuple[str, ...]:
    """Return other names of data at a place; record them in both ledgers.

    Args:
        ledger: of the current name.
        place: identifier of the data's location, and its default name.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    name = ledger.path.stem
    found = []
    for path in sorted(ledger.path.parent.glob("*.jsonl")):
        is_there = path.stem == place
        with suppress(OSError):  # an unverified ledger
            is_there = is_there or f'"place": {json.dumps(place)}'.encode() in path.read_bytes()
        if path.stem != name and is_there:
            found.append(path)
    others = [path.stem for path in found if path.stem not in ledger.others]
    for path in found:
        if path.stem not in others:
            continue
        try:
            other = Ledger(path)
            if name not in other.others:
                other.note_place(place, [name])
        except LedgerError as error:  # the other ledger is broken
            logger.log(WARNING, "%s does not note that data at its place is called %s too: %s", path.name, name, error)
    # A ledger without a configured name is named after its place.
    if others or (name != place and place not in ledger.places):
        ledger.note_place(place, others)
    return ledger.others


def warning(name: str, others: tuple[str, ...], key: str) -> str:
    """Return the warning for an operator that the data has ledgers under further names.

    Args:
        name: current name of the data.
        others: further names of data at the same place.
        key: configuration key of the name.
    """
    return (
        f"the data at this place has ledgers under other names too: {', '.join(others)}. The ledger of {name!r} counts "
        f"nothing of them, and neither does its budget; set {key} to the earlier name unless it is other data"
    )
