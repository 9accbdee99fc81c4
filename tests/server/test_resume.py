"""A run that dies at any instant goes on as the same run, or says why it cannot."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.core.errors import ConfigError, LedgerError
from cloister.local.grid import LocalGrid
from cloister.local.simulation import simulate
from cloister.privacy.accounting.account import Account, best_epsilon, composed
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.meaning import meanings
from cloister.privacy.claims.record import statement_of
from cloister.privacy.claims.words import render, render_clients
from cloister.server.reports.console import Narrator
from cloister.server.reports.rundir import RunDirectory
from cloister.server.resume import settings_of
from cloister.server.run import run
from cloister.strategies import STRATEGIES
from cloister.strategies.fedopt import FedYogi

LINEAR = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "tensorboard": False,
    "report": False,
    "run-name": "r",
    "seed": 1,
    "num-rounds": 3,
    "privacy.server": "none",
}
PRIVATE = LINEAR | {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
CLIENTS = 4


def go(folder, settings, clients=CLIENTS):
    return simulate(settings | {"output-dir": str(folder)}, clients, Narrator(3, Console(quiet=True)))


def resume(folder, settings=None, clients=None, narrator=None):
    given = {"resume": str(folder / "r")} | (settings or {})
    return simulate(given, clients, narrator or Narrator(3, Console(quiet=True)))


def numbers(outcome):
    return {name: array.numpy() for name, array in outcome.arrays.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def lines(folder):
    """The rounds as they were written, but for how long they took."""
    written = [json.loads(line) for line in (folder / "r" / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in written]


def claims(folder):
    path = folder / "r" / "privacy.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Deaths:
    """What is on the disk at every instant of a run at which a process that dies leaves something else.

    Args:
        folder: the output-dir.
        store: where copies of it go.
    """

    def __init__(self, folder, store):
        self.folder, self.store, self.count = folder, store, 0
        store.mkdir()

    @contextmanager
    def recorded(self):
        """The block, with a copy before and after every change of a name, every sync, every exchange of messages."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (LocalGrid, "send_and_receive")):
                patch.setattr(owner, name, self._watched(getattr(owner, name)))
            yield self

    def _watched(self, call):
        def watched(*arguments, **options):
            self._copy()
            try:
                return call(*arguments, **options)
            finally:
                self._copy()

        return watched

    def _copy(self):
        if (self.folder / "r" / "config.json").exists():
            shutil.copytree(self.folder, self.store / str(self.count))
            self.count += 1

    def at(self, instant):
        """Put the disk back to what it was."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.store / str(instant), self.folder)

    def different(self):
        """Instants, but those that left the same files as an earlier one."""
        seen = set()
        for instant in range(self.count):
            root = self.store / str(instant)
            files = sorted(path for path in root.rglob("*") if path.is_file())
            found = tuple((str(path.relative_to(root)), path.read_bytes()) for path in files if path.name != ".reserve")
            if found not in seen:
                seen.add(found)
                yield instant


@pytest.fixture
def died(tmp_path):
    """A function that runs to the end: the run's folder, its outcome, and every instant at which it could have died."""

    def start(settings):
        deaths = Deaths(tmp_path / "runs", tmp_path / "deaths")
        with deaths.recorded():
            outcome = go(tmp_path / "runs", settings)
        return tmp_path / "runs", outcome, deaths

    return start


CASES = {
    "yogi": {"strategy.name": "fedyogi", "strategy.fraction-train": 0.5},
    "momentum": {"strategy.name": "fedavgm", "keep-checkpoints": 1},
    "patience": {"client.learning-rate": 0.9, "evaluation.patience": 2, "num-rounds": 6},
    "hypotheses": {"privacy.server": "laplace-clustering", "strategy.name": "fedadam"},
}


class TestWithoutNoise:
    """Wherever the process died, the resumed run ends with the same model, bit for bit."""

    def assert_goes_on(self, died, settings, every):
        folder, whole, deaths = died(LINEAR | settings)
        written, instants = lines(folder), list(deaths.different())
        assert len(instants) > 30
        for instant in instants[::every]:
            deaths.at(instant)
            if "ended" in claims(folder):
                with pytest.raises(ConfigError, match="nothing to resume: the run ended in order"):
                    resume(folder)
                continue
            resumed = resume(folder)
            assert_same(numbers(whole), numbers(resumed))
            assert lines(folder) == written
            assert (resumed.ended, resumed.stopped) == (whole.ended, whole.stopped)
        assert bool(whole.stopped) == ("evaluation.patience" in settings)

    @pytest.mark.parametrize("case", ["yogi", pytest.param("patience", marks=pytest.mark.slow)])
    def test_killed_at_some_instants(self, died, case):
        self.assert_goes_on(died, CASES[case], every=7)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES)
    def test_killed_at_any_instant(self, died, case):
        self.assert_goes_on(died, CASES[case], every=1)


class TestWithNoise:
    """Every release is in the ledger, the budget is never passed, and claims count everything."""

    BUDGET = PRIVATE | {"privacy.max-epsilon": 5.0, "privacy.noise-multiplier": 1.7}

    def ledger(self, folder):
        (path,) = (folder / "ledgers").iterdir()
        return Ledger(path)

    def test_killed_at_any_instant(self, died):
        folder, _whole, deaths = died(self.BUDGET)
        instants = list(deaths.different())
        repeated, ends = set(), set()
        for instant in instants[::3]:
            deaths.at(instant)
            if "ended" in claims(folder):
                continue
            before = (
                {entry.release for entry in self.ledger(folder).entries} if (folder / "ledgers").exists() else set()
            )
            resumed = resume(folder)
            ledger = self.ledger(folder)
            assert before <= {entry.release for entry in ledger.entries}, "what was recorded stays spent"
            budget = PrivacyBudget(ledger, "r", max_epsilon=5.0)
            assert budget.share() <= 1
            epsilon, _ = best_epsilon(budget.account_of_run(), 1e-5)
            this, everything = claims(folder)["claims"][0], claims(folder)["claims"][1]
            assert this["epsilon"] >= epsilon and everything["epsilon"] == 5.0
            if resumed.plan.resumes:
                assert "broke the run off" in this["condition"]
            repeated.add(len(ledger.entries) - resumed.rounds[-1].number)
            ends.add(resumed.ended)
        assert repeated == {0, 1} and "as-asked" in ends

    def test_a_round_that_is_made_again_has_noise_of_its_own(self, died):
        """The release of the last round is recorded, made, and lost; the one in its place is another."""
        folder, _whole, deaths = died(PRIVATE)
        instant = max(instant for instant in deaths.different() if state_round(deaths.store / str(instant)) == 2)
        deaths.at(instant)
        lost = np.load(folder / "r" / "checkpoints" / "round-00003.npz")
        resumed = resume(folder)
        releases = [entry.round for entry in Ledger(folder / "r" / "ledger.jsonl").entries if entry.round]
        assert sorted(releases) == [1, 2, 3, 3]
        assert all((lost[name] != array).all() for name, array in numbers(resumed).items())

    @pytest.mark.slow
    def test_a_budget_that_a_lost_release_has_used_up_ends_the_run_in_order(self, died):
        settings = PRIVATE | {"privacy.max-epsilon": 5.0, "privacy.noise-multiplier": "auto"}
        folder, whole, deaths = died(settings)
        deaths.at(max(i for i in deaths.different() if state_round(deaths.store / str(i)) == 1))
        resumed = resume(folder)
        assert whole.ended == "as-asked" and resumed.ended == "budget" and resumed.rounds[-1].number == 2
        multipliers = {outcome.plan.strategy.mechanism.multiplier for outcome in (whole, resumed)}
        assert len(multipliers) == 1, "noise is calibrated once"

    def test_an_end_that_somebody_chose_is_claimed_with_every_round_that_may_have_been_released_twice(self, tmp_path):
        shorter = stopped_after(tmp_path, PRIVATE, 1)
        planned = shorter.privacy["claims"][0]
        again = stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
        more = again.privacy["claims"][0]
        assert (
            planned["counts"] == more["counts"]
            and "condition" not in planned
            and "broke the run off" in more["condition"]
        )
        assert more["epsilon"] == pytest.approx(planned_account(again).epsilon(1e-5, "pld"), rel=1e-3)
        assert more["epsilon"] > planned["epsilon"]
        (meaning,) = meanings(statement_of(again.privacy))
        assert "if nobody broke the run off, and resumed it, because of what had been released" in meaning.how_much
        everything = again.privacy["claims"][1]
        assert everything["epsilon"] == pytest.approx(more["epsilon"], rel=1e-9), "its own rounds are counted once"


def state_round(folder):
    path = folder / "r" / "state.json"
    return json.loads(path.read_text())["round"] if path.exists() else -1


def layout_of(outcome):
    from cloister.core.arrays import Layout, from_record

    return Layout.of(from_record(outcome.arrays))


def planned_account(outcome):
    return composed(outcome.plan.planned(layout_of(outcome)), "add-or-remove", insiders=True)


def stopped_after(folder, settings, rounds):
    """A run that the operator ends after so many more rounds."""

    class Stopping(Narrator):
        seen = 0

        def __call__(self, done, arrays):
            super().__call__(done, arrays)
            self.seen += done.number > 0
            if self.seen == rounds:
                signal.raise_signal(signal.SIGTERM)

    given = settings if "resume" in settings else settings | {"output-dir": str(folder)}
    outcome = simulate(given, None if "resume" in settings else CLIENTS, Stopping(3, Console(quiet=True)))
    assert outcome.ended == "operator"
    return outcome


class TestRefusals:
    @pytest.fixture(scope="class")
    def stopped(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("runs")
        stopped_after(folder, PRIVATE, 1)
        return folder

    @pytest.mark.parametrize(
        ("key", "value", "before"),
        [
            ("task.name", "digits", "'linear'"),
            ("seed", 2, "1"),
            ("strategy.name", "fedavgm", "'fedavg'"),
            ("strategy.min-nodes", 3, "2"),
            ("privacy.noise-multiplier", 3.0, "2.0"),
            ("privacy.data-identity", "other", "''"),
            ("privacy.max-epsilon", 9.0, "0.0"),
            ("evaluation.every", 2, "1"),
            ("client.learning-rate", 0.5, "'auto'"),
            ("output-dir", "elsewhere", "'"),
        ],
    )
    def test_of_what_would_be_another_run(self, stopped, key, value, before):
        config = parse(settings_of(stopped / "r") | {key: value})
        with pytest.raises(ConfigError, match=f"^{key} = {value!r} differs from {before}") as caught:
            run(LocalGrid.simulated(app, config.flat(), CLIENTS), config, clients=CLIENTS)
        assert "with which the run began" in str(caught.value) and len(str(caught.value).splitlines()) == 1

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"num-rounds": 2}, "num-rounds = 2 is fewer than the 3"),
            ({"num-rounds": 4}, "num-rounds = 4 contradicts the claim of the run that is resumed, which had 3"),
        ],
    )
    def test_of_another_length(self, stopped, settings, says):
        with pytest.raises(ConfigError, match=says):
            resume(stopped, settings)

    def test_of_another_number_of_clients(self, stopped):
        with pytest.raises(ConfigError, match="clients = 5 differs from 4"):
            resume(stopped, clients=5)

    def test_of_no_run(self, tmp_path):
        with pytest.raises(ConfigError, match=r"is no run directory: config\.json: FileNotFoundError"):
            resume(tmp_path)

    def test_of_a_run_that_lives(self, stopped):
        with RunDirectory(stopped / "r").held(), pytest.raises(ConfigError, match="a process of this machine is at"):
            resume(stopped)
        assert not (stopped / "r" / "running").exists()

    def test_of_another_ledger(self, stopped, tmp_path):
        shutil.copytree(stopped, tmp_path / "copy")
        moved = {"output-dir": str(stopped)}
        (tmp_path / "copy" / "r" / "ledger.jsonl").write_text("")
        with pytest.raises(LedgerError, match="holds 0 of the 1 releases that this run has made"):
            simulate({"resume": str(tmp_path / "copy" / "r")} | moved, None, Narrator(3, Console(quiet=True)))

    def test_of_another_ledger_though_no_release_was_published(self, tmp_path, monkeypatch):
        """A relative output-dir leads elsewhere from another folder, where the budget would begin at zero."""
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / "here")
        checkpoint = RunDirectory.checkpoint

        def dying(directory, number, arrays):
            if number:
                raise RuntimeError("killed")
            checkpoint(directory, number, arrays)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            patch.setattr(RunDirectory, "checkpoint", dying)
            go("runs", PRIVATE | {"privacy.max-epsilon": 9.0})
        monkeypatch.chdir(tmp_path / "there")
        with pytest.raises(ConfigError, match=r"ledger would be .*/there/runs/ledgers/.*, and was .*/here/runs/l"):
            resume(tmp_path / "here" / "runs")
        assert not list((tmp_path / "there").iterdir())
        monkeypatch.chdir(tmp_path / "here")
        (ledger,) = Path("runs/ledgers").iterdir()
        ledger.rename("kept")
        with pytest.raises(ConfigError, match="lacks lines that were in it when the run began"):
            resume(tmp_path / "here" / "runs")
        Path("kept").rename(ledger)
        resume(tmp_path / "here" / "runs")
        assert len(Ledger(ledger).entries) == 4, "the release that was never published, and one for each round"

    FILES = ("config.json", "simulation.json", "state.json", "state-00001.npz", "checkpoints/round-00001.npz")

    @pytest.mark.parametrize("name", [*FILES, "rounds.jsonl", "nodes.json", "ledger.json"])
    @pytest.mark.parametrize(
        "content", ["[1]\n", '{"round": []}\n', "PK\x03\x04\n", "[" * 200_000 + "\n"], ids=range(4)
    )
    def test_of_files_that_no_run_wrote(self, stopped, tmp_path, name, content):
        shutil.copytree(stopped / "r", tmp_path / "r")
        (tmp_path / "r" / name).write_text(content)
        with pytest.raises(ConfigError, match=r"^resume"):
            resume(tmp_path)

    def test_of_a_checkpoint_without_anything(self, stopped, tmp_path):
        shutil.copytree(stopped / "r", tmp_path / "r")
        (tmp_path / "r" / "checkpoints" / "round-00001.npz").write_bytes(b"")
        with pytest.raises(ConfigError, match=r"state\.json and its checkpoint cannot be read: BadZipFile"):
            resume(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value"), [("config", None), ("config", [1]), ("seed", "x"), ("seed", 1e999), ("resumed-after", 3)]
    )
    def test_of_facts_that_no_run_wrote(self, stopped, tmp_path, key, value):
        shutil.copytree(stopped / "r", tmp_path / "r")
        path = tmp_path / "r" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        with pytest.raises(ConfigError, match=r"config\.json is not what a run writes"):
            resume(tmp_path)

    def test_of_canaries_that_are_not_its_own(self, tmp_path):
        """A state with others, or with some for a run without any, which its draws may not go with."""
        stopped_after(tmp_path, PRIVATE | {"privacy.canaries": 20}, 1)
        path = tmp_path / "r" / "state-00001.npz"
        with np.load(path) as saved:
            arrays = dict(saved)
        np.savez(path, **arrays | {"strategy/canaries/coins": np.ones(9, bool)})
        with pytest.raises(ConfigError, match="what was saved of the run's strategy does not fit: ValueError"):
            resume(tmp_path)

    def test_of_noise_that_is_not_its_own(self, stopped, tmp_path):
        """What is claimed of planned rounds would be that of more noise than there was."""
        shutil.copytree(stopped / "r", tmp_path / "r")
        path = tmp_path / "r" / "state-00001.npz"
        with np.load(path) as saved:
            arrays = dict(saved)
        np.savez(path, **arrays | {"strategy/mechanism/noise-multiplier": np.array(100.0)})
        with pytest.raises(ConfigError, match="what was saved of the run's strategy does not fit: ValueError"):
            resume(tmp_path)

    def test_of_noise_that_would_repeat(self, tmp_path):
        stopped_after(tmp_path, PRIVATE | {"privacy.noise-seed": 7}, 1)
        with pytest.raises(ConfigError, match=r"privacy\.noise-seed = 7 would add the noise of the first rounds"):
            resume(tmp_path)

    def test_of_a_state_of_another_version(self, stopped, tmp_path):
        shutil.copytree(stopped / "r", tmp_path / "r")
        (tmp_path / "r" / "state.json").write_text('{"version": 2, "round": 1, "arrays": true}')
        with pytest.raises(ConfigError, match="has version 2, and this Cloister reads 1"):
            resume(tmp_path)

    def test_of_a_missing_checkpoint(self, stopped, tmp_path):
        shutil.copytree(stopped / "r", tmp_path / "r")
        (tmp_path / "r" / "checkpoints" / "round-00001.npz").unlink()
        with pytest.raises(ConfigError, match=r"round-00001\.npz is missing"):
            resume(tmp_path)

    def test_of_another_model(self, stopped, tmp_path):
        shutil.copytree(stopped / "r", tmp_path / "r")
        path = tmp_path / "r" / "checkpoints" / "round-00001.npz"
        with np.load(path) as saved:
            arrays = dict(saved)
        name = next(iter(arrays))
        np.savez(path, **arrays | {name: np.zeros(7, np.float32)})
        with pytest.raises(ConfigError, match=rf"array '{name}' of the model is .* and was float32 of shape \(7,\)"):
            resume(tmp_path)

    def test_a_refused_run_can_still_be_resumed(self, tmp_path):
        stopped_after(tmp_path, PRIVATE, 1)
        with pytest.raises(ConfigError):
            resume(tmp_path, {"seed": 9})
        begun = json.loads((tmp_path / "r" / "config.json").read_text())["begun"]
        assert resume(tmp_path).ended == "as-asked"
        found = json.loads((tmp_path / "r" / "config.json").read_text())
        assert found["begun"] == begun and found["resumed-after"] == [1]
        with pytest.raises(ConfigError, match="after all 3 rounds"):
            resume(tmp_path)


class TestTheLock:
    def test_one_whose_file_was_taken_away_in_the_meantime_is_none(self, tmp_path, monkeypatch):
        """The process before ends between the moments in which this one opens the file and locks it."""
        import fcntl

        flock = fcntl.flock

        def late(lock, how):
            (tmp_path / "running").unlink()
            flock(lock, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(ConfigError, match="a process of this machine is at"), RunDirectory(tmp_path).held():
            pytest.fail("another process could lock a file of the same name")

    @pytest.mark.parametrize("name", ["running", ".reserve"])
    def test_no_file_is_cut_off_through_a_link(self, tmp_path, name):
        (tmp_path / "mine").write_text("keep")
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / name).symlink_to(tmp_path / "mine")
        directory = RunDirectory(tmp_path / "r")
        if name == "running":
            with pytest.raises(OSError, match="symbolic links"), directory.held():
                pytest.fail("the link was followed")
        else:
            directory.reserve(0)
        assert (tmp_path / "mine").read_text() == "keep"

    def test_what_was_resumed_before_is_read_with_the_lock_held(self, tmp_path, monkeypatch):
        stopped_after(tmp_path, PRIVATE, 1)
        held = RunDirectory.held

        @contextmanager
        def after_another(directory):
            monkeypatch.setattr(RunDirectory, "held", held)
            stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
            with held(directory) as found:
                yield found

        monkeypatch.setattr(RunDirectory, "held", after_another)
        assert resume(tmp_path).plan.resumes == 2


class TestClaimsOfADirectoryThatWasMoved:
    """What a run is said to have released does not depend on where its directory is, or what was in it before."""

    def test_a_new_name_leaves_nothing_out(self, tmp_path):
        go(tmp_path / "whole", PRIVATE)
        stopped_after(tmp_path / "parts", PRIVATE, 2)
        (tmp_path / "parts" / "r").rename(tmp_path / "parts" / "renamed")
        simulate({"resume": str(tmp_path / "parts" / "renamed")}, None, Narrator(3, Console(quiet=True)))
        (tmp_path / "parts" / "renamed").rename(tmp_path / "parts" / "r")
        assert claims(tmp_path / "parts")["claims"][0]["epsilon"] == claims(tmp_path / "whole")["claims"][0]["epsilon"]
        assert {entry.run for entry in Ledger(tmp_path / "parts" / "r" / "ledger.jsonl").entries} == {"r"}

    def test_a_page_with_an_earlier_claim_does_not_stay(self, tmp_path):
        stopped_after(tmp_path, PRIVATE, 1)
        (tmp_path / "r" / "report.html").write_text("ε of what was released until then")
        resume(tmp_path)
        assert not (tmp_path / "r" / "report.html").exists()

    def test_an_earlier_copy_leaves_nothing_out(self, tmp_path):
        lasting = PRIVATE | {"privacy.data-identity": "d"}
        stopped_after(tmp_path, lasting, 1)
        shutil.copytree(tmp_path / "r", tmp_path / "copy")
        for _ in range(4):
            shutil.rmtree(tmp_path / "r")
            shutil.copytree(tmp_path / "copy", tmp_path / "r")
            outcome = stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
        recorded = PrivacyBudget(Ledger(tmp_path / "ledgers" / "d.jsonl"), "r").account_of_run()
        planned = planned_account(outcome)
        claimed = claims(tmp_path)["claims"][0]["epsilon"]
        assert claimed == best_epsilon(recorded, 1e-5)[0] > best_epsilon(planned, 1e-5)[0]

    @pytest.mark.parametrize("client", ["gaussian", "laplace"])
    def test_what_clients_are_told_rests_on_the_same_condition(self, tmp_path, client):
        """The server decides how often it resumes, and clients' claims are about the server."""
        bound = "privacy.client-clipping-norm" if client == "gaussian" else "privacy.radius"
        noise = {"privacy.client": client, "privacy.client-noise-multiplier": 50.0, bound: 1.0}
        stopped_after(tmp_path, LINEAR | noise, 1)
        assert not any("condition" in figure for figure in claims(tmp_path)["clients"]["claims"])
        outcome = resume(tmp_path)
        found = claims(tmp_path)["clients"]["claims"]
        assert found and all("broke the run off" in figure["condition"] for figure in found)
        said = statement_of(outcome.privacy)
        assert "broke the run off" in render_clients(said.clients)[-2]
        assert any("broke the run off" in meaning.how_much for meaning in meanings(said))

    def test_releases_of_other_runs_cannot_be_called_its_own(self, tmp_path):
        """A state that names them would have what all runs have released counted without them."""
        ledger = Ledger(tmp_path / "ledger.jsonl")
        other = PrivacyBudget(ledger, "other")
        ids = [other.spend(Gaussian(1.0), number) for number in (1, 2)]
        own = PrivacyBudget(ledger, "own")
        own.load_state_dict({"opened": np.array([list(bytes.fromhex(release)) for release in ids], np.uint8)})
        nothing = Account((), "add-or-remove", insiders=True)
        assert own.account_with(nothing).epsilon(1e-5, "pld") == other.account().epsilon(1e-5, "pld")


class Remembering(FedYogi):
    """A strategy of another package that says what it keeps."""

    __module__ = "elsewhere"

    def state_dict(self):
        return super().state_dict()

    def load_state_dict(self, state):
        super().load_state_dict(state)


class Forgetful(FedYogi):
    """One that inherits the hooks, and does not say whether they are all."""

    __module__ = "elsewhere"


class TestPlugins:
    @pytest.fixture
    def plugin(self, monkeypatch):
        def install(kind):
            load = STRATEGIES.load
            monkeypatch.setattr(STRATEGIES, "load", lambda name: kind if name == "mine" else load(name))

        return install

    def test_one_with_hooks_goes_on(self, tmp_path, plugin):
        plugin(Remembering)
        whole = go(tmp_path / "whole", LINEAR | {"strategy.name": "mine"})
        stopped_after(tmp_path / "parts", LINEAR | {"strategy.name": "mine"}, 1)
        assert_same(numbers(whole), numbers(resume(tmp_path / "parts")))

    def test_one_without_is_never_resumed_with_fresh_moments(self, tmp_path, plugin):
        plugin(Forgetful)
        stopped_after(tmp_path, LINEAR | {"strategy.name": "mine"}, 1)
        with pytest.raises(ConfigError, match="strategy Forgetful does not say what it keeps from round to round"):
            resume(tmp_path)

    def test_nor_is_flowers(self, tmp_path, plugin):
        from flwr.serverapp.strategy import FedYogi as Flowers

        plugin(Flowers)
        stopped_after(tmp_path, LINEAR | {"strategy.name": "mine", "strategy.fraction-evaluate": 0.0}, 1)
        with pytest.raises(ConfigError, match="strategy FedYogi does not say"):
            resume(tmp_path)

    @pytest.mark.parametrize("name", STRATEGIES.names())
    def test_all_of_ours_have_hooks(self, name):
        from cloister.core.state import declares_state

        assert declares_state(STRATEGIES.load(name)())


class TestWhatGoesOn:
    def test_an_adaptive_clip(self, tmp_path):
        settings = PRIVATE | {"privacy.clipping": "adaptive", "privacy.clipping-norm": 0.01}
        stopped = stopped_after(tmp_path, settings, 1).plan.strategy.mechanism.clip
        next_round = resume(tmp_path).rounds[2]
        assert next_round.measured.clipping_norm == stopped.bound != 0.01

    def test_canaries(self, tmp_path):
        canaries = {"privacy.canaries": 20, "privacy.placement": "update"}
        before = stopped_after(tmp_path, PRIVATE | canaries, 2).plan.strategy.canaries
        after = resume(tmp_path).plan.strategy.canaries
        assert after.rounds == 3 == before.rounds + 1
        assert after.directions == before.directions and (after.coins == before.coins).all()
        assert np.abs(after.scores - before.scores).max() > 0
        assert json.loads((tmp_path / "r" / "canaries.json").read_text())["rounds"] == 3

    def test_roles_of_nodes(self, tmp_path):
        settings = LINEAR | {"evaluation.held-out-clients": 0.4, "seed": -1, "strategy.min-nodes": 2}
        before = stopped_after(tmp_path, settings, 1).plan.held_out.split([1, 2, 3, 4])
        resumed = resume(tmp_path)
        assert resumed.plan.held_out.split([1, 2, 3, 4]) == before and len(before[1]) == 1
        assert resumed.plan.held_out.newcomers == 0

    def test_a_seed_that_was_drawn(self, tmp_path):
        stopped = stopped_after(tmp_path, LINEAR | {"seed": -1}, 1)
        assert resume(tmp_path).plan.seed == stopped.plan.seed

    def test_what_simulated_clients_have_released(self, tmp_path):
        settings = LINEAR | {"privacy.client": "laplace", "privacy.client-noise-multiplier": 5.0}
        go(tmp_path / "whole", settings)
        stopped_after(tmp_path / "parts", settings, 1)
        resume(tmp_path / "parts")
        found = [json.loads((tmp_path / part / "r" / "leakage.json").read_text()) for part in ("whole", "parts")]
        assert found[0] == found[1]

    def test_not_how_often_clients_were_drawn_where_that_is_secret(self, tmp_path):
        settings = PRIVATE | {"privacy.client": "laplace", "privacy.client-noise-multiplier": 5.0}
        go(tmp_path / "public", settings)
        assert (tmp_path / "public" / "r" / "nodes.json").exists()
        secret = settings | {"strategy.sampling": "poisson", "strategy.fraction-train": 0.9}
        stopped_after(tmp_path / "secret", secret, 2)
        assert (tmp_path / "secret" / "r" / "nodes.json").exists(), "what nodes have released goes on"
        resume(tmp_path / "secret")
        assert not (tmp_path / "secret" / "r" / "nodes.json").exists()

    def test_more_rounds_where_nothing_is_claimed(self, tmp_path):
        go(tmp_path / "parts", LINEAR | {"strategy.name": "fedyogi"})
        longer = resume(tmp_path / "parts", {"num-rounds": 5})
        whole = go(tmp_path / "whole", LINEAR | {"strategy.name": "fedyogi", "num-rounds": 5})
        assert_same(numbers(whole), numbers(longer))
        facts = json.loads((tmp_path / "parts" / "r" / "config.json").read_text())
        assert facts["config"]["num-rounds"] == 5 and facts["resumed-after"] == [3] and not facts["config"]["resume"]
        assert facts["config-sha256"] == parse(facts["config"]).digest()

    def test_the_scores_of_earlier_rounds(self, tmp_path):
        stopped = stopped_after(tmp_path, LINEAR, 1)
        said = io.StringIO()
        resumed = resume(tmp_path, narrator=Narrator(3, Console(file=said, width=200)))
        assert [done.number for done in resumed.rounds] == [0, 1, 2, 3]
        assert resumed.rounds[1].central == stopped.rounds[1].central
        assert "resumed after round 1\nround   2/3" in said.getvalue(), "nothing is promised, and no ε explained"

    @pytest.mark.parametrize("budget", [0.0, 9.0])
    def test_each_epsilon_is_said_to_be_what_it_is(self, tmp_path, budget):
        stopped_after(tmp_path, PRIVATE | {"privacy.max-epsilon": budget}, 1)
        said = io.StringIO()
        outcome = resume(tmp_path, narrator=Narrator(3, Console(file=said, width=10**6, soft_wrap=True)))
        before, after = said.getvalue().split("resumed after round 1\n")
        told = after.split("round   2/3")[0].splitlines()
        assert len(told) == 4 and all(line.startswith("  ε ") for line in told)
        (promised,) = re.findall(r"ε at most \S+", before)
        assert told[0].startswith(f"  {promised}: of all planned rounds, and of one more")
        shown = [line.split(" at δ")[0].strip() for line in render(outcome.statement) if line.startswith("  ε")]
        assert ("ε ≤ 9" in shown) == told[3].startswith("  ε ≤ 9,") == bool(budget)

    @pytest.mark.parametrize("sampling", [pytest.param("fixed", marks=pytest.mark.slow), "poisson"])
    @pytest.mark.slow
    def test_the_curves(self, died, sampling):
        """A round that was made again is one point of each curve, where the times of files are hidden too."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder, _, deaths = died(PRIVATE | {"tensorboard": True, "strategy.sampling": sampling})
        deaths.at(max(i for i in range(deaths.count) if state_round(deaths.store / str(i)) == 1))
        board = folder / "r" / "tensorboard"
        assert self.steps(EventAccumulator(str(board))) == [1, 2], "the curve was ahead of the state"
        resume(folder)
        assert self.steps(EventAccumulator(str(board))) == [1, 2, 3]
        assert len(list(board.iterdir())) == 2

    def steps(self, events):
        events.Reload()
        return [point.step for point in events.Scalars("privacy/noise-std")]


def test_a_run_directory_given_to_the_app_itself(tmp_path):
    """As `flwr run` does it: the configuration is given whole, and names the directory."""
    config = parse(LINEAR | {"output-dir": str(tmp_path), "strategy.name": "fedavgm"})
    run(LocalGrid.simulated(app, config.flat(), 3), config, Narrator(3, Console(quiet=True)))
    longer = parse(config.flat() | {"num-rounds": 4, "resume": str(tmp_path / "r")})
    outcome = run(LocalGrid.simulated(app, longer.flat(), 3), longer, Narrator(4, Console(quiet=True)))
    assert [done.number for done in outcome.rounds] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="clients = 3 differs from 0"):
        resume(tmp_path, clients=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_processes_that_are_killed_at_random(tmp_path, seed):
    """`kill -9`, again and again, until one comes through: the model is that of a run that nobody disturbed."""
    rng = random.Random(seed)
    settings = LINEAR | {"strategy.name": "fedadam", "num-rounds": 60, "evaluation.patience": 50}
    whole = go(tmp_path / "whole", settings)
    folder = tmp_path / "killed"
    folder.mkdir()
    given = folder / "settings.toml"
    given.write_text("".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in settings.items()))
    begin = ["-c", str(given), "-c", f"output-dir='{folder}'"]
    deaths = 0
    while not (process := started(folder, begin)).ended_before(rng):
        assert deaths < 40, "no process comes to its end"
        deaths += 1
    assert process.code == 0, process.said
    assert deaths > 0
    with np.load(folder / "r" / "model.npz") as model:
        assert_same(numbers(whole), dict(model))
    assert lines(folder) == lines(tmp_path / "whole")


class started:
    """`cloister run`, as a process of its own: of a new run, or of one that was begun."""

    def __init__(self, folder, begin):
        command = ["run", "--resume", str(folder / "r")] if (folder / "r" / "config.json").exists() else ["run", *begin]
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from cloister.cli import app; app()", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended_before(self, rng):
        """Whether it came to its end before some more rounds were written, after which it is killed."""
        until = self.rounds() + rng.randint(1, 30)
        while self.process.poll() is None and self.rounds() < until:
            time.sleep(rng.random() / 100)
        self.process.kill()
        self.said, _ = self.process.communicate()
        self.code = self.process.returncode
        return self.code != -signal.SIGKILL

    def rounds(self):
        path = self.folder / "r" / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0
