"""Imbalanced classes in a run: figures of each round, the majority's accuracy, and an early stop by any score."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from reported import line, write_run
from support import failures
from typer.main import get_command

from cloister import cli
from cloister.config.run import parse
from cloister.server.evaluation import CentralEvaluation, refuse_unknown_score
from cloister.server.reports.compare.comparison import compared, each_alone
from cloister.server.reports.compare.runs import better, read_runs
from cloister.sweep.sweep import best_of
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.targets import Target
from cloister.utils.arrays import to_record
from cloister.utils.errors import ConfigError
from cloister.utils.rows import as_rows

ROUNDS = 4


def invoke(*arguments):
    command = get_command(cli.app)
    return CliRunner().invoke(command, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run that stops by the area, and what it has said."""
    folder = tmp_path_factory.mktemp("runs")
    settings = (
        f"task.name='breast-cancer' privacy.server='none' num-rounds={ROUNDS} evaluation.patience={ROUNDS} "
        f"evaluation.criterion='auc' tensorboard=false output-dir='{folder}' run-name='one'"
    )
    result = invoke("run", "-c", settings)
    assert result.exit_code == 0, result.output
    return folder / "one", result.output


def test_every_round_has_the_figures_and_the_majority_stands_once_before_them(ran):
    _, said = ran
    opening, *rounds = said.split("Result")[0].split("round ")
    assert len(rounds) == ROUNDS + 1
    assert all(" accuracy 0." in line and " f1 0." in line and " auc 0." in line for line in rounds)
    assert opening.count("majority       accuracy 0.6") == 1 and "majority" not in "".join(rounds)
    assert "accuracy of the majority class alone" in said.split("Result")[1]


def test_the_model_of_the_largest_area_is_kept(ran):
    path, _ = ran
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()][1:]
    best = max(rounds, key=lambda done: done["federated"]["auc"])  # clients judge a run without privacy
    assert json.loads((path / "evaluation.json").read_text())["metrics"] == best["central"]


def test_compare_takes_each_score_and_names_the_majority_s(ran):
    path, _ = ran
    (group,) = json.loads(invoke("compare", path, "--score", "f1", "--json").output)["groups"]
    counts = [each["support"] for each in json.loads((path / "evaluation.json").read_text())["classes"]]
    assert group["runs"][0]["majority"] == max(counts) / sum(counts) and group["final"]["mean"] > 0.5
    said = " ".join(invoke("compare", path).output.split())
    assert f"most frequent class of that data has an accuracy of {max(counts) / sum(counts):.4f}." in said


def test_a_sweep_selects_by_the_area_where_accuracy_says_otherwise(tmp_path):
    figures = {"a": {"accuracy": 0.95, "f1": 0.49, "auc": 0.5}, "b": {"accuracy": 0.9, "f1": 0.7, "auc": 0.8}}
    for name, central in figures.items():
        write_run(tmp_path / name, rounds=[line(number, central={"loss": 1.0} | central) for number in (0, 1)])
    groups = each_alone(read_runs([tmp_path / name for name in figures]))
    chosen = {score: best_of(compared(groups, score), score).name for score in figures["a"]}
    assert chosen == {"accuracy": "a", "f1": "b", "auc": "b"}


def test_the_better_score_of_an_output_is_that_of_its_metric():
    names = ["loss", "age.rmse", "age.loss", "0.mae", "ill.auc", "loss.accuracy"]
    assert [better(name, [1.0, 2.0]) for name in names] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_the_log_of_a_service_has_it_too(tmp_path):
    settings = f"num-rounds=1 log-format='json' output-dir='{tmp_path}' tensorboard=false"
    result = invoke("run", "-c", f"{settings} task.name='breast-cancer'")
    start = next(line for line in map(json.loads, result.output.splitlines()) if line["event"] == "start")
    assert 0.6 < start["majority"] < 0.7


def task_of(name, *labels):
    """A task whose test examples have these labels."""
    task = TASKS.load(name)(parse({"task.name": name}).task)
    if labels:
        test = Examples(np.zeros((len(labels), *task.input_shape), np.float32), np.array(labels))
        task.load = lambda: Dataset(test, test)
    return task


def test_a_score_that_the_task_does_not_report_is_refused_with_those_it_does():
    def check(name, criterion, labels, told):
        task = task_of(name, *labels)
        model = task.build()
        judged = CentralEvaluation(task, model) if labels else None
        if not told:
            refuse_unknown_score(task, model, criterion, judged)
            return
        with pytest.raises(ConfigError) as refusal:
            refuse_unknown_score(task, model, criterion, judged)
        assert f"evaluation.criterion = {criterion!r} is no score of task {name!r}" in str(refusal.value)
        assert str(refusal.value).endswith(told)

    cases = [
        ("breast-cancer", "auc", (0, 1, 1), ""),
        ("breast-cancer", "auc", (1, 1, 1), "it has loss, accuracy, f1"),  # undefined on these
        ("breast-cancer", "acuracy", (0, 1), "it has loss, accuracy, f1, auc"),
        ("breast-cancer", "auc", (), ""),
        ("linear", "f1", (), "it has loss, rmse"),
        ("linear", "loss", (), ""),
    ]
    assert failures(cases, check) == []


def of_targets(target, outputs, **attributes):
    """A task with these targets and two inputs, and a model that predicts what `outputs` says of n examples."""
    shapes = {"scan": (2, 2), "age": (1,)}
    kind = type("Mine", (Digits,), {"target": target, "classes": 0, "input_shape": shapes, **attributes})
    task, model = kind(parse({}).task), SoftmaxRegression(features=4, classes=2)
    model.predict = lambda x: as_rows(outputs(len(x["age"]), np.random.default_rng(0)))
    return task, model


def test_a_score_on_clients_is_checked_for_every_kind_of_target():
    def check(target, outputs, known, unknown):
        task, model = of_targets(target, outputs)
        refuse_unknown_score(task, model, known, None)
        with pytest.raises(ConfigError, match=f"evaluation.criterion = '{unknown}' is no score of task .* {known}"):
            refuse_unknown_score(task, model, unknown, None)

    cases = [
        (Target("mse"), lambda n, rng: rng.random(n), "rmse", "nonsense"),
        (Target("binary-cross-entropy"), lambda n, rng: rng.random(n), "auc", "f2"),
        (Target("binary-cross-entropy", (3,)), lambda n, rng: rng.random((n, 3)), "auc", "f1"),
        (Target("cross-entropy", (5,), 3), lambda n, rng: rng.dirichlet(np.ones(3), (n, 5)), "accuracy", "auc"),
        (
            {"age": Target("mae"), "ill": Target("binary-cross-entropy"), "stage": Target(classes=4)},
            lambda n, rng: {"age": rng.random(n), "ill": rng.random(n), "stage": rng.dirichlet(np.ones(4), n)},
            "stage.auc",
            "stage.rmse",
        ),
    ]
    assert failures(cases, check) == []


def test_roc_curves_are_of_each_kind_of_classifier_and_of_none_else():
    def check(target, outputs, names):
        task, model = of_targets(target, outputs)
        y = as_rows(task.placeholders(60).y)
        test = Examples({"scan": np.zeros((60, 2, 2), np.float32), "age": np.zeros((60, 1), np.float32)}, y)
        task.load = lambda: Dataset(test, test)
        found = CentralEvaluation(task, model).in_detail(to_record(model.arrays()))
        assert [curve["name"] for curve in found.get("roc", ())] == names

    cases = [
        (Target(classes=3), lambda n, rng: rng.dirichlet(np.ones(3), n), ["0", "1", "2"]),
        (Target(classes=2), lambda n, rng: rng.dirichlet(np.ones(2), n), ["1"]),
        (Target("binary-cross-entropy"), lambda n, rng: rng.random(n), ["1"]),
        (Target("binary-cross-entropy", (3,)), lambda n, rng: rng.random((n, 3)), ["0", "1", "2"]),
        (Target("binary-cross-entropy", (2, 2)), lambda n, rng: rng.random((n, 2, 2)), []),
        (Target("cross-entropy", (5,), 3), lambda n, rng: rng.dirichlet(np.ones(3), (n, 5)), []),
        (Target("mse"), lambda n, rng: rng.random(n), []),
    ]
    assert failures(cases, check) == []


def test_metrics_that_fail_on_the_scored_examples_are_a_fault():
    task, model = of_targets(Target("mse"), lambda n, rng: rng.random(n), metrics=lambda self, y, scores: 1 / 0)
    with pytest.raises(ConfigError, match=r"criterion = 'r2': metrics\(\) of task .* fails: ZeroDivisionError"):
        refuse_unknown_score(task, model, "r2", None)


def test_a_criterion_without_patience_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation.criterion = 'auc' has no effect with evaluation.patience = 0"):
        parse({"evaluation.criterion": "auc"})


def test_the_majority_of_test_examples_and_none_of_numbers():
    tasks = [task_of("breast-cancer", 0, 1, 1, 1), task_of("linear", 0.5, 0.25)]
    assert [CentralEvaluation(task, task.build()).majority for task in tasks] == [0.75, None]


@pytest.mark.parametrize(("target", "share"), [(Target("binary-cross-entropy"), 0.75), (Target("mse"), None)])
def test_the_majority_of_a_target_of_0_and_1_is_that_of_two_classes(target, share):
    task, model = of_targets(target, lambda n, rng: rng.random(n), input_shape=(1,))
    test = Examples(np.zeros((4, 1), np.float32), np.array([0, 1, 1, 1]))
    task.load = lambda: Dataset(test, test)
    assert CentralEvaluation(task, model).majority == share
