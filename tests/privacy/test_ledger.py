"""The ledger: nothing is released that it does not hold, and nothing in it can be lost, changed or passed over."""

import contextlib
import errno
import hashlib
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forged_ledgers import EVENTS, chained, lines_of, rewrite, write
from typer.testing import CliRunner

from cloister.cli import app
from cloister.core.errors import BudgetExhausted, ConfigError, LedgerError, PrivacyError
from cloister.privacy.accounting import filters
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import (
    UNSAMPLED,
    Gaussian,
    Laplace,
    Pure,
    Repeated,
    Sampling,
    Unaccounted,
    from_json,
    to_json,
)
from cloister.privacy.accounting.filters import GaussianFilter, RenyiFilter, cost, filter_for
from cloister.privacy.accounting.ledger import DAY, GENESIS, Budget, Entry, Ledger, line_hash, today


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget" / "ledger.jsonl"


class TestWhatIsWritten:
    def test_many_steps_are_one_line(self, path):
        event = Repeated(Gaussian(4.0, Sampling("poisson", probability=0.25)), 600)
        write(path, [event])
        (entry,) = Ledger(path).entries
        assert entry.event == event and len(lines_of(path)) == 2
        assert lines_of(path)[0]["event"]["event"]["kind"] == "gaussian"

    @pytest.mark.parametrize(
        "inner", [{}, None, {"kind": "unaccounted", "reason": "x"}, to_json(Gaussian(1.0)) | {"k": 1}]
    )
    def test_many_of_what_is_not_known_are_refused(self, inner):
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

    @pytest.mark.parametrize("event", [*EVENTS, Pure(0.25)])
    def test_an_event_survives_json(self, event):
        assert from_json(json.loads(json.dumps(to_json(event)))) == event

    @pytest.mark.parametrize(
        "content",
        [
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
        ],
    )
    def test_an_event_that_is_not_understood_is_refused(self, content):
        with pytest.raises(PrivacyError):
            from_json(content)


class TestWhatWasTamperedWith:
    """Every kind of damage is found, and the line is named. Each ledger has 8 lines: open, done, open, done …"""

    def refused(self, path, says):
        with pytest.raises(LedgerError, match=says):
            Ledger(path)
        result = CliRunner().invoke(app, ["ledger", "verify", str(path)])
        assert result.exit_code == 1 and "LedgerError" in result.output

    @pytest.mark.parametrize("line", range(8))
    def test_a_change(self, path, line):
        write(path)
        lines = lines_of(path)
        lines[line]["time"] += 1
        rewrite(path, lines)
        self.refused(path, f"line {line + 1}: the line was changed")

    @pytest.mark.parametrize("line", range(7))
    def test_a_change_with_its_hash_made_right(self, path, line):
        """Only at the end does it stay unseen: who notes the head sees that as well."""
        head = write(path).head
        lines = lines_of(path)
        lines[line]["time"] += 1
        lines[line]["hash"] = line_hash(lines[line])
        rewrite(path, lines)
        self.refused(path, f"line {line + 2}: the chain is broken")
        rewrite(path, chained(lines))
        assert Ledger(path).head != head

    @pytest.mark.parametrize("line", range(7))
    def test_a_removal(self, path, line):
        write(path)
        lines = lines_of(path)
        del lines[line]
        rewrite(path, lines)
        self.refused(path, f"line {line + 1}: the chain is broken")

    @pytest.mark.parametrize("line", range(7))
    def test_a_swap(self, path, line):
        write(path)
        lines = lines_of(path)
        lines[line : line + 2] = lines[line : line + 2][::-1]
        rewrite(path, lines)
        self.refused(path, f"line {line + 1}: the chain is broken")

    @pytest.mark.parametrize("line", range(9))
    def test_an_insertion(self, path, line):
        write(path)
        lines = lines_of(path)
        lines.insert(line, lines[0] if line else lines[-1])
        rewrite(path, lines)
        self.refused(path, f"line {line + 1}: the chain is broken")

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

    @pytest.mark.parametrize("text", ["{", "[]", "3", "null", "\x00" * 20, "{}"])
    def test_a_line_that_is_none(self, path, text):
        write(path)
        path.write_text(path.read_text() + text + "\n")
        self.refused(path, "line 9: ")

    @pytest.mark.parametrize(
        ("line", "changes", "says"),
        [
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
        ],
    )
    def test_a_forged_chain_of_what_is_not_understood(self, path, line, changes, says):
        """Skipping such a line would count less than was spent."""
        write(path)
        lines = lines_of(path)
        lines[line] |= changes
        rewrite(path, chained(lines))
        self.refused(path, says)

    def test_a_release_opened_twice(self, path):
        """It would take the place of the one that bears its id."""
        write(path)
        lines = lines_of(path)
        lines[4]["release"] = lines[5]["release"] = lines[0]["release"]
        rewrite(path, chained(lines))
        self.refused(path, "line 5: '.*' is no id of a new release")

    @pytest.mark.parametrize("left", [0, 1, 300, -1])
    def test_a_file_that_shrinks_under_its_writer(self, path, left):
        ledger = write(path)
        data = path.read_bytes()
        path.write_bytes(data[: left if left >= 0 else len(data) + left])
        with pytest.raises(LedgerError, match="no longer in it"):
            ledger.open(Gaussian(1.0), "client", "run", 5, allow=lambda: None)

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

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match="cannot be written: Input/output"), budget.release(Gaussian(1.0), 9):
            pytest.fail("released without a record")
        monkeypatch.undo()
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
from cloister.core.errors import BudgetExhausted
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
    said = [process.communicate(timeout=60)[0] for process in both]
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


class TestBooks:
    def test_count_earlier_runs_and_tell_them_apart(self, path):
        for name in ("one", "two"):
            budget = PrivacyBudget(Ledger(path), name)
            with budget.release(Gaussian(4.0), 1):
                pass
        assert budget.account().epsilon(1e-5) > budget.account_of_run().epsilon(1e-5) > 0

    def test_refuse_to_go_on_from_what_has_no_guarantee(self, path):
        write(path, [Unaccounted("exact distance")])
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=100.0)
        with pytest.raises(BudgetExhausted, match="nothing can be claimed: no ε up to 100 covers them"):
            budget.require([Gaussian(50.0)])

    def test_enter_what_leaves_without_a_guarantee_and_then_claim_nothing(self, path):
        PrivacyBudget(Ledger(path), "seen", unit="example").record_unprotected("scores of examples leave")
        (entry,) = Ledger(path).entries
        assert (entry.event, entry.unit, entry.run) == (Unaccounted("scores of examples leave"), "example", "seen")
        assert entry.round == 0 and not entry.done
        assert math.isinf(PrivacyBudget(Ledger(path), "later", unit="example").epsilon())
        with pytest.raises(BudgetExhausted):
            PrivacyBudget(Ledger(path), "later", unit="example", max_epsilon=100.0).require([Gaussian(50.0)])

    def test_without_a_budget_refuse_nothing(self, path):
        with PrivacyBudget(Ledger(path), "run").release(Unaccounted("exact distance"), 1):
            pass
        assert math.isinf(PrivacyBudget(Ledger(path), "run").epsilon())

    def test_count_a_release_whose_making_failed(self, path):
        budget = PrivacyBudget(Ledger(path), "run")
        with pytest.raises(ZeroDivisionError), budget.release(Gaussian(2.0), 1):
            raise ZeroDivisionError
        (entry,) = Ledger(path).entries
        assert not entry.done and budget.epsilon() > 0

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    @pytest.mark.parametrize("relation", ["add-or-remove", "replace-one"])
    def test_allow_a_budget_to_the_last_release_and_not_a_thousandth_more(self, path, kind, relation):
        """Ten releases of a multiplier that they fill it with; then the same with a ten-thousandth less noise each."""
        limit = filter_for(kind, 3.0, 1e-5).limit(3.0, 1e-5)
        per_unit = cost(filter_for(kind, 3.0, 1e-5), Gaussian(1.0), relation)
        exact = math.sqrt(10 * per_unit / limit)
        for z, allowed in ((exact * (1 + 1e-9), 10), (exact * (1 - 1e-4), 9)):
            budget = PrivacyBudget(Ledger(path.with_name(f"{allowed}")), "", "client", 1e-5, 3.0, relation, kind)
            budget.begin("run")
            made = 0
            with contextlib.suppress(BudgetExhausted):
                while made < 20:
                    with budget.release(Gaussian(z), made):
                        made += 1
            assert made == allowed and budget.share() == pytest.approx(allowed / 10, rel=1e-3)

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    def test_count_no_draw_that_the_clients_together_know(self, path, kind):
        """A cohort of a fixed size: all others know who was left. Against them a budget has to hold."""
        drawn = Gaussian(4.0, Sampling("without-replacement", cohort=1, population=1000))
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0, relation="replace-one", kind=kind)
        made = 0
        with contextlib.suppress(BudgetExhausted):
            while made < 1000:
                with budget.release(drawn, made):
                    made += 1
        plain = PrivacyBudget(
            Ledger(path.with_name("plain")), "run", max_epsilon=2.0, relation="replace-one", kind=kind
        )
        assert made == int(plain.limit / plain.cost(Gaussian(4.0)))
        assert budget.epsilon() == pytest.approx(Account([Gaussian(2.0)] * made).epsilon(1e-5, "pld"))

    def test_count_a_draw_by_coins_under_a_rényi_filter_alone(self, path):
        drawn = Gaussian(1.0, Sampling("poisson", probability=0.01))
        shares = []
        for kind in ("gaussian", "renyi"):
            budget = PrivacyBudget(Ledger(path.with_name(kind)), "run", max_epsilon=8.0, kind=kind)
            with budget.release(drawn, 1):
                shares.append(budget.share())
        assert shares[0] > 20 * shares[1] > 0

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    @pytest.mark.parametrize("event", [Laplace(1e-9, 1e-9), Unaccounted("scores"), Gaussian(0.0)])
    def test_refuse_under_any_budget_what_has_no_bound(self, path, kind, event):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=1e6, kind=kind)
        with pytest.raises(BudgetExhausted, match="nothing can be claimed"), budget.release(event, 1):
            pytest.fail("released")
        assert Ledger(path).entries == []

    @pytest.mark.parametrize("unit", ["client", "example", "group"])
    def test_pay_for_a_pure_release(self, path, unit):
        budget = PrivacyBudget(Ledger(path), "run", unit, max_epsilon=4.0)
        with budget.release(Pure(0.5), 1):
            pass
        assert 0 < budget.share() < 1
        with pytest.raises(BudgetExhausted, match=r"from .* % to .* %, past the budget of 4 at"):
            budget.require([Pure(3.9)])

    def test_say_what_is_spent_and_of_what(self, path):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        assert budget.spent() == budget.share() == 0
        with budget.release(Gaussian(4.0), 1):
            pass
        assert budget.spent() == pytest.approx(1 / 16) and budget.share() == pytest.approx(1 / 16 / budget.limit)

    def test_know_what_is_spent_at_the_cost_of_one_release(self, path, monkeypatch):
        """Fifty releases are priced once each, not anew for each that follows."""
        priced = []
        monkeypatch.setattr(filters, "cost", lambda *arguments: priced.append(arguments) or cost(*arguments))
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=50.0)
        for number in range(50):
            with budget.release(Gaussian(50.0 + number), number):
                pass
        assert len(priced) == 50
        assert budget.spent() == pytest.approx(sum((50.0 + number) ** -2 for number in range(50)))

    def test_have_a_delta_that_is_a_probability(self, path):
        for delta in (0.0, 1.0, -1.0, math.nan):
            with pytest.raises(ConfigError, match="target_delta must be above 0 and below 1"):
                PrivacyBudget(Ledger(path), "run", delta=delta)

    def test_judge_by_their_relation(self, path):
        write(path, [Gaussian(4.0)])
        adding, replacing = (
            PrivacyBudget(Ledger(path), "", relation=relation) for relation in ("add-or-remove", "replace-one")
        )
        assert replacing.epsilon() > 1.9 * adding.epsilon()


class TestEvents:
    JSON = (
        (UNSAMPLED, {"kind": "none", "probability": 1.0, "cohort": 0, "population": 0}),
        (Sampling("poisson", 0.5), {"kind": "poisson", "probability": 0.5, "cohort": 0, "population": 0}),
        (
            Sampling("without-replacement", cohort=2, population=3),
            {"kind": "without-replacement", "probability": 1.0, "cohort": 2, "population": 3},
        ),
    )

    @pytest.mark.parametrize(("sampling", "content"), JSON)
    def test_as_objects(self, sampling, content):
        gaussian = {"kind": "gaussian", "noise_multiplier": 2.0, "sampling": content}
        assert to_json(Gaussian(2.0, sampling)) == gaussian
        assert to_json(Repeated(Gaussian(2.0, sampling), 3)) == {"kind": "repeated", "event": gaussian, "count": 3}
        assert from_json(gaussian) == Gaussian(2.0, sampling)

    def test_others_as_objects(self):
        assert to_json(Pure(0.5)) == {"kind": "pure", "epsilon": 0.5}
        assert to_json(Laplace(0.5, 2.0)) == {"kind": "laplace", "epsilon": 0.5, "radius": 2.0}
        assert to_json(Unaccounted("why")) == {"kind": "unaccounted", "reason": "why"}
        assert from_json({"kind": "gaussian", "noise_multiplier": 2.0}) == Gaussian(2.0)

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (5, "an event must be a JSON object"),
            ({}, "unknown event kind None; known: gaussian, repeated, pure, unaccounted, laplace"),
            ({"kind": ["pure"]}, "unknown event kind ['pure']; known: gaussian, repeated, pure, unaccounted, laplace"),
        ],
    )
    def test_what_is_no_event_is_named(self, content, says):
        with pytest.raises(PrivacyError) as refused:
            from_json(content)
        assert str(refused.value).startswith(says), "other packages may have kinds of their own"

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (
                lambda: Sampling("shuffled"),
                "unknown kind of sampling 'shuffled'; known: none, poisson, without-replacement",
            ),
            (
                lambda: Sampling("poisson", 0.0),
                "a Poisson sampling probability must be above 0 and at most 1, got 0.0",
            ),
            (
                lambda: Sampling("poisson", 1.01),
                "a Poisson sampling probability must be above 0 and at most 1, got 1.01",
            ),
            (
                lambda: Sampling("without-replacement", cohort=3, population=2),
                "a cohort of 3 cannot be drawn from a population of 2",
            ),
            (
                lambda: Sampling("without-replacement", cohort=0, population=2),
                "a cohort of 0 cannot be drawn from a population of 2",
            ),
            (lambda: Gaussian("1"), "a noise multiplier must be a number"),
            (lambda: Gaussian(True), "a noise multiplier must be a number"),
            (lambda: Gaussian(9e-7), "a noise multiplier must be 0 or between 1e-06 and 1e+06, got 9e-07"),
            (lambda: Gaussian(1.1e6), "a noise multiplier must be 0 or between 1e-06 and 1e+06, got 1100000.0"),
            (lambda: Repeated(Pure(1.0), 2), "what is repeated must be a gaussian event"),
            (
                lambda: Repeated(Gaussian(1.0), 0),
                "a count of releases must be a whole number from 1 to 1000000000, got 0",
            ),
            (
                lambda: Repeated(Gaussian(1.0), 10**9 + 1),
                "a count of releases must be a whole number from 1 to 1000000000, got 1000000001",
            ),
            (lambda: Pure("1"), "the ε of a pure release must be a number"),
            (lambda: Pure(True), "the ε of a pure release must be a number"),
            (lambda: Pure(0.0), "the ε of a pure release must be finite and above 0, got 0.0"),
            (lambda: Pure(math.inf), "the ε of a pure release must be finite and above 0, got inf"),
            *[
                (
                    lambda numbers=numbers: Laplace(*numbers),
                    "a Laplace release has a finite ε above 0 and a finite radius of at least 0",
                )
                for numbers in ((0.0, 1.0), (math.inf, 1.0), (1.0, -0.1), (1.0, math.inf), (math.nan, 1.0))
            ],
        ],
    )
    def test_what_is_out_of_range_is_named(self, make, says):
        with pytest.raises(PrivacyError) as refused:
            make()
        assert str(refused.value) == says

    def test_the_ends_of_each_range(self):
        assert Gaussian(1e-6).noise_multiplier == 1e-6 and Gaussian(1e6).noise_multiplier == 1e6
        assert Gaussian(0.0).noise_multiplier == 0 and Gaussian(2).noise_multiplier == 2
        assert Repeated(Gaussian(1.0), 1).count == 1 and Repeated(Gaussian(1.0), 10**9).count == 10**9
        assert Sampling("poisson", 1.0).probability == 1 and Pure(5).epsilon == 5 and Pure(1e-9).epsilon == 1e-9
        assert Sampling("without-replacement", cohort=1, population=1).cohort == 1
        assert Laplace(1e-9, 0.0).leakage == 0 and Laplace(0.5, 3.0).leakage == 1.5
        assert Sampling() == Sampling("none", 1.0, 0, 0) == UNSAMPLED == Gaussian(1.0).sampling
        assert Sampling("none", probability=5.0, cohort=9).probability == 5, "no claim is made about it"


class TestLines:
    """What stands in the file, field by field."""

    def test_an_entry(self, path):
        ledger = Ledger(path)
        release = ledger.open(Gaussian(1.0), "example", "run", 7, lambda: None, "by", 2.5)
        expected = Entry(release, "run", 7, "example", "by", 2.5, Gaussian(1.0), today())
        assert ledger.entries == [expected] == Ledger(path).entries and expected.done is False
        (line,) = lines_of(path)
        assert line["v"] == 3 and line["seq"] == 0 and line["kind"] == "open" and line["previous"] == GENESIS
        assert ledger.head == line["hash"] == line_hash(line)
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

    @pytest.mark.parametrize(
        ("line", "changes", "says"),
        [
            (0, {"v": 0}, "line 1: not a line of a ledger of version 3"),
            (0, {"v": True}, "line 1: not a line of a ledger of version 3"),
            (0, {"v": 1}, "line 1: not a line of a ledger of version 3" + OLD.format(1)),
            (2, {"v": 2}, "line 3: not a line of a ledger of version 3" + OLD.format(2)),
            (2, {"kind": "reset"}, "line 3: unknown kind or fields"),
            (2, {"unit": "patient"}, "line 3: unknown unit 'patient'; known: client, example, group, neighbourhood"),
            (2, {"release": 7}, "line 3: 7 is no id of a new release"),
            (3, {"release": "never"}, "line 4: release 'never' was never opened"),
        ],
    )
    def test_of_a_line_that_is_not_understood(self, path, line, changes, says):
        assert self.refusal(path, line, changes) == says

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"filter": {"kind": "pld"}}, "line 2: unknown kind of filter 'pld'; known: gaussian, renyi"),
            (
                {"filter": {"kind": "renyi", "order": 3.0}},
                "line 2: the filter of unit 'client' is another than that of its first budget",
            ),
            ({"relation": "swap"}, "line 2: unknown relation 'swap'"),
        ],
    )
    def test_of_a_budget(self, path, changes, says):
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


class TestABudgetToTheLetter:
    def test_what_it_is_about_unless_said(self, path):
        budget = PrivacyBudget(Ledger(path), "run")
        assert (budget.unit, budget.delta, budget.max_epsilon, budget.relation) == (
            "client",
            1e-5,
            0.0,
            "add-or-remove",
        )
        assert budget.kind == "gaussian" and PrivacyBudget(Ledger(path), "run", "example").kind == "renyi"
        assert PrivacyBudget(Ledger(path), "run", "example", kind="gaussian").kind == "gaussian"

    def test_a_budget_below_zero_is_none(self, path):
        with pytest.raises(ConfigError, match="max_epsilon must be >= 0, got -1"):
            PrivacyBudget(Ledger(path), "run", max_epsilon=-1.0)

    @pytest.mark.parametrize("delta", [0.0, 1.0])
    def test_a_delta_that_is_no_probability(self, path, delta):
        with pytest.raises(ConfigError) as refused:
            PrivacyBudget(Ledger(path), "run", delta=delta)
        assert str(refused.value) == f"target_delta must be above 0 and below 1, got {delta}"

    def test_a_run_begins_under_its_name_with_its_budget(self, path):
        budget = PrivacyBudget(Ledger(path), "", "example", 1e-6, 3.0, "replace-one")
        budget.begin("seven")
        expected = filter_for("renyi", 3.0, 1e-6)
        assert budget.ledger.budgets == [Budget("seven", "example", 1e-6, 3.0, "replace-one", expected, today())]
        with budget.release(Gaussian(9.0), 4, "by", 2.0):
            (entry,) = budget.ledger.entries
            assert (entry.run, entry.round, entry.unit, entry.mechanism) == ("seven", 4, "example", "by")
            assert (entry.clip, entry.event, entry.done) == (2.0, Gaussian(9.0), False)
        assert budget.ledger.entries[0].done
        with budget.release(Gaussian(9.0), 5):
            pass
        assert (budget.ledger.entries[1].mechanism, budget.ledger.entries[1].clip) == ("", 0.0)

    def test_accounts_of_a_run_and_of_all(self, path):
        drawn = Sampling("without-replacement", cohort=1, population=100)
        ledger = Ledger(path)
        for run, unit, event in (
            ("one", "client", Gaussian(4.0, drawn)),
            ("two", "client", Gaussian(3.0, drawn)),
            ("one", "example", Gaussian(2.0)),
            ("two", "example", Gaussian(1.5)),
        ):
            ledger.open(event, unit, run, 1, lambda: None)
        budget = PrivacyBudget(ledger, "one", relation="replace-one")

        def same(found, events, insiders):
            assert (found.relation, found.insiders) == ("replace-one", insiders)
            assert found.epsilon(1e-5) == Account(events, "replace-one", insiders).epsilon(1e-5)

        same(budget.account(), [Gaussian(4.0, drawn), Gaussian(3.0, drawn)], True)
        same(budget.account_of_run(), [Gaussian(4.0, drawn)], True)
        same(budget.account_of_run(insiders=False), [Gaussian(4.0, drawn)], False)
        planned = Account([Gaussian(9.0)], "replace-one", True)
        same(budget.account_with(planned), [Gaussian(9.0), Gaussian(3.0, drawn)], True)
        assert budget.epsilon() == budget.account().epsilon(1e-5, "pld")

    def test_a_share_of_no_limit(self, path):
        """ε = 0.001 has no room under a Rényi filter: nothing spent is nothing, and anything is too much."""
        budget = PrivacyBudget(Ledger(path), "run", "example", max_epsilon=1e-3)
        assert (budget.limit, budget.share()) == (0, 0)
        budget.ledger.open(Gaussian(5.0), "example", "run", 1, lambda: None)
        assert budget.share() == math.inf

    def test_what_is_recorded_as_unprotected(self, path):
        budget = PrivacyBudget(Ledger(path), "run", "group", max_epsilon=1.0)
        budget.record_unprotected("why")
        (entry,) = budget.ledger.entries
        assert (entry.event, entry.unit, entry.run, entry.round) == (Unaccounted("why"), "group", "run", 0)

    def test_all_events_of_a_message_count_together(self, path):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        half = Gaussian(math.sqrt(2 / budget.limit) * (1 + 1e-9))
        budget.require([half, half])
        with pytest.raises(BudgetExhausted) as refused:
            budget.require([half, half, half])
        assert str(refused.value) == (
            "the next release would bring what is spent from 0 % to 150 %, past the budget of 2 at δ = 1e-05 "
            "(by Gaussian DP)"
        )
        with budget.release(half, 1):
            pass
        budget.require([half])
        with pytest.raises(BudgetExhausted, match=r"from 50 % to 150 %"):
            budget.require([half, half])
        with pytest.raises(BudgetExhausted) as refused:
            budget.require([Unaccounted("x")])
        assert str(refused.value) == (
            f"{path} holds, or would hold, releases for which nothing can be claimed: no ε up to 2 covers them; if "
            "this is other data, give it another data-identity"
        )
