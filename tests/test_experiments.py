"""The scripts that reproduce the papers' tables, at a tiny scale."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401
from rich.console import Console

from cloister.config.run import parse
from cloister.server.build import build
from cloister.tasks.datasets import characters
from cloister.tasks.making import named_task
from cloister.tasks.targets import Target
from cloister.utils.errors import ConfigError

SCRIPTS = Path(__file__).parents[1] / "experiments"
TINY = ("task={name='digits', model='auto', examples-per-client=60}", "client.batch-size=20")
SECRET = "privacy.noise-seed=-1"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text())


@pytest.fixture
def load(monkeypatch):
    """Load a script."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def script(load, monkeypatch):
    """`end_to_end.py`, which knows federations of four."""
    module = load("end_to_end")
    monkeypatch.setattr(module, "PARTICIPATION", {4: 1.0})
    return module


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        system="proposed",
        data="",
        rounds=3,
        clients=4,
        partition="iid",
        epochs=1,
        sigma=None,
        model="mlp",
        output_dir=str(tmp_path / "runs"),
        quiet=False,
        name="",
        config=[*TINY, SECRET],
        results=tmp_path / "results",
    )


def stopped_after(script, number):
    """The class that tells of rounds, whose process is asked to stop after one of them."""

    class Stopped(script.TimeLeft):
        def __call__(self, done, arrays):
            super().__call__(done, arrays)
            if done.number == number:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stopped


@pytest.mark.slow
def test_a_stopped_run_goes_on_when_it_is_asked_for_again(script, arguments, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(script, "TimeLeft", stopped_after(script, 1))
        first = script.federated("proposed", arguments)
    assert [row[0] for row in first["curve"]] == [0, 1]
    assert (first["ended"], first["resumes"], script.suffix_of(first)) == ("operator", 0, "-stopped")
    whole = script.federated("proposed", arguments)
    assert [row[0] for row in whole["curve"]] == [0, 1, 2, 3]
    assert whole["curve"][:2] == first["curve"]
    assert (whole["ended"], whole["resumes"], script.suffix_of(whole)) == ("as-asked", 1, "")
    assert "resumed after round 1" in capsys.readouterr().out
    # The first counts all three that were planned, the second one more: that which may have been broken off.
    assert [result["accounted-rounds"] for result in (first, whole)] == [3, 4]
    spent = [epsilon(result) for result in (first, whole)]
    assert spent[0] == pytest.approx(epsilon({"accounting": script.accounting(parsed(script, arguments), 3)}))
    assert spent[1] == pytest.approx(epsilon({"accounting": script.accounting(parsed(script, arguments), 4)}))
    assert spent[0] < spent[1]


class Counting:
    """A task, and its model with DP-SGD: one weight counts steps, of which an epoch has two."""

    def __init__(self, config=None):
        self.weight = np.zeros(1)

    def load(self):
        part = characters.Examples(np.zeros((1200, 1)), np.zeros(1200))
        return SimpleNamespace(train=part, test=part)

    def build(self):
        return self

    def initialise(self, seed):
        self.weight[:] = 0

    def arrays(self):
        return {"weight": self.weight}

    def assign(self, arrays):
        self.weight[:] = arrays["weight"]

    def step(self, x, y):
        self.weight += len(x) == len(y) > 0

    def predict(self, x):
        return self.weight

    def metrics(self, y, predicted):
        if predicted[0] == 24 and not Counting.stopped:
            Counting.stopped = True
            raise KeyboardInterrupt
        return {"accuracy": predicted[0] / 100, "loss": 0}


def test_a_stopped_central_run_goes_on_after_its_kept_weights(script, arguments, monkeypatch):
    arguments.system, arguments.epochs, seeds = "central", 12, []
    monkeypatch.setattr(Counting, "stopped", False, raising=False)
    monkeypatch.setattr(characters, "Mnist", Counting)
    monkeypatch.setattr(script, "central_trainer", lambda model, settings, seed: seeds.append(seed) or model)
    with pytest.raises(KeyboardInterrupt):
        script.central(arguments)
    result = script.central(arguments)
    assert seeds == [1, 11]  # of the noise of the first epochs, and of those after the tenth
    assert [row[:2] for row in result["curve"]] == [[n, 2 * n / 100] for n in range(1, 13)]


def parsed(script, arguments):
    return parse(script.settings_of("proposed", arguments))


def epsilon(result):
    """Of an example of a client in every round."""
    return result["accounting"]["sound"]["client-in-every-round"][0]["epsilon"]


def test_the_accounting_is_that_of_the_configuration(script, arguments):
    spent = {}
    for name, line in (("as it is", "seed=1"), ("more", "client.local-epochs=2"), ("larger", "client.batch-size=40")):
        arguments.config = [*TINY[:1], line] if name == "larger" else [*TINY, line]
        spent[name] = epsilon({"accounting": script.accounting(parsed(script, arguments), 3)})
    assert spent["as it is"] < min(spent["more"], spent["larger"])


@pytest.mark.slow
def test_hours_are_said_and_a_run_with_seeded_noise_does_not_go_on(script, arguments, monkeypatch, capsys):
    """Hours first, and after each round."""
    monkeypatch.setitem(script.SECONDS, "mlp", 3600)
    arguments.rounds, arguments.config = 2, [*TINY]
    script.federated("proposed", arguments)
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("hours to go")]
    assert said[0] == "about 8.0 hours to go" and len(said) == 3
    with pytest.raises(ConfigError, match=r"(?s)privacy\.noise-seed = 1.*is there: give --name or --output-dir"):
        script.federated("proposed", arguments)


def test_the_time_of_the_rounds_so_far_is_that_of_the_others(script, monkeypatch):
    """Rounds 8 and 9 of 10 took two hours each, in a process that began after round 7."""
    told = script.TimeLeft(10, Console(quiet=True), 4 * 3600)
    now, said = [0.0], []
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(told, "note", said.append)
    for name in ("opening", "resuming", "__call__"):
        monkeypatch.setattr(script.ConsoleReporter, name, lambda *_: None)
    told.opening(SimpleNamespace(resumes=1))
    told.resuming(SimpleNamespace(number=7))
    for number in (8, 9):
        now[0] += 7200
        told(SimpleNamespace(number=number), None)
    assert said == [
        "about 12.0 hours to go",
        "about 4.0 hours to go",
        "about 2.0 hours to go",
    ]


def test_a_result_says_its_command(script, arguments):
    arguments.data, arguments.config = "somewhere", ["task={name='digits'}", SECRET]
    words = shlex.split(script.provenance(arguments)["command"])
    assert words[:5] == ["python", "experiments/end_to_end.py", "proposed", "--data", "FOLDER_OF_MNIST_NPZ"]
    assert words[5:11] == ["--rounds", "3", "--clients", "4", "--partition", "iid"]
    assert words[11:] == ["-c", "task={name='digits'}", "-c", SECRET]


def written(script, place, name, **facts):
    script.save({"system": "proposed", "curve": [[0, 0.1], [1, 0.5]], "command": "mine", **facts}, place, name)


@pytest.mark.parametrize(("system", "name"), [("proposed", "proposed-iid-4-sigma-3"), ("central", "central-sigma-3")])
def test_another_noise_multiplier_has_a_result_of_its_own(script, arguments, system, name):
    arguments.system, arguments.sigma = system, 3.0
    assert script.name_of(arguments) == name and name.replace("-4-", "-100-") in {*script.PUBLISHED, "central-sigma-3"}
    assert "--sigma 3" in script.provenance(arguments)["command"]
    assert script.settings_of("proposed", arguments)["privacy.dp-sgd-noise-multiplier"] == 3.0


@pytest.mark.parametrize(("system", "name"), [("baseline", "baseline-iid-100-cnn"), ("central", "central-cnn")])
def test_another_model_has_a_result_of_its_own(script, arguments, system, name, monkeypatch):
    monkeypatch.setattr(script, "PARTICIPATION", {100: 0.1})
    arguments.system, arguments.model, arguments.clients, arguments.config = system, "cnn", 100, []
    assert script.name_of(arguments) == name and (system == "central" or name in script.PUBLISHED)
    assert script.provenance(arguments)["command"].endswith("--model cnn")
    assert script.settings_of("proposed", arguments)["task.model"] == "cnn"


def test_every_system_has_a_valid_configuration(script, arguments):
    arguments.config = []
    found = {system: parse(script.settings_of(system, arguments)) for system in script.SYSTEMS}
    epochs = {system: config.client.local_epochs for system, config in found.items()}
    assert epochs == dict.fromkeys(script.SYSTEMS, 1) | {"baseline": 10}
    assert found["baseline"].privacy.client.name == found["baseline"].privacy.server.name == "none"


def test_first_estimates_are_about_what_was_measured(load, arguments):
    script = load("end_to_end")
    results = [json.loads(path.read_text()) for path in (SCRIPTS / "results" / "end_to_end").glob("*.json")]
    of_one_process = [result for result in results if result["system"] != "central" and not result.get("resumes")]
    assert {"baseline", "proposed"} <= {result["system"] for result in of_one_process}
    for result in of_one_process:
        arguments.clients, arguments.model = result["clients"], result["settings"]["task.model"]
        seconds = result.get("seconds", result.get("seconds-since-the-last-start")) / len(result["curve"][1:])
        assert 1 / 3 < seconds / script.seconds_of_a_round(result["system"], arguments) < 3, result["command"]


def test_a_result_takes_the_place_of_the_same_commands_alone(script, arguments):
    name = script.name_of(arguments)
    written(script, arguments.results, name)
    with pytest.raises(ConfigError, match="was made by 'mine': give --name for"):
        script.refuse_to_replace(arguments, name)
    written(script, arguments.results, name, **script.provenance(arguments))
    script.refuse_to_replace(arguments, name)
    written(script, arguments.results, f"{name}-stopped")
    with pytest.raises(ConfigError, match=f"{name}-stopped.json was made by 'mine'"):
        script.refuse_to_replace(arguments, name)


def test_what_was_kept_of_a_stopped_run_goes_when_the_run_has_ended(script, tmp_path):
    written(script, tmp_path, "run", ended="operator")
    written(script, tmp_path, "other", ended="operator")
    names = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    assert names() == ["other-stopped.json", "run-stopped.json"]
    written(script, tmp_path, "run", ended="as-asked")
    assert names() == ["other-stopped.json", "run.json"]


def test_the_table_has_the_thesis_figures_and_ours(script):
    curve = [[0, 0.1], [400, 0.95], [635, 0.8996]]
    results = {
        "proposed-iid-100": {"curve": curve},
        "none-iid-100": {"curve": curve},
        "proposed-iid-1000": {"curve": curve, "ended": "operator"},
    }
    rows = {row[0]: row[1:] for row in script.rows(results)}
    assert len(rows) == len(script.PUBLISHED) + 1
    assert rows["proposed-iid-100"] == ("89.08 %, 635", "89.96 %, 635", "+0.88", "95.00 %, 400")
    assert rows["none-iid-100"] == ("–", "89.96 %, 635", "–", "95.00 %, 400")
    assert rows["proposed-iid-1000"] == ("91.86 %, 1,740", "89.96 %, 635 (stopped)", "–", "95.00 %, 400")
    assert rows["curator-iid-100"] == ("88.87 %, 635", "–", "–", "–")


def test_cells_take_as_long_as_the_last_one_did(load, monkeypatch, capsys):
    cells, now = load("cells"), [0.0]
    monkeypatch.setattr(cells.time, "perf_counter", lambda: now[0])
    for size in cells.in_turn([2, 4, 6], 3600.0, float):
        now[0] += 1800 * size
    assert capsys.readouterr().out.splitlines() == [
        "3 cells to go, about 12.0 hours: 2",
        "2 cells to go, about 5.0 hours: 4",
        "1 cells to go, about 3.0 hours: 6",
        "all cells are there",
    ]


def command(script, name, folder, *given, monkeypatch):
    """Run a script in the folder, where all files of its data are, empty."""
    for file in ("mnist.npz", "mnist_writer_ids.npz", "IPPS_DRG_CSV.zip", "us_zip_latlon.csv"):
        (folder / file).touch()
    options = ["--results", str(folder), *given]
    options += [] if name in ("digits", "linear") else ["--data", str(folder)]
    monkeypatch.setattr("sys.argv", [f"{name}.py", *options])
    script.main()


@pytest.mark.parametrize("name", NAMES)
def test_every_script_takes_a_folder_for_results_and_names_the_origin_of_its_data(load, name, monkeypatch, capsys):
    script = load(name)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--results FOLDER" in text
    assert ("--data FOLDER" in text) == ("https://" in text)


def test_results_go_beside_the_committed_ones_by_default(load):
    assert SCRIPTS not in (SCRIPTS.parent / load("cells").parser("").parse_args([]).results).parents


def test_data_that_is_missing_is_named_with_its_origin(load, tmp_path):
    cells = load("cells")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mnist.npz").touch()
    assert cells.data_at(str(tmp_path), "mnist") == str(tmp_path)
    for place in ("", str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(SystemExit, match=r"mnist_writer_ids\.npz.*github\.com/facebookresearch/qmnist"):
            cells.data_at(place, "mnist-writers")


@pytest.mark.parametrize(
    ("name", "given", "runs"),
    [
        ("digits", ["--seeds", "2"], 6),
        ("local_noise", ["--tasks", "mnist", "--seeds", "2"], 32),
        ("secure_aggregation", ["--tasks", "mnist", "--seeds", "2"], 6),
    ],
)
def test_accuracies_that_are_there_are_not_computed_again(load, name, given, runs, tmp_path, monkeypatch, capsys):
    script, ran = load(name), []
    monkeypatch.setattr(script, "accuracy", lambda *run: ran.append(run) or 0.1 * len(ran))
    for _ in range(2):
        command(script, name, tmp_path, *given, monkeypatch=monkeypatch)
    assert len(ran) == runs
    assert re.match(r"\d+ cells to go, about \d+\.\d hours", capsys.readouterr().out)


@pytest.mark.slow
def test_the_writers_script_runs_from_leafs_files(load, tmp_path, monkeypatch):
    own = {f"w{n}": {"x": [[n / 9] * 784] * 4, "y": [n, n + 10, n + 36, 61]} for n in range(10)}
    (tmp_path / "data.json").write_text(json.dumps({"user_data": own}))
    options = ["--task", "femnist", "--nu", "0", "--hypotheses", "2", "--rounds", "2", "--cohort", "5"]
    command(load("mnist_writers"), "mnist_writers", tmp_path, *options, monkeypatch=monkeypatch)
    (run,) = json.loads((tmp_path / "femnist" / "cohort-5" / "softmax-k2-seed0.json").read_text())
    assert run["rounds"] == 2 and sum(run["cluster-sizes"]) == 5


def run_hospitals(script, given, folder, monkeypatch):
    """Record the runs of a command, by k, ν, seed and settings, in the place of hours of training."""
    ran = []

    def trained(*run):
        ran.append(run)
        return dict(zip(("k", "nu", "seed"), run, strict=False)) | dict.fromkeys(FIGURES, 1.5) | {"rounds": 1}

    monkeypatch.setattr(script, "trained", trained)
    command(script, "hospital_charges", folder, "--seeds", "0", *given.split(), monkeypatch=monkeypatch)
    return ran


FIGURES = ("rmse", "rmse-of-other-rows", "leakage-median", "leakage-maximum")
COURSE = {
    "path-of-the-first": [[[0, 0], [1, 1]]] * 2,
    "rmse-of-the-first": [2, 1],
    "largest-leakage-of-the-first": [[0, 0], [0.4, 0.4]],
}


def test_hospitals_that_ran_for_as_many_rounds_are_not_run_again(load, tmp_path, monkeypatch, capsys):
    script = load("hospital_charges")
    asked = "--split-round 50 --rounds 200 --hypotheses 1 3 --multipliers 5"
    first = run_hospitals(script, asked, tmp_path, monkeypatch)
    assert [(k, nu, settings["num-rounds"]) for k, nu, _, settings in first] == [(1, 5.0, 200), (3, 5.0, 200)]
    assert [settings.get("privacy.clusters-split-round") for *_, settings in first] == [None, 50]
    assert "2 cells to go" in capsys.readouterr().out
    assert run_hospitals(script, asked, tmp_path, monkeypatch) == []
    assert len(run_hospitals(script, asked.replace("200", "100"), tmp_path, monkeypatch)) == 2
    kept = json.loads((tmp_path / "hospital_charges" / "split-50" / "seed-0.json").read_text())
    assert [(run["k"], run["asked-rounds"]) for run in kept] == [(1, 200), (3, 200), (1, 100), (3, 100)]
    table = (tmp_path / "hospital_charges" / "split-50" / "table-200.md").read_text()
    assert "| 5 | 3 | 1.50 ± 0.00 | 1.50 ± 0.00 | 5.5, 21.6 | 1.5, 1.5 | 1 |" in table


@pytest.mark.parametrize(
    ("name", "task", "place"),
    [
        ("linear", "Linear", "linear/noised-rmse-patience-50.json"),
        ("hospital_charges", "HospitalCharges", "hospital_charges/rmse/patience-50/seed-0.json"),
    ],
)
def test_the_papers_loss_has_results_of_its_own(load, name, task, place, tmp_path, monkeypatch):
    script, ran = load(name), []
    monkeypatch.setattr(getattr(script, task), "target", Target("mse"))
    figures = dict.fromkeys((*FIGURES, "distances", "found-both"), 1.5) | {"k": 1, "nu": 5.0, "rounds": 1}

    def trained(*run):
        ran.append(next(one for one in run if isinstance(one, dict)))
        return (figures | {"distances": [1, 2]}, COURSE) if name == "linear" else figures

    monkeypatch.setattr(script, "trained", trained)
    few = ["--methods", "noised", "--seeds", "1"] if name == "linear" else ["--hypotheses", "1", "--seeds", "0"]
    few += [] if name == "linear" else ["--multipliers", "5"]
    options = [*few, "--loss", "rmse", "--patience", "50"]
    command(script, name, tmp_path, *options, monkeypatch=monkeypatch)
    (settings,) = ran
    assert (tmp_path / place).exists() and getattr(script, task).target.loss == "rmse"
    assert (settings["task.model"], settings["evaluation.patience"]) == ("keras", 50)


def test_writers_that_stopped_early_are_not_run_again(load, tmp_path, monkeypatch, capsys):
    script, ran = load("mnist_writers"), []

    def trained(settings, writers):
        ran.append(settings)
        own = {"k": settings["privacy.clusters"], "nu": settings["privacy.laplace-noise-multiplier"]}
        return own | {"seed": 0, "rounds": 7, "accuracy": 0.844, "leakage-maximum": 12345.0}

    monkeypatch.setattr(script, "trained", trained)
    monkeypatch.setattr(script, "writers_of", lambda task, data: 539)
    for _ in range(2):
        command(script, "mnist_writers", tmp_path, "--nu", "5", "7", monkeypatch=monkeypatch)
    assert len(ran) == 4 and {settings["num-rounds"] for settings in ran} == {30}
    assert "4 cells to go, about" in capsys.readouterr().out
    table = (tmp_path / "mnist_writers" / "table-softmax.md").read_text()
    assert "| 5 | 84.4 % | 84.4 % | 81.2 % | +2.0 | 1.234e+04 | 1, 1 |" in table
    assert "| 7 | 84.4 % | 84.4 % | – | – | 1.234e+04 | 1, 1 |" in table


def test_half_a_run_is_no_result(load, monkeypatch):
    cells = load("cells")
    monkeypatch.setattr(cells, "simulate", lambda *_: SimpleNamespace(ended="operator", stopped="stopped by SIGTERM"))
    with pytest.raises(SystemExit, match="is not kept: stopped by SIGTERM"):
        cells.simulated({})


def test_leakages_are_those_of_each_population_after_each_round(load, monkeypatch):
    script = load("linear")
    monkeypatch.setattr(script, "SETTINGS", script.SETTINGS | {"num-rounds": 2, "strategy.fraction-train": 1.0})
    figures, course = script.trained(script.settings_of("noised", "mse", None) | {"seed": 0})
    assert course["largest-leakage-of-the-first"] == [[0.0, 0.0], [0.4, 0.4], [0.8, 0.8]]
    assert figures["leakage-maximum"] == pytest.approx(0.8)
    assert [len(each) for each in course.values()] == [3, 3, 3]


def test_a_seed_that_is_there_is_not_run_again(load, tmp_path, monkeypatch):
    script, ran = load("linear"), []
    figures = dict.fromkeys((*FIGURES, "found-both"), 1.5) | {"rounds": 1, "distances": [1, 2]}
    monkeypatch.setattr(script, "trained", lambda settings: ran.append(settings["seed"]) or (figures, COURSE))
    for seeds in ("2", "3"):
        command(script, "linear", tmp_path, "--methods", "noised", "--seeds", seeds, monkeypatch=monkeypatch)
    assert ran == [0, 100, 200]
    assert len(json.loads((tmp_path / "linear" / "noised.json").read_text())["runs"]) == 3
    assert {path.name for path in (tmp_path / "linear").glob("*.png")} == {"figure.png", "leakage.png"}


def test_another_cohort_of_writers_has_results_of_its_own(load, tmp_path, monkeypatch):
    script = load("mnist_writers")
    own = {"seed": 0, "rounds": 7, "accuracy": 0.8, "leakage-maximum": 1.0, "k": 1, "nu": 5.0}
    monkeypatch.setattr(script, "trained", lambda settings, writers: own)
    monkeypatch.setattr(script, "writers_of", lambda task, data: 539)
    asked = ["--nu", "5", "--hypotheses", "1", "--cohort"]
    for cohort in ("40", "4"):
        command(script, "mnist_writers", tmp_path, *asked, cohort, monkeypatch=monkeypatch)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/softmax-*.json")}
    assert found == {f"mnist_writers/{folder}softmax-k1-seed0.json" for folder in ("", "cohort-4/")}


def test_the_papers_second_loss_has_results_of_its_own_beside_its_figures(load, tmp_path, monkeypatch):
    script = load("mnist_writers")
    own = {"seed": 0, "rounds": 7, "accuracy": 0.8, "leakage-maximum": 1.0, "k": 2, "nu": 5.0}
    monkeypatch.setattr(script, "trained", lambda settings, writers: own)
    monkeypatch.setattr(script, "writers_of", lambda task, data: 539)
    monkeypatch.setattr(characters, "MnistWriters", characters.MnistWriters)
    asked = ["--nu", "5", "--hypotheses", "2", "--model", "cnn", "--loss", "rmse"]
    command(script, "mnist_writers", tmp_path, *asked, monkeypatch=monkeypatch)
    table = (tmp_path / "mnist_writers" / "rmse" / "table-cnn.md").read_text()
    assert "| 5 | – | 80.0 % | 78.7 % | +4.3 | 1 | 0, 1 |" in table
    assert named_task(parse({"task.name": "mnist-writers"}).task).targets[""].loss == "rmse"


def test_rows_of_labels_are_scored_by_accuracy(load):
    kind = characters.Digits
    task, plain = (each(parse({"task.name": "digits"}).task) for each in (load("mnist_writers").with_rows(kind), kind))
    y = task.load().train.y
    assert y.sum(axis=1).tolist() == [1] * len(y)
    assert y.argmax(axis=1).tolist() == plain.load().train.y.tolist()
    assert task.metrics(y[:2], np.array([y[0], 1 - y[1]])) == {"loss": 0.5, "rmse": 0.5**0.5, "accuracy": 0.5}


def test_the_histogram_of_leakage_is_drawn_of_a_run_that_has_one(load, tmp_path, monkeypatch):
    script = load("hospital_charges")
    run_hospitals(script, "--hypotheses 5 --multipliers 3", tmp_path, monkeypatch)
    place = tmp_path / "hospital_charges"
    assert {path.name for path in place.glob("*.png")} == {"figure-60.png"}
    kept = json.loads((place / "seed-0.json").read_text())
    kept[0]["leakage-histogram"] = {"edges": [0, 1, 2], "counts": [3, 4]}
    (place / "seed-0.json").write_text(json.dumps(kept))
    run_hospitals(script, "--hypotheses 5 --multipliers 3", tmp_path, monkeypatch)
    assert {path.name for path in place.glob("*.png")} == {"figure-60.png", "leakage-60.png"}


def test_clips_are_drawn_of_results_that_name_one(script, tmp_path):
    settings = {"privacy.dp-sgd-clipping-norm": 8.0, "privacy.clipping-decay": 0.01, "privacy.min-clipping-norm": 1.0}
    written(script, tmp_path / "end_to_end", "proposed-clip-8", settings=settings)
    script.table(tmp_path / "end_to_end")
    assert {path.name for path in tmp_path.glob("**/*.png")} == {"end_to_end.png", "clips.png"}


def test_roc_curves_are_drawn_where_they_are_kept(load, tmp_path):
    tables, cells = load("metric_tables"), load("metric_cells")
    arguments = argparse.Namespace(
        results=tmp_path, size=64, placement="published", multiplier=0.01, partitions=["table-2"], seeds=1
    )
    place = tmp_path / cells.Cell(64, "table-2", "fedavg", "none", "published", 0).path
    place.parent.mkdir()
    last = {"metrics": {"auc": 0.9}}
    for roc in ([], [{"name": "0", "auc": 0.9, "found": [0.5] * 101}]):
        place.write_text(json.dumps({"clients": [0.5, 0.6], "last": last | {"roc": roc}}))
        tables.curves(arguments)
        drawn = {path.name.split("-")[0] for path in tmp_path.glob("*.png")}
        assert drawn == {"auc", "curves"} | ({"roc"} if roc else set())


@pytest.mark.parametrize(("placement", "least"), [("published", 0.0), ("sound", 0.1)])
def test_published_metric_noise_has_no_least_distance_and_no_guarantee(load, placement, least):
    settings = load("metric_cells").Cell(64, "table-2", "fedavg", "metric", placement, 0).settings()
    own = {"task.name": "digits", "task.partition": "iid", "task.image-size": "auto", "evaluation.federated": "off"}
    plan = build(parse(settings | own))
    assert plan.config.privacy.server.min_distance == least
    assert (plan.claim.status == "heuristic") == (placement == "published")
