"""The model that a run starts from, trained on the server's own examples before the first round."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from cloister.config.run import parse
from cloister.server.build import build
from cloister.server.evaluation import CentralEvaluation
from cloister.server.prepare import initial_model
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.tasks.base import Dataset
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.datasets.regressions import Linear
from cloister.tasks.splits import with_validation
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import NumpyTrainer
from cloister.utils.arrays import to_record, unstacked
from cloister.utils.errors import ConfigError, DataError

SOFTMAX = {"task.model": "softmax", "privacy.server": "none", "seed": 3}


def initial(**settings):
    plan = build(parse(SOFTMAX | {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}))
    return initial_model(plan, plan.task.build())


def digits():
    return Digits(parse(SOFTMAX).task)


def rows(examples):
    return {row.tobytes() for row in examples.x}


def test_without_it_a_model_begins_as_it_always_did():
    assert not any(array.any() for array in initial().values())


def test_it_is_training_on_half_of_the_test_examples_by_the_task_s_recipe():
    task = digits()
    model, data = task.build(), with_validation(task, task.load())
    plan = TrainingPlan(epochs=4, batch_size=16, learning_rate=0.3, proximal_mu=0.0, seed=(3, 0, 0), round=0)
    NumpyTrainer(model, Digits.recipe).fit(data.validation, plan)
    found = initial(strategy__pretrain_epochs=4)
    assert all(np.array_equal(found[name], array) for name, array in model.arrays().items())
    accuracy = CentralEvaluation(task, model, pretrained=True)(to_record(found))["accuracy"]
    assert accuracy > 0.8


@pytest.mark.parametrize("settings", [SOFTMAX, SOFTMAX | {"task.model": "mlp"}], ids=["numpy", "keras"])
def test_the_same_seed_gives_the_same_model_and_another_another(settings):
    if settings["task.model"] == "mlp":
        pytest.importorskip("keras")

    def found(seed):
        plan = build(parse(settings | {"seed": seed, "strategy.pretrain-epochs": 2}))
        return initial_model(plan, plan.task.build())

    one, same, other = found(5), found(5), found(6)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def test_client_settings_change_how_it_is_trained():
    one, other = initial(strategy__pretrain_epochs=1), initial(strategy__pretrain_epochs=1, client__learning_rate=0.01)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def test_what_the_server_trains_on_scores_nothing_and_is_stratified():
    task = digits()
    before, after = task.load(), with_validation(task, task.load())
    assert rows(after.test) | rows(after.validation) == rows(before.test)
    assert len(after.test) + len(after.validation) == len(before.test)
    assert not rows(after.test) & rows(after.validation) and after.train is not None
    shares = np.bincount(after.validation.y) / np.bincount(before.test.y)
    assert np.abs(shares - 0.5).max() < 0.02
    again = with_validation(task, task.load())
    assert np.array_equal(again.validation.x, after.validation.x)
    scorer = CentralEvaluation(task, task.build(), pretrained=True)
    assert np.array_equal(scorer.examples.x, after.test.x)


def test_where_test_examples_have_owners_half_of_the_owners_are_the_server_s():
    task = Linear(parse({"task.name": "linear"}).task)
    data = with_validation(task, task.load())
    assert len(np.unique(data.test_owners)) == 50 and len(data.test) == len(data.validation) == 500
    assert not rows(data.test) & rows(data.validation)


def test_a_task_s_own_validation_part_is_used_and_its_test_part_is_left_alone():
    task = digits()
    data = task.load()
    own = Dataset(data.train, data.test, validation=data.test.take(np.arange(3)))
    assert with_validation(task, own) is own


def test_hypotheses_are_each_trained_from_where_they_would_begin():
    settings = {"privacy__server": "laplace-clustering", "privacy__clusters": 2, "strategy__pretrain_epochs": 2}
    one, other = unstacked(initial(**settings))
    begun = unstacked(initial(**settings | {"strategy__pretrain_epochs": 0}))[1]
    data, model = with_validation(digits(), digits().load()).validation, digits().build()
    model.assign(begun)
    NumpyTrainer(model, Digits.recipe).fit(data, TrainingPlan(2, 16, 0.3, 0.0, (4, 0, 0), 0))
    assert all(np.array_equal(other[name], array) for name, array in model.arrays().items())
    assert all(array.any() for array in (*one.values(), *other.values()))
    assert not any(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("epochs", [0, 2])
def test_hypotheses_that_releases_tell_apart_begin_as_the_first(epochs):
    settings = {"privacy__server": "laplace-clustering", "privacy__clusters": 3, "strategy__pretrain_epochs": epochs}
    expected, other, _ = unstacked(initial(**settings))
    alike = unstacked(initial(**settings, privacy__clusters_split_round=1))
    assert len(alike) == 3 and not all(np.array_equal(other[name], array) for name, array in expected.items())
    assert all(np.array_equal(model[name], array) for model in alike for name, array in expected.items())


class Elsewhere(Digits):
    """A task whose benchmark is not on the server."""

    def load(self):
        raise DataError("task.data-path = '' must be a folder with the images")


class Untested(Digits):
    """A task with no more than one test example."""

    def load(self):
        data = super().load()
        return Dataset(data.train, data.test.take(np.arange(1)))


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Elsewhere, "must be a folder with the images"), (Untested, "1 test examples are too few of each class")],
)
def test_a_server_without_examples_is_refused(tmp_path, monkeypatch, kind, why):
    monkeypatch.setattr("cloister.tasks.making.TASKS.load", lambda name: kind)
    with pytest.raises(DataError, match=f"strategy.pretrain-epochs = 2 needs examples on the server: .*{why}"):
        initial(strategy__pretrain_epochs=2)


def test_a_rate_that_diverges_is_refused():
    with (
        np.errstate(all="ignore"),
        pytest.raises(ConfigError, match=r"pretrain-epochs = 3 at client.learning-rate = 1e\+38 makes weights inf"),
    ):
        initial(strategy__pretrain_epochs=3, client__learning_rate=1e38)


@pytest.mark.parametrize("name", ["fedadam", "krum"])
def test_any_strategy_starts_from_it(tmp_path, name):
    settings = {"strategy.name": name, "strategy.pretrain-epochs": 10, "num-rounds": 1, "tensorboard": False}
    settings["client.local-epochs"] = 1
    quiet = ConsoleReporter(1, Console(file=io.StringIO()))
    outcome = simulate(SOFTMAX | settings | {"output-dir": str(tmp_path)}, 4, quiet)
    first = outcome.rounds[0]
    assert first.number == 0 and first.central["accuracy"] > 0.75
    said = json.loads((outcome.directory.path / "privacy.json").read_text())
    assert any("server's own examples" in line for line in said["unprotected"])
