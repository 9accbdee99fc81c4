"""The ledger: nothing is released that it does not hold, and nothing in it can be lost, changed or passed over."""

import errno
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forged_ledgers import EVENTS, chained, lines_of, rewrite, write
from support import failures
from typer.testing import CliRunner

from cloister.cli import app
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Pure, Repeated, from_json, to_json
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.accounting.ledger import GENESIS, Ledger, line_hash
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import BudgetExhausted, LedgerError, PrivacyError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget" / "ledger.jsonl"


def test_its_folder_may_be_made_by_another_process_meanwhile(tmp_path, monkeypatch):
    folder, looked, is_dir = tmp_path / "ledgers", [], Path.is_dir

    def before(path):
        if path == folder and not looked:
            looked.append(path)
            folder.mkdir()
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", before)
    write(folder / "a.jsonl")
    assert looked and Ledger(folder / "a.jsonl").entries


class TestWhatIsWritten:
    def test_many_steps_are_one_line(self, path):
        event = Repeated(Gaussian(4.0, Sampling("poisson", probability=0.25)), 600)
        write(path, [event])
        (entry,) = Ledger(path).entries
        assert entry.event == event and len(lines_of(path)) == 2
        assert lines_of(path)[0]["event"]["event"]["kind"] == "gaussian"

    def test_many_of_what_is_not_known_are_refused(self):
        for inner in ({}, None, {"kind": "unaccounted", "reason": "x"}, to_json(Gaussian(1.0)) | {"k": 1}):
            with pytest.raises(PrivacyError):
                from_json({"kind": "repeated", "event": inner, "count": 2})

    def test_comes_back(self, path):
        written = write(path)
        read = Ledger(path)
        assert [entry.event for entry in read.entries] == EVENTS
        assert read.entries == written.entries and read.head == written.head
        assert all(entry.done and entry.run == "run" for entry in read.entries)
        assert [entry.round for entry in read.entries] == [1, 2, 3, 4]

    def test_counts_when_it_is_opened_whether_or_not_it_is_done(self, path):
        write(path, [Gaussian(1.0)] * 3, finish=False)
        ledger = Ledger(path)
        assert not any(entry.done for entry in ledger.entries)
        assert ledger.account("client").epsilon(1e-5) == write(path.with_name("done"), [Gaussian(1.0)] * 3).account(
            "client"
        ).epsilon(1e-5)

    def test_counts_in_accounts_that_were_asked_for_before(self, path):
        ledger = write(path, [Gaussian(1.0)])
        before = ledger.account("client").epsilon(1e-5)
        ledger.open(Gaussian(1.0), "client", "run", 2, allow=lambda: None)
        assert ledger.account("client").epsilon(1e-5) == Ledger(path).account("client").epsilon(1e-5) > before

    def test_counts_for_its_unit_alone(self, path):
        ledger = Ledger(path)
        ledger.open(Gaussian(1.0), "example", "run", 1, allow=lambda: None)
        assert ledger.account("client").epsilon(1e-5) == 0 < ledger.account("example").epsilon(1e-5)

    def test_counts_by_joining_or_leaving_unless_replacing_is_asked_for(self, path):
        ledger, chosen = write(path, [Gaussian(4.0), Pure(0.5)]), filter_for("renyi", 5.0, 1e-5)
        joining, replacing = (ledger.spent("client", chosen, relation) for relation in ("add-or-remove", "replace-one"))
        assert ledger.spent("client", chosen) == joining < replacing
        assert joining == sum(cost(chosen, entry.event, "add-or-remove") for entry in ledger.entries)

    def test_of_nothing_is_nothing(self, path):
        ledger = Ledger(path)
        assert ledger.entries == [] and ledger.head == GENESIS and not path.exists()

    def test_is_refused_if_it_could_not_be_read_again(self, path):
        ledger = write(path, [Gaussian(1.0)])
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="line 3: unknown unit 'patient'"):
            ledger.open(Gaussian(1.0), "patient", "run", 2, allow=lambda: None)
        assert path.read_bytes() == before

    def test_a_release_that_was_never_opened_cannot_be_done(self, path):
        with pytest.raises(LedgerError, match="never opened"):
            write(path).done("0" * 32)

    def test_an_event_survives_json(self):
        events = [*EVENTS, Pure(0.25)]
        assert [from_json(json.loads(json.dumps(to_json(event)))) for event in events] == events

    def test_an_event_that_is_not_understood_is_refused(self):
        contents = [
            {},
            {"kind": "cauchy", "scale": 1.0},
            {"kind": "pure", "epsilon": 0.0},
            {"kind": "pure"},
            {"kind": ["gaussian"]},
            {"kind": "gaussian"},
            {"kind": "gaussian", "noise_multiplier": 1.0, "clip": 2.0},
            {"kind": "gaussian", "noise_multiplier": "much"},
            {"kind": "gaussian", "noise_multiplier": math.nan},
            {"kind": "gaussian", "noise_multiplier": 1.0, "sampling": {"kind": "shuffled"}},
            {"kind": "gaussian", "noise_multiplier": 1.0, "sampling": {"kind": "poisson", "probability": 2.0}},
            {"kind": "gaussian", "noise_multiplier": 1.0, "sampling": "poisson"},
            "gaussian",
        ]
        for content in contents:
            with pytest.raises(PrivacyError):
                from_json(content)


class TestWhatWasTamperedWith:
    """Every kind of damage is found, and the line is named. Each ledger has 8 lines: open, done, open, done …"""

    def refused(self, path, says):
        with pytest.raises(LedgerError, match=says):
            Ledger(path)
        result = CliRunner().invoke(app, ["ledger", "verify", str(path)])
        assert result.exit_code == 1 and "LedgerError" in result.output

    def test_a_change(self, path):
        def check(line):
            path.unlink(missing_ok=True)
            write(path)
            lines = lines_of(path)
            lines[line]["time"] += 1
            rewrite(path, lines)
            self.refused(path, f"line {line + 1}: the line was changed")

        assert failures(range(8), check) == []

    def test_a_change_with_its_hash_made_right(self, path):
        """Only at the end does it stay unseen: who notes the head sees that as well."""

        def check(line):
            path.unlink(missing_ok=True)
            head = write(path).head
            lines = lines_of(path)
            lines[line]["time"] += 1
            lines[line]["hash"] = line_hash(lines[line])
            rewrite(path, lines)
            self.refused(path, f"line {line + 2}: the chain is broken")
            rewrite(path, chained(lines))
            assert Ledger(path).head != head

        assert failures(range(7), check) == []

    def test_a_removal(self, path):
        def check(line):
            path.unlink(missing_ok=True)
            write(path)
            lines = lines_of(path)
            del lines[line]
            rewrite(path, lines)
            self.refused(path, f"line {line + 1}: the chain is broken")

        assert failures(range(7), check) == []

    def test_a_swap(self, path):
        def check(line):
            path.unlink(missing_ok=True)
            write(path)
            lines = lines_of(path)
            lines[line : line + 2] = lines[line : line + 2][::-1]
            rewrite(path, lines)
            self.refused(path, f"line {line + 1}: the chain is broken")

        assert failures(range(7), check) == []

    def test_an_insertion(self, path):
        def check(line):
            path.unlink(missing_ok=True)
            write(path)
            lines = lines_of(path)
            lines.insert(line, lines[0] if line else lines[-1])
            rewrite(path, lines)
            self.refused(path, f"line {line + 1}: the chain is broken")

        assert failures(range(9), check) == []

    def test_a_line_of_another_ledger(self, path):
        write(path)
        write(path.with_name("other"))
        lines = lines_of(path)
        lines[2] = lines_of(path.with_name("other"))[2]
        rewrite(path, lines)
        self.refused(path, "line 3: the chain is broken")

    def test_a_number_twice(self, path):
        write(path)
        lines = lines_of(path)
        lines[3]["seq"] = 2
        lines[3]["hash"] = line_hash(lines[3])
        rewrite(path, lines)
        self.refused(path, "line 4: the chain is broken")

    def test_a_removal_at_the_end_is_seen_by_whoever_noted_the_head(self, path):
        """A documented limit: a chain cannot know how long it ought to be."""
        head = write(path).head
        rewrite(path, lines_of(path)[:-2])
        shorter = Ledger(path)
        assert len(shorter.entries) == 3 and shorter.head != head

    def test_a_line_that_is_none(self, path):
        write(path)
        whole = path.read_text()

        def check(text):
            path.write_text(whole + text + "\n")
            self.refused(path, "line 9: ")

        assert failures(["{", "[]", "3", "null", "\x00" * 20, "{}"], check) == []

    def test_a_forged_chain_of_what_is_not_understood(self, path):
        """Skipping such a line would count less than was spent."""
        cases = [
            (0, {"v": 1}, "line 1: not a line of a ledger of version 3: it is of version 1, .* Move the file away"),
            (1, {"v": 2}, "line 2: not a line of a ledger of version 3: it is of version 2, .* Move the file away"),
            (2, {"v": "1"}, "line 3: not a line of a ledger of version 3$"),
            (2, {"v": 4}, "line 3: not a line of a ledger of version 3$"),
            (2, {"kind": "reset"}, "line 3: unknown kind or fields"),
            (2, {"kind": ["open"]}, "line 3: unknown kind or fields"),
            (2, {"note": "free"}, "line 3: unknown kind or fields"),
            (2, {"event": {"kind": "cauchy", "scale": 1.0}}, "line 3: unknown event kind 'cauchy'"),
            (2, {"event": {"kind": "gaussian", "noise_multiplier": -1.0}}, "line 3: a noise multiplier must be"),
            (2, {"event": {"kind": "gaussian"}}, "line 3: a 'gaussian' event does not have these fields"),
            (2, {"event": 5}, "line 3: an event must be"),
            (2, {"unit": "patient"}, "line 3: unknown unit 'patient'"),
            (2, {"release": 7}, "line 3: 7 is no id of a new release"),
            (3, {"release": "never"}, "line 4: release 'never' was never opened"),
            (3, {"release": ["x"]}, "line 4: .* was never opened"),
        ]

        def check(line, changes, says):
            path.unlink(missing_ok=True)
            write(path)
            lines = lines_of(path)
            lines[line] |= changes
            rewrite(path, chained(lines))
            self.refused(path, says)

        assert failures(cases, check) == []

    def test_a_release_opened_twice(self, path):
        """It would take the place of the one that bears its id."""
        write(path)
        lines = lines_of(path)
        lines[4]["release"] = lines[5]["release"] = lines[0]["release"]
        rewrite(path, chained(lines))
        self.refused(path, "line 5: '.*' is no id of a new release")

    def test_a_file_that_shrinks_under_its_writer(self, path):
        def check(left):
            path.unlink(missing_ok=True)
            ledger = write(path)
            data = path.read_bytes()
            path.write_bytes(data[: left if left >= 0 else len(data) + left])
            with pytest.raises(LedgerError, match="no longer in it"):
                ledger.open(Gaussian(1.0), "client", "run", 5, allow=lambda: None)

        assert failures([0, 1, 300, -1], check) == []

    def test_a_file_that_is_replaced_under_its_writer(self, path):
        ledger = write(path, EVENTS[:2])
        path.unlink()
        write(path)
        with pytest.raises(LedgerError, match="line 5: "):
            ledger.open(Gaussian(1.0), "client", "run", 5, allow=lambda: None)


class TestATornLine:
    def test_of_any_length_is_passed_over_and_written_over(self, path):
        whole = write(path, EVENTS[:2], finish=False)
        data = path.read_bytes()
        kept = data.index(b"\n") + 1
        for length in range(kept, len(data)):
            path.write_bytes(data[:length])
            read = Ledger(path)
            assert [entry.event for entry in read.entries] == EVENTS[:1] and read.head != whole.head
            assert path.stat().st_size == length, "a reader changed the file"
            read.open(EVENTS[2], "client", "run", 2, allow=lambda: None)
            assert [entry.event for entry in Ledger(path).entries] == [EVENTS[0], EVENTS[2]]

    def test_that_is_the_only_one(self, path):
        write(path, EVENTS[:1], finish=False)
        path.write_bytes(path.read_bytes()[:-1])
        assert Ledger(path).entries == []
        assert [entry.event for entry in write(path).entries] == EVENTS

    def test_of_somebody_else_is_cut_off(self, path):
        """A writer that has the file open already meets the torn line of one that died."""
        ledger = write(path, EVENTS[:1])
        with path.open("ab") as file:
            file.write(b'{"v": 1, "kind": "op')
        ledger.open(EVENTS[1], "client", "run", 2, allow=lambda: None)
        assert [entry.event for entry in Ledger(path).entries] == EVENTS[:2]

    def test_does_not_stop_the_command(self, path):
        write(path)
        path.write_bytes(path.read_bytes()[:-5])
        assert CliRunner().invoke(app, ["ledger", "verify", str(path)]).exit_code == 0


class TestTheDisk:
    def test_has_the_line_and_the_name_before_open_returns(self, path, monkeypatch):
        synced = []
        sync = os.fsync

        def record(handle):
            place = Path(os.readlink(f"/proc/self/fd/{handle}"))
            synced.append((place, place.read_bytes() if place.is_file() else b""))
            sync(handle)

        monkeypatch.setattr(os, "fsync", record)
        ledger = Ledger(path)
        ledger.open(Gaussian(1.0), "client", "run", 1, allow=lambda: None)
        assert [place for place, _ in synced] == [path.parent.parent, path, path.parent]
        assert synced[1][1] == path.read_bytes() and synced[1][1].endswith(b"\n")
        synced.clear()
        release = ledger.open(Gaussian(1.0), "client", "run", 2, allow=lambda: None)
        ledger.done(release)
        assert [content for _, content in synced] == [
            b"".join(path.read_bytes().splitlines(keepends=True)[:count]) for count in (2, 3)
        ]

    def test_has_the_name_even_if_its_maker_died(self, path, monkeypatch):
        write(path, EVENTS[:1])
        synced, ledger = [], Ledger(path)
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
        ledger.open(Gaussian(1.0), "client", "run", 2, allow=lambda: None)
        assert synced == [str(path), str(path.parent)]

    def test_syncs_before_anything_is_noised(self, path, monkeypatch):
        order = []
        monkeypatch.setattr(os, "fsync", lambda handle: order.append("sync"))
        with PrivacyBudget(Ledger(path), "run").release(Gaussian(1.0), 1):
            order.append("noise")
        assert order == ["sync"] * 3 + ["noise", "sync"]

    @pytest.mark.parametrize("finished", [0, 2])
    def test_that_fails_lets_nothing_be_released(self, path, monkeypatch, finished):
        budget = PrivacyBudget(write(path, EVENTS[:finished]), "run")

        def fail(handle):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(LedgerError, match="cannot be written: Input/output"), budget.release(Gaussian(1.0), 9):
                pytest.fail("released without a record")
        # The line may be there or not: it may count too much, never too little, and the next writer goes on.
        with budget.release(Gaussian(1.0), 10):
            pass
        assert [entry.round for entry in Ledger(path).entries if entry.done][finished:] == [10]

    @pytest.mark.parametrize("room", [0, 1, 200])
    def test_that_is_full_lets_nothing_be_released(self, path, room):
        """It may take a part of the line before it says so."""
        budget = PrivacyBudget(write(path, EVENTS[:2]), "run")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(LedgerError, match="cannot be written"), budget.release(Gaussian(1.0), 9):
                pytest.fail("released without a record")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(Ledger(path).entries) == 2
        with budget.release(Gaussian(1.0), 10):
            pass
        assert [entry.round for entry in Ledger(path).entries] == [1, 2, 10]

    def test_where_no_folder_can_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(LedgerError, match="cannot be written"):
            write(tmp_path / "file" / "ledger.jsonl")


WRITER = """
import sys
from pathlib import Path
from cloister.utils.errors import BudgetExhausted
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger

path, name, rounds, budget = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
budget = PrivacyBudget(Ledger(path), name, max_epsilon=budget)
print("ready", flush=True)
sys.stdin.readline()
try:
    for number in range(1, rounds + 1):
        with budget.release(Gaussian(3.0), number):
            pass
except BudgetExhausted:
    print("stopped", flush=True)
"""


def writers(path, rounds, budget=0.0):
    """Two processes that write into one ledger from the same moment on; what each of them said."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name, str(rounds), str(budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=600)[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    return said


class TestTwoWriters:
    def test_objects_take_turns(self, path):
        first, second = Ledger(path), Ledger(path)
        for number in range(1, 6):
            for ledger in (first, second):
                ledger.done(ledger.open(Gaussian(1.0), "client", "run", number, allow=lambda: None))
        second.open(Gaussian(1.0), "client", "run", 6, allow=lambda: None)
        first.open(Gaussian(1.0), "client", "run", 6, allow=lambda: None)
        assert len(Ledger(path).entries) == 12 == len(first.entries)

    def test_one_may_finish_what_the_other_opened(self, path):
        first, second = Ledger(path), Ledger(path)
        second.done(first.open(Gaussian(1.0), "client", "run", 1, allow=lambda: None))
        assert Ledger(path).entries[0].done

    def test_processes_make_one_unbroken_chain(self, path):
        writers(path, 40)
        entries = Ledger(path).entries
        assert len(entries) == 80 and all(entry.done for entry in entries)
        for name in ("first", "second"):
            assert [entry.round for entry in entries if entry.run == name] == list(range(1, 41))
        assert {entry.run for entry in entries[:60]} == {"first", "second"}, "they did not run at the same time"

    def test_processes_share_a_budget(self, path):
        limit = 4.0
        said = writers(path, 200, limit)
        assert all(line.endswith("stopped\n") for line in said)
        budget = PrivacyBudget(Ledger(path), "", max_epsilon=limit)
        assert 0.9 * limit < budget.epsilon() <= limit
        with pytest.raises(BudgetExhausted):
            budget.require([Gaussian(3.0)])

    def test_objects_share_a_budget(self, path):
        """The second sees what the first has spent since it read the file."""
        first, second = (PrivacyBudget(Ledger(path), name, max_epsilon=1.0) for name in ("first", "second"))
        assert first.epsilon() == second.epsilon() == 0
        with first.release(Gaussian(5.0), 1):
            pass
        before = path.read_bytes()
        with pytest.raises(BudgetExhausted, match="the next release would"), second.release(Gaussian(5.0), 1):
            pytest.fail("released past the budget")
        assert path.read_bytes() == before
