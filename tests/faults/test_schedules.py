"""Runs under faults on purpose: nothing is lost, nothing is released that is not recorded, nobody waits for ever."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from schedules import KINDS, Broken, Schedule, Simulation, cheap, everywhere, happened, many, memory, undisturbed
from virtual_disk import ERRORS, FAULTS, KILL, POWER, Killed
from virtual_grid import HARMFUL, HARMLESS, ForEver

from cloister.privacy.accounting.budget import PrivacyBudget, recorded
from cloister.privacy.accounting.ledger import Ledger
from cloister.server import private_strategy, screening
from cloister.server import run as running
from cloister.server.checkpoint import Progress
from cloister.server.polling_grid import PollingGrid
from cloister.server.reports import rundir
from cloister.utils import files
from cloister.utils.errors import CloisterError

FEW, PART = range(16, 24), 250


@pytest.fixture(autouse=True)
def quickly():
    with cheap():
        yield


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=memory()) as place:
        yield Path(place)


def test_a_line_whose_writer_died_before_its_sync_is_on_disk_before_it_is_counted_on():
    """Killed as it synced its budget; the next process found that line, noted it as there, and lost its power."""
    happened(Schedule(987, "private", ("quick",), ({16: KILL}, {effect: POWER})) for effect in range(22, 30))


def test_some_schedules():
    done = many(FEW)
    assert done["schedules"] == done["as-asked"] + done["budget"] == len(FEW)
    assert all(done[what] for what in (*FAULTS, "budget")), "every kind of fault has happened, and a budget was spent"


PARTS = [pytest.param(first, marks=pytest.mark.long if first else pytest.mark.slow) for first in range(0, 10_000, PART)]


@pytest.mark.parametrize("first", PARTS)
def test_many_schedules(first):
    """The first 13 of them find each of the broken twins below."""
    assert many(range(first, first + PART))["schedules"] == PART


@pytest.mark.slow
def test_killed_at_every_effect():
    done = happened(everywhere("private", (KILL,)))
    assert done["schedules"] == done[KILL] > 250 and done["processes"] > 1.9 * done["schedules"]


def test_a_run_is_announced_before_anything_that_may_take_long(folder, monkeypatch):
    """Its supervisor would otherwise begin it anew, under a name that is taken."""
    monkeypatch.setenv(rundir.ANNOUNCED, str(folder / "announced"))
    monkeypatch.setattr(running, "write_traces_to", _dies)
    simulation = Simulation(folder / "of", "plain")
    simulation.live()
    assert (folder / "announced").read_text() == str(simulation.directory)


@pytest.mark.parametrize("kind", KINDS)
def test_an_undisturbed_run_records_each_release_once(folder, kind):
    simulation = Simulation(folder, kind)
    simulation.live()
    assert simulation.ending == "as-asked" and simulation.lives == 1
    assert [entry["round"] for entry in simulation._entries()] == ([] if kind == "plain" else [1, 2])


def _dies(*_):
    raise Killed


class Faults(RuleBasedStateMachine):
    """For any fate of one process of a run after the other, it comes to its end and keeps its promises."""

    @initialize(kind=strategies.sampled_from(sorted(KINDS)), seed=strategies.integers(0, 2**32))
    def begin(self, kind, seed):
        self.place = tempfile.TemporaryDirectory(dir=memory())
        self.run = Simulation(Path(self.place.name) / "of", kind, seed)

    @rule(fault=strategies.sampled_from(FAULTS), effect=strategies.integers(1, 320))
    def a_disk_fails(self, fault, effect):
        self._live({effect: fault}, HARMLESS)

    @rule(
        error=strategies.sampled_from(ERRORS),
        end=strategies.sampled_from((KILL, POWER)),
        at=strategies.integers(1, 300),
    )
    def a_disk_fails_and_then_the_machine(self, error, end, at):
        self._live({at: error, at + 1: end}, HARMLESS)

    @rule(fates=strategies.sets(strategies.sampled_from(HARMFUL), min_size=1), effect=strategies.integers(1, 320))
    def nodes_fail_and_the_server_dies(self, fates, effect):
        self._live({effect: KILL}, (*HARMLESS, *sorted(fates)))

    def _live(self, faults, fates):
        if not self.run.is_over:
            self.run.faults = fates
            self.run.live(faults)

    @invariant()
    def what_there_is_can_be_read(self):
        self.run.check()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.faults = HARMLESS
            self.run.to_the_end()
            self.place.cleanup()


def rules(examples):
    """The machine, for so many histories; the same each time."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=4,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return type(f"Faults{examples}", (Faults,), {}), chosen


def test_any_history():
    machine, chosen = rules(4)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.slow
def test_many_histories():
    machine, chosen = rules(30)
    run_state_machine_as_test(machine, settings=chosen)


# --- broken twins: each of them is caught by what the schedules look at ---


class Twins:
    """Cloister with one thing wrong."""

    @staticmethod
    def records_after_the_release(patch):
        @contextmanager
        def late(planned):
            yield
            with recorded(planned):
                pass

        patch.setattr(private_strategy, "recorded", late)

    @staticmethod
    def asks_no_budget(patch):
        patch.setattr(PrivacyBudget, "require", lambda self, events: None)

    @staticmethod
    def counts_a_reply_twice(patch):
        def fit(replies, asked, read, rejected):
            return (read(message) for message in replies if not message.has_error())

        patch.setattr(screening, "fitting", fit)

    @staticmethod
    def forgets_moments(patch):
        patch.setattr(Progress, "restore", lambda self, parts: None)

    @staticmethod
    def waits_for_ever(patch):
        wait = PollingGrid.send_and_receive
        patch.setattr(PollingGrid, "send_and_receive", lambda self, messages, *, timeout=None: wait(self, messages))

    @staticmethod
    def names_a_round_before_it_is_written(patch):
        def save(self, directory, keep):
            directory.write_json("state.json", {"version": 1, "round": self.round, "arrays": bool(self.state)})
            files.write_npz(directory.path / f"state-{self.round:05d}.npz", self.state)

        patch.setattr(Progress, "save", save)

    @staticmethod
    def writes_in_place(patch):
        @contextmanager
        def atomic_path(path):
            yield path

        patch.setattr(files, "atomic_path", atomic_path)
        patch.setattr(rundir, "atomic_path", atomic_path)

    @staticmethod
    def syncs_no_file(patch):
        @contextmanager
        def atomic_path(path):
            partial = path.with_name(f".{path.name}.partial{path.suffix}")
            yield partial
            partial.replace(path)
            files.sync_folder(path.parent)

        patch.setattr(files, "atomic_path", atomic_path)
        patch.setattr(rundir, "atomic_path", atomic_path)

    @staticmethod
    def syncs_no_ledger(patch):
        def write(self, file, data):
            file.write(data)
            file.flush()

        patch.setattr(Ledger, "_write", write)

    @staticmethod
    def begins_a_ledger_anew(patch):
        begin = PrivacyBudget.begin

        def forgetful(self, run):
            self.ledger.path.unlink(missing_ok=True)
            self.ledger = Ledger(self.ledger.path)
            begin(self, run)

        patch.setattr(PrivacyBudget, "begin", forgetful)


UNREADABLE = "is not what a run writes|cannot be read|no JSON|no run directory"
TWINS = {
    "records_after_the_release": "1 releases were drawn, and the ledger has 0",
    "asks_no_budget": "passes the budget",
    "counts_a_reply_twice": "not that of an undisturbed run",
    "forgets_moments": "not that of an undisturbed run",
    "waits_for_ever": "still waiting",
    "names_a_round_before_it_is_written": r"is missing, and .* goes with it",
    "writes_in_place": UNREADABLE,
    "syncs_no_file": UNREADABLE,
    "syncs_no_ledger": "the ledger has",
    "begins_a_ledger_anew": "the ledger has",
}


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_is_caught(twin, monkeypatch):
    undisturbed("plain")  # before anything is broken
    getattr(Twins, twin)(monkeypatch)
    with pytest.raises((Broken, ForEver, CloisterError), match=TWINS[twin]):
        many(range(50))
