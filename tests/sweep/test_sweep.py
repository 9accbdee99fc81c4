"""A sweep: what its file may say, which cells follow, what is done again, and what it all came to."""

import json
import math
import signal
from typing import ClassVar

import pytest
from reported import line, write_run
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.config.io import read_settings
from cloister.config.run import parse
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian
from cloister.server.build import build
from cloister.sweep import sweep
from cloister.sweep.cells import Sweep, cells_of, refuse_past_budget
from cloister.sweep.sweep import Ended, as_toml, conduct, duration, held, jobs_for, put_aside
from cloister.utils.errors import BudgetExhausted, ConfigError

BASE = """
[base]
num-rounds = 2
task.name = "breast-cancer"
tensorboard = false
"""
NOISY = f"""
clients = 6
seeds = 2
select = "accuracy"
{BASE}
privacy.server = "global-dp"
privacy.max-epsilon = 20.0
[grid]
privacy.noise-multiplier = [2.0, 4.0]
"""


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A working directory of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def written(tmp_path):
    def write(text, name="s.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def refused(path):
    with pytest.raises(ConfigError) as error:
        cells_of(Sweep(path))
    return str(error.value)


class TestFile:
    def test_the_grid_times_the_seeds(self, written):
        cells = cells_of(Sweep(written(NOISY)))
        assert [(cell.settings["privacy.noise-multiplier"], cell.config.seed) for cell in cells] == [
            *((2.0, 0), (2.0, 1), (4.0, 0), (4.0, 1))
        ]
        assert {cell.config.task.name for cell in cells} == {"breast-cancer"} and cells[0].clients == 6
        assert len({cell.name for cell in cells}) == 4 and all(cell.name.startswith("s-") for cell in cells)

    def test_two_keys_are_multiplied(self, written):
        grid = '[grid]\nnum-rounds = [1, 2, 3]\nstrategy.name = ["fedavg", "fedadam"]\n'
        cells = cells_of(Sweep(written(BASE + grid)))
        assert len(cells) == 6 and [cell.config.strategy.name for cell in cells[:2]] == ["fedavg", "fedadam"]

    def test_the_base_may_be_a_file(self, written):
        written('num-rounds = 7\n[privacy]\nserver = "none"\n', "base.toml")
        (cell,) = cells_of(Sweep(written('base = "base.toml"\nseeds = [5]\n')))
        assert (cell.config.num_rounds, cell.config.privacy.server.name, cell.config.seed) == (7, "none", 5)

    def test_its_name_is_fit_for_a_folder(self, written):
        assert Sweep(written(BASE, "my first.sweep.toml")).name == "my-first-sweep"
        assert Sweep(written('name = "x"\n' + BASE)).name == "x"

    def test_a_single_seed_of_the_base(self, written):
        assert Sweep(written(BASE + "seed = 9\n")).seeds == (9,)
        assert Sweep(written(BASE)).seeds == (0,)

    def test_what_is_wrong_is_named(self, written):
        def check(text, told):
            message = refused(written(text))
            assert told in message and len(message.splitlines()) == 1 and "s.toml" in message

        cases = [
            ("jobs = 0", "jobs = 0 is not valid"),
            ("seedz = 3", "unknown key 'seedz'"),
            ("seeds = [1, 1]", "a seed is there twice"),
            ("seeds = []", "seeds = [] is not valid"),
            ("seeds = 2\nbase.seed = 1", "base.seed = 1 has no effect with seeds = 2"),
            ("name = 'a b'", "name = 'a b' is not valid"),
            ("base = 'absent.toml'", "there is no file at"),
            ("base.run-name = 'x'", "base.run-name is not valid"),
            ("grid.seed = [1]", "grid.seed is not valid: it is the same in all cells"),
            ("grid.privacy.max-epsilon = [1.0]", "grid.privacy.max-epsilon is not valid"),
            ("grid.num-rounds = 3", "grid.num-rounds = 3 is not valid: it must be a list"),
            ("grid.num-rounds = []", "grid.num-rounds = [] is not valid"),
            ("grid.num-rounds = [1, 1]", "it must be a list of different values"),
            ("grid.num-rounds = [[1]]", "it must be a list of different values"),
            ("grid = 1 1", "is no TOML"),
            ("base = '~nobody-of-that-name/run.toml'", "there is no file at"),
        ]
        assert failures(cases, check) == []

    def test_one_that_is_not_there(self, tmp_path):
        result = CliRunner().invoke(cli.app, ["sweep", str(tmp_path / "absent.toml")])
        assert result.exit_code == 1 and result.output.startswith("ConfigError: ")

    def test_every_wrong_cell_is_named_before_any_runs(self, written):
        grid = '[grid]\nprivacy.server = ["none", "global-dp"]\nprivacy.clipping-norm = [1.0, -1.0]\n'
        told = refused(written(BASE + grid)).splitlines()
        assert [line.partition(": ")[0] for line in told] == [
            "cell privacy.server='none' privacy.clipping-norm=1.0",
            "cell privacy.server='none' privacy.clipping-norm=-1.0",
            "cell privacy.server='global-dp' privacy.clipping-norm=-1.0",
        ]

    def test_a_fault_of_all_cells_is_one_line(self, written):
        grid = "[grid]\nclient.local-epochs = [1, 2, 3, 4]\n"
        (line,) = refused(written("clients = 1\n" + BASE + grid)).splitlines()
        assert " and client.local-epochs=2" not in line and "and 3 more: clients = 1 is fewer" in line
        (line,) = refused(written("clients = 1\nseeds = 2\n" + BASE + grid)).splitlines()
        assert "cell client.local-epochs=1 and 3 more (8 runs, with its 2 seeds): " in line

    def test_what_only_the_run_would_refuse(self, written):
        grid = '[grid]\nstrategy.name = ["fedavg", "nothing"]\n'
        assert "cell strategy.name='nothing'" in refused(written(BASE + grid))


class TestNames:
    def test_the_same_cell_has_the_same_name_and_another_one_another(self, written):
        def names(text):
            return [cell.name for cell in cells_of(Sweep(written(text)))]

        assert names(NOISY) == names(NOISY)
        assert set(names(NOISY)) < set(names(NOISY.replace("[2.0, 4.0]", "[1.0, 2.0, 4.0]")))
        assert not set(names(NOISY)) & set(names(NOISY.replace("clients = 6", "clients = 7")))
        assert not set(names(NOISY)) & set(names(NOISY.replace("num-rounds = 2", "num-rounds = 3")))

    def test_a_larger_budget_leaves_done_what_is_done(self, written):
        cells, more = (cells_of(Sweep(written(text))) for text in (NOISY, NOISY.replace("20.0", "30.0")))
        assert [cell.name for cell in cells] == [cell.name for cell in more]

    def test_settings_pass_the_file_of_a_cell(self, tmp_path):
        settings = {
            "run-name": 'a"b\\c\n\x7f😀',
            "seed": 3,
            "task.alpha": 1e-7,
            "report": False,
            "strategy.x-y": "auto",
        }
        (tmp_path / "cell.toml").write_text(as_toml(settings), encoding="utf-8")
        assert read_settings([str(tmp_path / "cell.toml")]) == settings


class TestBudget:
    def test_automatic_noise_would_leave_nothing_to_the_second(self, written):
        text = NOISY.replace("[2.0, 4.0]", '["auto"]')
        assert "'auto' lets the first run take all" in refused(written(text))
        assert len(cells_of(Sweep(written(text.replace("seeds = 2", "seeds = 1"))))) == 1

    def test_all_runs_together_must_fit(self, written):
        together, _ = best_epsilon(Account([Gaussian(2.0), Gaussian(4.0)] * 4, insiders=True), 1e-5)
        refuse_past_budget(cells_of(Sweep(written(NOISY.replace("20.0", str(1.01 * together))))))
        cells = cells_of(Sweep(written(NOISY.replace("20.0", str(0.99 * together)))))
        with pytest.raises(BudgetExhausted, match=r"the 4 runs of the sweep need 1\.0\d times"):
            refuse_past_budget(cells)
        refuse_past_budget(cells[1:])

    def test_what_is_spent_already_counts(self, written):
        together, _ = best_epsilon(Account([Gaussian(2.0), Gaussian(4.0)] * 4, insiders=True), 1e-5)
        cells = cells_of(Sweep(written(NOISY.replace("20.0", str(1.01 * together)))))
        budget = build(cells[0].config).budget
        budget.begin("before")
        with budget.release(Gaussian(4.0), 1):
            pass
        with pytest.raises(BudgetExhausted):
            refuse_past_budget(cells)
        refuse_past_budget(cells[2:])

    def test_of_a_spent_budget_nothing_is_left(self, written):
        cells = cells_of(Sweep(written(NOISY.replace("20.0", "1.0").replace("seeds = 2", "seeds = 1"))))
        budget = build(cells[0].config).budget
        budget.ledger.open(Gaussian(0.5), "client", "before", 1, lambda: None, "global-dp", 1.0)
        with pytest.raises(BudgetExhausted, match="need inf times"):
            refuse_past_budget(cells[:1])

    def test_nothing_is_started(self, written, tmp_path):
        with pytest.raises(BudgetExhausted):
            conduct(written(NOISY.replace("20.0", "1.0")), lambda _: None)
        assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
        assert CliRunner().invoke(cli.app, ["sweep", "s.toml"]).exit_code == 3

    def test_a_choice_by_the_clients_scores_is_refused(self, written):
        text = f'select = "accuracy"\n{BASE}evaluation.central = false\n'
        assert "select = 'accuracy' needs evaluation.central" in refused(written(text))


def finished(cell, accuracy=0.5, how="as-asked", epsilon=1.0, **settings):
    """Write the files that a cell's run leaves behind."""
    rounds = [line(number, central={"loss": 1 - accuracy, "accuracy": accuracy}) for number in range(3)]
    path = write_run(cell.directory, rounds=rounds, evaluation=None)
    config = parse(cell.config.flat() | settings)
    facts = {"config": config.flat(), "config-sha256": config.digest(), "seed": cell.config.seed, "versions": {}}
    (path / "config.json").write_text(json.dumps(facts))
    privacy = json.loads((path / "privacy.json").read_text())
    claims = [claim | {"epsilon": epsilon * claim["epsilon"]} for claim in privacy["claims"]]
    (path / "privacy.json").write_text(json.dumps(privacy | {"claims": claims, "ended": {"how": how, "why": ""}}))


class FakeProcess:
    """Stands for a process: it ends when it is looked at for the second time."""

    started: ClassVar = []
    over: ClassVar = []
    accuracies: ClassVar = {2.0: 0.9, 4.0: 0.6}
    epsilons: ClassVar = {}
    codes: ClassVar = {}
    budget: ClassVar = "budget"
    peak = 1

    def __init__(self, cell, folder):
        self.cell, self.looked, self.asked = cell, 0, False
        FakeProcess.started.append(cell)
        self.number = len(FakeProcess.started)

    def ended(self):
        self.looked += 1
        if self.looked < 2:
            return None
        FakeProcess.over.append(self.cell)
        code = 130 if self.asked else self.codes.get(self.number, 0)
        noise, seed = self.cell.settings["privacy.noise-multiplier"], self.cell.config.seed
        if code in (0, 3):
            ended, epsilon = {0: "as-asked", 3: self.budget}[code], self.epsilons.get(noise, 1.0)
            finished(self.cell, self.accuracies[noise] + seed / 100, ended, epsilon)
        return Ended(self.cell, code, 10.0, self.peak, "ValueError: it is broken")

    def stop(self):
        self.asked = True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(FakeProcess, "over", [])
    monkeypatch.setattr(FakeProcess, "codes", {})
    monkeypatch.setattr(sweep, "write_page", lambda *_: None)  # to draw takes longer than everything else
    monkeypatch.setattr(sweep, "write_png", lambda *_: None)
    monkeypatch.setattr(sweep, "pictures", lambda _: ())
    monkeypatch.setattr(sweep, "Process", FakeProcess)
    monkeypatch.setattr(sweep, "PAUSE", 0.0)
    monkeypatch.setattr(sweep.os, "cpu_count", lambda: 8)
    return FakeProcess


def conducted(path):
    told = []
    return conduct(path, told.append), "\n".join(told)


TABLE = """
╭──────┬──────────────────┬────────┬─────────────────┬─────────────────┬───┬─────────╮
│ cell │ noise-multiplier │ rounds │  final accuracy │   best accuracy │ ε │ seconds │
├──────┼──────────────────┼────────┼─────────────────┼─────────────────┼───┼─────────┤
│ 1    │ 2.0              │      2 │ 0.9050 ± 0.0071 │ 0.9050 ± 0.0071 │ 1 │       – │
│ 2    │ 4.0              │      2 │ 0.6050 ± 0.0071 │ 0.6050 ± 0.0071 │ 1 │       – │
╰──────┴──────────────────┴────────┴─────────────────┴─────────────────┴───┴─────────╯
"""


DRAWN = {name: getattr(sweep, name) for name in ("write_page", "write_png", "pictures")}


class TestRuns:
    def test_all_cells_and_their_results(self, written, fake, tmp_path, monkeypatch):
        for name, drawn in DRAWN.items():
            monkeypatch.setattr(sweep, name, drawn)
        code, told = conducted(written(NOISY))
        assert code == 0 and len(fake.started) == 4 and TABLE in told
        assert "Chosen by the final accuracy on the server's own examples: cell 1, noise-multiplier=2.0." in told
        folder = tmp_path / "runs" / "s.sweep"
        assert {"results.json", "results.md", "results.html", "results.png"} <= {path.name for path in folder.iterdir()}
        found = json.loads((folder / "results.json").read_text())
        assert found["selected"] == "1" and found["groups"][1]["final"]["mean"] == pytest.approx(0.605)
        assert [run["seed"] for run in found["groups"][0]["runs"]] == [0, 1]
        assert "Sweep s" in (folder / "results.html").read_text(encoding="utf-8")

    def test_a_key_of_one_value_is_no_column(self, written, fake):
        _, told = conducted(written(NOISY + "client.local-epochs = [1]\n"))
        assert TABLE in told

    def test_a_loss_is_best_where_it_is_least(self, written, fake, monkeypatch):
        monkeypatch.setattr(fake, "accuracies", {2.0: 0.6, 4.0: 0.9})
        _, told = conducted(written(NOISY.replace('"accuracy"', '"loss"')))
        assert "Chosen by the final loss on the server's own examples: cell 2," in told

    @pytest.mark.parametrize(("epsilons", "best"), [({2.0: 1.0, 4.0: 0.5}, 2), ({2.0: 1.0, 4.0: 1.0}, 1)])
    def test_of_equally_good_cells_the_cheaper_one_is_chosen_and_then_the_first(
        self, written, fake, monkeypatch, epsilons, best
    ):
        monkeypatch.setattr(fake, "accuracies", {2.0: 0.9, 4.0: 0.9})
        monkeypatch.setattr(fake, "epsilons", epsilons)
        _, told = conducted(written(NOISY))
        assert f"examples: cell {best}," in told
        assert f"Equally good: {3 - best}; of these the smallest ε decides, then the order." in " ".join(told.split())

    def test_a_score_that_no_run_has_chooses_none(self, written, fake):
        _, told = conducted(written(NOISY.replace('"accuracy"', '"rmse"')))
        assert "No cell is chosen: no run has a score 'rmse'" in told

    def test_a_cell_of_which_a_run_has_diverged_is_not_chosen(self, written, fake, monkeypatch):
        monkeypatch.setattr(fake, "accuracies", {2.0: 0.9, 4.0: 0.6})
        conducted(written(NOISY))
        cell = cells_of(Sweep(written(NOISY)))[0]
        rounds = cell.directory / "rounds.jsonl"
        rounds.write_text(rounds.read_text() + json.dumps(line(3, central={"accuracy": math.nan})) + "\n")
        _, told = conducted(written(NOISY))
        assert "own examples: cell 2," in told and f"{cell.name} has diverged" in told

    def test_again_nothing_is_run(self, written, fake):
        conducted(written(NOISY))
        code, told = conducted(written(NOISY))
        assert code == 0 and len(fake.started) == 4 and "4 runs, 4 of them done before" in told and TABLE in told

    def test_a_new_value_runs_its_own_cells(self, written, fake, monkeypatch):
        conducted(written(NOISY))
        monkeypatch.setattr(fake, "accuracies", {8.0: 0.3} | fake.accuracies)
        conducted(written(NOISY.replace("[2.0, 4.0]", "[2.0, 4.0, 8.0]")))
        assert [cell.settings["privacy.noise-multiplier"] for cell in fake.started[4:]] == [8.0, 8.0]

    @pytest.mark.parametrize("how", ["operator", "error", "disk"])
    def test_what_broke_off_is_done_anew_and_kept_aside(self, written, fake, how):
        cell = cells_of(Sweep(written(NOISY)))[1]
        finished(cell, how=how)
        assert cell.state() == "broken"
        conducted(written(NOISY))
        assert len(fake.started) == 4 and cell.state() == "done"
        assert cell.directory.with_name(f"{cell.name}.1").is_dir()

    def test_what_a_budget_ended_stays_until_there_is_another_budget(self, written):
        cell, more = (cells_of(Sweep(written(text)))[0] for text in (NOISY, NOISY.replace("20.0", "30.0")))
        finished(cell, how="budget")
        assert (cell.state(), more.state()) == ("done", "broken")

    def test_a_directory_that_is_none_of_a_run(self, written):
        cell = cells_of(Sweep(written(NOISY)))[0]
        assert cell.state() == "absent"
        cell.directory.mkdir(parents=True)
        assert cell.state() == "broken"

    def test_a_failure_is_reported_and_the_others_go_on(self, written, fake):
        fake.codes = {2: 1}
        code, told = conducted(written(NOISY))
        assert code == 1 and len(fake.started) == 4
        assert "failed with exit code 1: ValueError: it is broken" in told and "1 have no result" in told

    def test_a_spent_budget_starts_no_other(self, written, fake):
        fake.codes = {1: 3}
        code, told = conducted(written(NOISY.replace("seeds = 2", "seeds = 3\njobs = 1")))
        assert code == 3 and len(fake.started) == 1 and "a budget ended it" in told

    def test_the_budgets_of_its_clients_end_one_cell_alone(self, written, fake, monkeypatch):
        fake.codes = {1: 3}
        monkeypatch.setattr(fake, "budget", "site-budgets")
        code, told = conducted(written(NOISY))
        assert code == 0 and len(fake.started) == 4 and "done: the budgets of its clients are spent" in told
        assert conducted(written(NOISY))[0] == 0 and len(fake.started) == 4, "the cell has its result"

    def test_one_that_runs_elsewhere(self, written, monkeypatch):
        cells = cells_of(Sweep(written(NOISY)))
        monkeypatch.setattr(type(cells[0]), "state", lambda self: "running")
        with pytest.raises(ConfigError, match="is under way in another process"):
            conducted(written(NOISY))

    def test_two_do_not_work_on_one_sweep(self, tmp_path):
        with held(tmp_path), pytest.raises(ConfigError, match="another process works on this sweep"), held(tmp_path):
            pass

    def test_ctrl_c_leaves_what_is_done(self, written, fake):
        class Interrupting(list):
            def append(self, cell):
                super().append(cell)
                if len(self) == 2:
                    signal.raise_signal(signal.SIGINT)

        fake.started = Interrupting()
        code, told = conducted(written(NOISY.replace("seeds = 2", "seeds = 2\njobs = 1")))
        assert code == 130 and len(fake.started) == 2 and "3 have no result" in told
        assert "seed=1: stopped in order; it will be done anew" in told
        assert cells_of(Sweep(written(NOISY)))[0].state() == "done"

    def test_no_process_is_left_behind(self, written, fake, monkeypatch):
        killed = []
        monkeypatch.setattr(fake, "kill", lambda self: killed.append(self.cell.name), raising=False)
        monkeypatch.setattr(fake, "ended", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            conducted(written(NOISY.replace("seeds = 2", "seeds = 2\njobs = 3")))
        assert killed == [cell.name for cell in fake.started] and len(killed) == 3

    def test_checking_starts_nothing(self, written, fake, tmp_path):
        path = written(NOISY)
        result = CliRunner().invoke(cli.app, ["sweep", str(path), "--check"])
        assert result.exit_code == 0 and not fake.started and list(tmp_path.iterdir()) == [path]
        assert len(result.output.splitlines()) == 5


class TestJobs:
    def test_as_memory_allows(self, monkeypatch):
        def check(free, processors, jobs):
            monkeypatch.setattr(sweep, "free_memory", lambda: free)
            monkeypatch.setattr(sweep.os, "cpu_count", lambda: processors)
            assert jobs_for(10) == jobs

        cases = [(100, 8, 2), (24, 8, 1), (1, 8, 1), (100, 1, 1), (0, 8, 1)]
        assert failures(cases, check) == []

    def test_without_a_measure_one_at_a_time(self):
        assert jobs_for(0) == 1

    def test_a_failure_says_nothing_about_memory(self, written, fake, monkeypatch):
        seen = []
        monkeypatch.setattr(fake, "ended", watched(fake.ended, seen))
        monkeypatch.setattr(sweep, "free_memory", lambda: 100)
        fake.codes = {1: 1}
        _, told = conducted(written(NOISY))
        assert seen[:4] == [1, 1, 1, 1] and max(seen) == 2 and "3 to go, about 30 s" in told

    def test_the_first_runs_alone_and_then_two_together(self, written, fake, monkeypatch):
        seen = []
        monkeypatch.setattr(fake, "ended", watched(fake.ended, seen))
        monkeypatch.setattr(sweep, "free_memory", lambda: 100)
        conducted(written(NOISY))
        assert len(seen) == 8 and seen[:2] == [1, 1] and seen[2] == max(seen) == 2

    def test_durations(self):
        def check(seconds, told):
            assert duration(seconds) == told

        cases = [(12, "12 s"), (600, "10 min"), (7200, "2.0 h")]
        assert failures(cases, check) == []

    def test_the_time_left_is_told(self, written, fake):
        _, told = conducted(written(NOISY.replace("seeds = 2", "seeds = 2\njobs = 1")))
        assert "seed=0: done; 3 to go, about 30 s" in told

    def test_unless_it_would_tell_of_a_draw(self, written, fake):
        text = NOISY.replace("[grid]", 'strategy.sampling = "poisson"\nstrategy.fraction-train = 0.5\n[grid]')
        assert all(cell.hides_times for cell in cells_of(Sweep(written(text))))
        _, told = conducted(written(text))
        assert "to go" not in told

    def test_what_is_put_aside_is_not_overwritten(self, tmp_path):
        for _ in range(2):
            (tmp_path / "run").mkdir()
            put_aside(tmp_path / "run")
        put_aside(tmp_path / "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1", "run.2"]


def watched(ended, seen):
    def look(self):
        seen.append(len(FakeProcess.started) - len(FakeProcess.over))
        return ended(self)

    return look
