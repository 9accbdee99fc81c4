"""A run that dies at any instant goes on as the same run."""

import io
import json
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord
from resumed import (
    CLIENTS,
    LINEAR,
    PRIVATE,
    assert_same,
    claims,
    died,
    go,
    lines,
    numbers,
    resume,
    state_round,
    stopped_after,
)
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.claims.render import render
from cloister.server.checkpoint import Progress, ResumedRun, remember
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.rundir import RunDirectory
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import HeldOut
from cloister.strategies.fedopt import FedYogi
from cloister.utils.errors import ConfigError

CASES = {
    "moments": {"strategy.name": "fedyogi", "strategy.fraction-train": 0.5, "keep-checkpoints": 1},
    "patience": {"client.learning-rate": 0.9, "evaluation.patience": 2, "num-rounds": 6},
    "hypotheses": {"privacy.server": "laplace-clustering", "strategy.name": "fedadam"},
}


DRAWN = {"strategy.sampling": "poisson", "strategy.fraction-train": 0.9}


class TestWithoutNoise:
    """Wherever the process died, the resumed run ends with the same model, bit for bit."""

    def assert_goes_on(self, tmp_path, settings, every):
        folder, whole, deaths = died(tmp_path, LINEAR | settings)
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

    def test_killed_at_some_instants(self, tmp_path):
        self.assert_goes_on(tmp_path, CASES["patience"], every=13)

    @pytest.mark.slow
    @pytest.mark.parametrize(("case", "every"), [("moments", 1), ("patience", 1), ("hypotheses", 1)])
    def test_killed_at_any_instant(self, tmp_path, case, every):
        self.assert_goes_on(tmp_path, CASES[case], every)


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

    def test_all_of_ours_have_hooks(self):
        from cloister.utils.arrays import declares_state

        assert [name for name in STRATEGIES.names() if not declares_state(STRATEGIES.load(name)())] == []


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
        settings = LINEAR | {"privacy.client": "laplace", "privacy.laplace-noise-multiplier": 5.0}
        go(tmp_path / "whole", settings)
        stopped_after(tmp_path / "parts", settings, 1)
        resume(tmp_path / "parts")
        found = [json.loads((tmp_path / part / "r" / "leakage.json").read_text()) for part in ("whole", "parts")]
        assert found[0] == found[1]

    def test_not_how_often_clients_were_drawn_where_that_is_secret(self, tmp_path):
        settings = PRIVATE | {"privacy.client": "laplace", "privacy.laplace-noise-multiplier": 5.0}
        go(tmp_path / "public", settings)
        assert (tmp_path / "public" / "r" / "nodes.json").exists()
        stopped_after(tmp_path / "secret", settings | DRAWN, 2)
        assert not (tmp_path / "secret" / "r" / "nodes.json").exists()
        resume(tmp_path / "secret")
        assert not (tmp_path / "secret" / "r" / "nodes.json").exists()
        assert not (tmp_path / "secret" / "r" / "leakage.json").exists(), "it tells how often they were drawn"

    @pytest.mark.parametrize(
        ("place", "error"),
        [("Progress.save", KeyboardInterrupt), ("_statement", MemoryError)],
    )
    def test_whatever_ends_a_run_takes_away_who_was_drawn(self, tmp_path, monkeypatch, place, error):
        seen = []

        def broken(*_, **__):
            if (tmp_path / "r" / "nodes.json").exists():
                seen.append(place)
                (tmp_path / "r" / ".nodes.1.partial.json").write_text("{")
                raise error("broken off")

        monkeypatch.setattr(f"cloister.server.run.{place}", broken)
        with pytest.raises(error):
            go(tmp_path, PRIVATE | DRAWN | {"privacy.client": "gaussian", "strategy.fraction-train": 0.999})
        assert seen and not list((tmp_path / "r").glob("*nodes*"))

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
        resumed = resume(tmp_path, narrator=ConsoleReporter(3, Console(file=said, width=200)))
        assert [done.number for done in resumed.rounds] == [0, 1, 2, 3]
        assert resumed.rounds[1].central == stopped.rounds[1].central
        assert "resumed after round 1\nround   2/3" in said.getvalue(), "nothing is promised, and no ε explained"

    @pytest.mark.parametrize("budget", [0.0, 9.0])
    def test_each_epsilon_is_said_to_be_what_it_is(self, tmp_path, budget):
        stopped_after(tmp_path, PRIVATE | {"privacy.max-epsilon": budget}, 1)
        said = io.StringIO()
        outcome = resume(tmp_path, narrator=ConsoleReporter(3, Console(file=said, width=10**6, soft_wrap=True)))
        before, after = said.getvalue().split("resumed after round 1\n")
        told = after.split("round   2/3")[0].splitlines()
        assert len(told) == 4 and all(line.startswith("  ε ") for line in told)
        (promised,) = re.findall(r"ε at most \S+", before)
        assert told[0].startswith(f"  {promised}: of all planned rounds, and of one more")
        shown = [line.split(" at δ")[0].strip() for line in render(outcome.statement) if line.startswith("  ε")]
        assert ("ε ≤ 9" in shown) == told[3].startswith("  ε ≤ 9,") == bool(budget)

    @pytest.mark.slow
    def test_the_curves(self, tmp_path):
        """A round that was made again is one point of each curve, though both files name the same day alone."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder, _, deaths = died(tmp_path, PRIVATE | {"tensorboard": True, "strategy.sampling": "poisson"})
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
    run(LocalGrid.simulated(app, config.flat(), 3), config, ConsoleReporter(3, Console(quiet=True)))
    longer = parse(config.flat() | {"num-rounds": 4, "resume": str(tmp_path / "r")})
    outcome = run(LocalGrid.simulated(app, longer.flat(), 3), longer, ConsoleReporter(4, Console(quiet=True)))
    assert [done.number for done in outcome.rounds] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="clients = 3 differs from 0"):
        resume(tmp_path, clients=3)


@pytest.mark.slow
def test_processes_that_are_killed_at_random(tmp_path):
    """`kill -9`, again and again, until one comes through: the model is that of a run that nobody disturbed."""
    rng = random.Random(1)
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
    assert process.code in (0, -signal.SIGKILL), process.said
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
        """Return whether the run ended before some more rounds were written, after which the process is killed.

        A process that is killed when its run has ended, and before it exits, leaves nothing to resume.
        """
        until = self.rounds() + rng.randint(1, 30)
        while self.process.poll() is None and self.rounds() < until:
            time.sleep(rng.random() / 100)
        self.process.kill()
        self.said, _ = self.process.communicate()
        self.code = self.process.returncode
        return self.code != -signal.SIGKILL or "ended" in claims(self.folder)

    def rounds(self):
        path = self.folder / "r" / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


class TestMemories:
    """Of a run whose draws are secret, once it is resumed: nodes count no less than they may have released."""

    def remembered(self, tmp_path, held_out=None):
        """A run that broke off after round 5, and was resumed before; its four nodes, after this one was resumed."""
        directory = RunDirectory(tmp_path)
        earlier = ResumedRun(directory, parse(LINEAR), 1, (2,), Progress(5, ArrayRecord(), {}))
        grid = LocalGrid.simulated(app, parse(LINEAR).flat(), CLIENTS)
        remember(grid, earlier, held_out and held_out.split, secret=True)
        return grid.memories()

    def test_without_any_each_counts_all_earlier_rounds(self, tmp_path):
        assumed = {"config": {"assumed": {"rounds": 7, "held-out": False}}, "metrics": {}}
        assert self.remembered(tmp_path) == {str(node): assumed for node in range(1, CLIENTS + 1)}

    def test_those_that_never_train_are_no_less_strict(self, tmp_path):
        held_out = HeldOut(0.5, random.Random(1))
        trains, scores = held_out.split([1, 2, 3, 4])
        found = self.remembered(tmp_path, held_out)
        roles = {int(node): memory["config"]["assumed"]["held-out"] for node, memory in found.items()}
        assert roles == dict.fromkeys(trains, False) | dict.fromkeys(scores, True)

    def test_those_of_a_killed_process_go_on_and_are_taken_away(self, tmp_path):
        kept = {"2": {"config": {"client-releases": {"{}": 3}}, "metrics": {}}}
        (tmp_path / "nodes.json").write_text(json.dumps(kept))
        assert self.remembered(tmp_path) == kept and not (tmp_path / "nodes.json").exists()
