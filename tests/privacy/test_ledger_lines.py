"""Content of a ledger, field by field, and errors about files that are none."""

import errno
import hashlib
import json
import math
import os

import pytest
from forged_ledgers import chained, lines_of, rewrite, write

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Laplace, Unaccounted
from cloister.privacy.accounting.filters import GaussianFilter, RenyiFilter, cost, filter_for
from cloister.privacy.accounting.ledger import DAY, GENESIS, Budget, Entry, Ledger, line_hash, today
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import LedgerError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget" / "ledger.jsonl"


class TestLines:
    """Return the content of the file, field by field."""

    def test_an_entry(self, path):
        ledger = Ledger(path)
        release = ledger.open(Gaussian(1.0), "example", "run", 7, lambda: None, "by", 2.5)
        expected = Entry(release, "run", 7, "example", "by", 2.5, Gaussian(1.0), today())
        assert ledger.entries == [expected] == Ledger(path).entries and expected.done is False
        (line,) = lines_of(path)
        assert line["v"] == 3 and line["seq"] == 0 and line["kind"] == "open" and line["previous"] == GENESIS
        assert ledger.head == line["hash"] == line_hash(line)
        assert path.read_text() == json.dumps(line, sort_keys=True) + "\n"
        ledger.done(release)
        assert [entry.done for entry in ledger.entries] == [True]

    def test_an_entry_without_more(self, path):
        ledger = Ledger(path)
        ledger.open(Gaussian(1.0), "client", "run", 1, lambda: None)
        assert (ledger.entries[0].mechanism, ledger.entries[0].clip) == ("", 0.0)

    def test_a_day(self, monkeypatch):
        monkeypatch.setattr("time.time", lambda: 3.5 * DAY)
        assert today() == 3.0 * DAY and type(today()) is float

    def test_a_hash_is_of_everything_else(self):
        content = {"b": 1, "a": "ü"}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        assert line_hash(content) == line_hash(content | {"hash": "x"}) == digest != line_hash(content | {"c": 1})

    def test_budgets(self, path):
        ledger = Ledger(path)
        ledger.limit("none", "client", 1e-5, 0.0)
        assert ledger.budgets == [] and ledger.filter_of("client") is None
        ledger.limit("one", "client", 1e-5, 2.0)
        ledger.limit("same", "client", 1e-5, 2.0)
        ledger.limit("epsilon", "client", 1e-5, 3.0)
        ledger.limit("delta", "client", 1e-6, 3.0, "renyi")
        ledger.limit("relation", "client", 1e-6, 3.0, relation="replace-one")
        ledger.limit("off", "client", 1e-6, 0.0, relation="replace-one")
        ledger.limit("other", "example", 1e-6, 3.0, "renyi", "replace-one")
        day, gaussian = today(), GaussianFilter()
        assert ledger.budgets == [
            Budget("one", "client", 1e-5, 2.0, "add-or-remove", gaussian, day),
            Budget("epsilon", "client", 1e-5, 3.0, "add-or-remove", gaussian, day),
            Budget("delta", "client", 1e-6, 3.0, "add-or-remove", gaussian, day),
            Budget("relation", "client", 1e-6, 3.0, "replace-one", gaussian, day),
            Budget("off", "client", 1e-6, 0.0, "replace-one", gaussian, day),
            Budget("other", "example", 1e-6, 3.0, "replace-one", filter_for("renyi", 3.0, 1e-6), day),
        ]
        assert Ledger(path).budgets == ledger.budgets
        assert ledger.filter_of("client") == gaussian and isinstance(ledger.filter_of("example"), RenyiFilter)
        assert ledger.filter_of("group") is None

    def test_whose_releases_there_are_and_what_was_set_before_them(self, path):
        ledger = Ledger(path)
        ledger.limit("run", "example", 1e-5, 2.0)
        ledger.open(Gaussian(1.0), "client", "run", 1, lambda: None)
        ledger.limit("run", "client", 1e-5, 2.0)
        ledger.limit("run", "group", 1e-5, 2.0)
        for each in (ledger, Ledger(path)):
            assert [each.has_released(unit) for unit in ("client", "example", "group")] == [True, False, False]
            found = [each.was_set_beforehand(unit) for unit in ("client", "example", "group", "neighbourhood")]
            assert found == [False, True, True, False]
        ledger.open(Gaussian(1.0), "example", "run", 1, lambda: None)
        assert ledger.was_set_beforehand("example")
        ledger.limit("later", "example", 1e-5, 1.0)
        assert not ledger.was_set_beforehand("example") and not Ledger(path).was_set_beforehand("example")

    def test_the_relation_that_budgets_are_kept_for(self, path):
        ledger = Ledger(path)
        ledger.limit("run", "example", 1e-5, 2.0)
        assert ledger.relation_of("example", "add-or-remove") == "add-or-remove"
        assert ledger.relation_of("example", "replace-one") == "replace-one"
        ledger.limit("run", "example", 1e-5, 2.0, relation="replace-one")
        ledger.limit("run", "example", 1e-5, 2.0)
        assert ledger.relation_of("example", "add-or-remove") == "replace-one"
        assert ledger.relation_of("client", "add-or-remove") == "add-or-remove"

    def test_running_sums_are_of_their_own_unit_filter_and_relation(self, path):
        ledger, renyi = Ledger(path), RenyiFilter(4.0)
        keys = [
            (unit, chosen, relation)
            for unit in ("client", "example")
            for chosen in (GaussianFilter(), renyi)
            for relation in ("add-or-remove", "replace-one")
        ]
        assert [ledger.spent(*key) for key in keys] == [0] * 8
        events = {"client": [Gaussian(2.0), Gaussian(3.0)], "example": [Gaussian(5.0)]}
        for unit, released in events.items():
            for event in released:
                ledger.done(ledger.open(event, unit, "run", 1, lambda: None))
        for unit, chosen, relation in keys:
            expected = sum(cost(chosen, event, relation) for event in events[unit])
            assert ledger.spent(unit, chosen, relation) == pytest.approx(expected)
            assert Ledger(path).spent(unit, chosen, relation) == pytest.approx(expected)

    def test_accounts_are_of_their_own_relation_and_adversary(self, path):
        ledger = Ledger(path)
        keys = [(relation, insiders) for relation in ("add-or-remove", "replace-one") for insiders in (False, True)]
        for relation, insiders in keys:
            found = ledger.account("client", relation, insiders)
            assert (found.relation, found.insiders) == (relation, insiders)
        ledger.open(
            Gaussian(2.0, Sampling("without-replacement", cohort=1, population=9)), "client", "r", 1, lambda: None
        )
        ledger.open(Gaussian(2.0), "example", "r", 1, lambda: None)
        for relation, insiders in keys:
            expected = Account([ledger.entries[0].event], relation, insiders)
            assert ledger.account("client", relation, insiders).epsilon(1e-5) == expected.epsilon(1e-5)
        plain = ledger.account("client")
        assert (plain.relation, plain.insiders) == ("add-or-remove", False)

    def test_leakage_is_of_the_neighbourhood_alone(self, path):
        ledger = Ledger(path)
        for unit, event in (
            ("neighbourhood", Laplace(0.5, 2.0)),
            ("client", Unaccounted("x")),
            ("neighbourhood", Laplace(0.25, 2.0)),
        ):
            ledger.open(event, unit, "run", 1, lambda: None)
        assert ledger.leakage() == 1.5
        ledger.open(Unaccounted("x"), "neighbourhood", "run", 1, lambda: None)
        assert ledger.leakage() == math.inf


class TestTextsOfALedger:
    OLD = (
        ": it is of version {}, whose budgets were kept by another rule. Move the file away to begin a new ledger, and "
        "lower the budget by what the old one has spent"
    )

    def refusal(self, path, line, changes):
        write(path)
        lines = lines_of(path)
        lines[line] |= changes
        rewrite(path, chained(lines))
        with pytest.raises(LedgerError) as refused:
            Ledger(path)
        return str(refused.value).removeprefix(f"{path}, ")

    def test_of_a_line_that_is_not_understood(self, path):
        cases = [
            (0, {"v": 0}, "line 1: not a line of a ledger of version 3"),
            (0, {"v": True}, "line 1: not a line of a ledger of version 3"),
            (0, {"v": 1}, "line 1: not a line of a ledger of version 3" + self.OLD.format(1)),
            (2, {"v": 2}, "line 3: not a line of a ledger of version 3" + self.OLD.format(2)),
            (2, {"kind": "reset"}, "line 3: unknown kind or fields"),
            (2, {"unit": "patient"}, "line 3: unknown unit 'patient'; known: client, example, group, neighbourhood"),
            (2, {"release": 7}, "line 3: 7 is no id of a new release"),
            (3, {"release": "never"}, "line 4: release 'never' was never opened"),
        ]
        for line, changes, says in cases:
            path.unlink(missing_ok=True)
            assert self.refusal(path, line, changes) == says

    def test_of_a_budget(self, path):
        cases = [
            ({"filter": {"kind": "pld"}}, "line 2: unknown kind of filter 'pld'; known: gaussian, renyi"),
            (
                {"filter": {"kind": "renyi", "order": 3.0}},
                "line 2: the filter of unit 'client' is another than that of its first budget",
            ),
            ({"relation": "swap"}, "line 2: unknown relation 'swap'"),
        ]
        for changes, says in cases:
            path.unlink(missing_ok=True)
            ledger = Ledger(path)
            for epsilon in (1.0, 2.0):
                ledger.limit("run", "client", 1e-5, epsilon)
            lines = lines_of(path)
            lines[1] |= changes
            rewrite(path, chained(lines))
            with pytest.raises(LedgerError) as refused:
                Ledger(path)
            assert str(refused.value) == f"{path}, {says}"

    def test_of_damage(self, path):
        write(path)
        whole = path.read_text()
        path.write_text(whole + "{\n")
        with pytest.raises(LedgerError) as refused:
            Ledger(path)
        assert str(refused.value) == f"{path}, line 9: not JSON"
        changed = lines_of_text(whole)
        changed[1]["time"] += 1
        rewrite(path, changed)
        with pytest.raises(LedgerError) as refused:
            Ledger(path)
        assert str(refused.value) == f"{path}, line 2: the line was changed: its hash does not fit it"
        rewrite(path, lines_of_text(whole)[1:])
        with pytest.raises(LedgerError) as refused:
            Ledger(path)
        assert str(refused.value) == (
            f"{path}, line 1: the chain is broken: lines before it were changed, removed or swapped"
        )

    def test_of_a_file_that_shrank_and_of_what_was_never_opened(self, path):
        ledger = write(path)
        with pytest.raises(LedgerError) as refused:
            ledger.done("no-such")
        assert str(refused.value) == f"{path}: release no-such was never opened"
        path.write_bytes(b"")
        with pytest.raises(LedgerError) as refused:
            ledger.open(Gaussian(1.0), "client", "run", 5, allow=lambda: None)
        assert str(refused.value) == f"{path}: lines that were read from this file before are no longer in it"

    def test_of_a_lock_that_does_not_keep_others_out(self, path):
        ledger = write(path)
        before = path.read_bytes()

        def write_meanwhile():
            with path.open("ab") as file:
                file.write(b"{}\n")

        with pytest.raises(LedgerError) as refused:
            ledger.open(Gaussian(1.0), "client", "run", 5, allow=write_meanwhile)
        assert str(refused.value) == (
            f"{path}: another process wrote to it while it was locked: locks of this folder do not reach other "
            "machines; keep the ledger on a disk that one machine alone writes to"
        )
        assert path.read_bytes() == before + b"{}\n"

    def test_of_a_disk(self, path, monkeypatch):
        def fail(handle):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        path.parent.mkdir()
        with pytest.raises(LedgerError) as refused:
            write(path)
        assert str(refused.value) == f"{path}: the ledger cannot be written: Input/output error"


def lines_of_text(text):
    return [json.loads(line) for line in text.splitlines()]
