"""Refusals of a resume name its key, and one process at a time is at a run directory."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from resumed import CLIENTS, PRIVATE, go, resume, stopped_after
from rich.console import Console
from support import failures

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.checkpoint import settings_of
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.rundir import RunDirectory
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError, LedgerError


class TestRefusals:
    @pytest.fixture(scope="class")
    def stopped(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("runs")
        stopped_after(folder, PRIVATE, 1)
        return folder

    def test_of_what_would_be_another_run(self, stopped):
        def check(key, value, before):
            config = parse(settings_of(stopped / "r") | {key: value})
            with pytest.raises(ConfigError, match=f"^{key} = {value!r} differs from {before}") as caught:
                run(LocalGrid.simulated(app, config.flat(), CLIENTS), config, clients=CLIENTS)
            assert "with which the run began" in str(caught.value) and len(str(caught.value).splitlines()) == 1

        cases = [
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
        ]
        assert failures(cases, check) == []

    def test_of_another_length(self, stopped):
        def check(settings, says):
            with pytest.raises(ConfigError, match=says):
                resume(stopped, settings)

        cases = [
            ({"num-rounds": 2}, "num-rounds = 2 is fewer than the 3"),
            ({"num-rounds": 4}, "num-rounds = 4 contradicts the claim of the run that is resumed, which had 3"),
        ]
        assert failures(cases, check) == []

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
            simulate({"resume": str(tmp_path / "copy" / "r")} | moved, None, ConsoleReporter(3, Console(quiet=True)))

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

    FILES = (
        *("config.json", "simulation.json", "state.json", "state-00001.npz", "checkpoints/round-00001.npz"),
        *("rounds.jsonl", "nodes.json", "ledger.json"),
    )

    @pytest.mark.parametrize("content", ["[1]\n", '{"round": []}\n', "PK\x03\x04\n"], ids=range(3))
    def test_of_files_that_no_run_wrote(self, stopped, tmp_path, content):
        def check(name):
            shutil.copytree(stopped / "r", tmp_path / name / "r")
            (tmp_path / name / "r" / name).write_text(content)
            with pytest.raises(ConfigError, match=r"^resume"):
                resume(tmp_path / name)

        assert failures(self.FILES, check) == []

    def test_of_a_checkpoint_without_anything(self, stopped, tmp_path):
        shutil.copytree(stopped / "r", tmp_path / "r")
        (tmp_path / "r" / "checkpoints" / "round-00001.npz").write_bytes(b"")
        with pytest.raises(ConfigError, match=r"state\.json and its checkpoint cannot be read: EOFError"):
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
        with pytest.raises(ConfigError, match=r"strategy does not fit \(ValueError\);"):
            resume(tmp_path)

    def test_of_noise_that_is_not_its_own(self, stopped, tmp_path):
        """The claim of planned rounds would be that of more noise than there was."""
        shutil.copytree(stopped / "r", tmp_path / "r")
        path = tmp_path / "r" / "state-00001.npz"
        with np.load(path) as saved:
            arrays = dict(saved)
        np.savez(path, **arrays | {"strategy/mechanism/noise-multiplier": np.array(100.0)})
        with pytest.raises(ConfigError, match=r"strategy does not fit \(ValueError\);"):
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
