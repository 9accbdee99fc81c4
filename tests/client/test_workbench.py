"""A model and the trainer that was made for it are never apart, whatever the order of messages."""

import numpy as np
import pytest
from asking import DP_SGD, GAUSSIAN, LAPLACE, OPEN, SOFTMAX, answer, arrays_of, message_of
from support import failures

from cloister.client.trainers import model_and_trainer_of
from cloister.config.run import parse
from cloister.utils.errors import ConfigError

CANCER = {"task.name": "breast-cancer", "task.test-fraction": 0.0, "privacy.server": "none"}
LOGISTIC = {"softmax/kernel": np.zeros((30, 2), np.float32), "softmax/bias": np.zeros(2, np.float32)}
RUNS = {
    "dp-sgd": (DP_SGD, SOFTMAX),
    "open": (OPEN, SOFTMAX),
    "gaussian": (GAUSSIAN, SOFTMAX),
    "laplace": (LAPLACE, SOFTMAX),
    "another task": (CANCER, LOGISTIC),
    "another task with dp-sgd": (CANCER | {"privacy.client": "dp-sgd"}, LOGISTIC),
}


def length(settings, sent):
    moved = arrays_of(answer(settings, None, message_of(sent)))
    return float(np.sqrt(sum(np.square(moved[name] - sent[name]).sum() for name in sent)))


def test_training_goes_on_after_another_run():
    """The global model came back as it was sent: the trainer had kept a model that nobody read any more."""

    def check(between, first):
        for name in (first, between, first, between):
            assert length(*RUNS[name]) > 0, name

    cases = [
        (between, first) for between in [name for name in RUNS if name != "dp-sgd"] for first in ["dp-sgd", "open"]
    ]
    assert failures(cases, check) == []


def test_the_trainer_trains_the_model_of_its_bench():
    def check(name):
        settings, _ = RUNS[name]
        bench = model_and_trainer_of(parse(settings))
        assert bench.trainer.model is bench.model and bench.trainer is bench.trainer

    assert failures([(name,) for name in RUNS], check) == []


def test_it_is_kept_for_the_messages_of_a_run():
    one = model_and_trainer_of(parse(OPEN | {"seed": 1, "num-rounds": 3}))
    assert model_and_trainer_of(parse(OPEN | {"seed": 2, "num-rounds": 4})) is one


def test_and_made_anew_for_whatever_it_depends_on():
    def check(change):
        changed = DP_SGD | change
        if change is CANCER:
            changed = {key: value for key, value in changed.items() if key != "task.model"}
        assert model_and_trainer_of(parse(changed)) is not model_and_trainer_of(parse(DP_SGD))

    cases = [
        (change,)
        for change in [
            {"client.learning-rate": 0.1},
            {"client.batch-size": 7},
            {"privacy.dp-sgd-noise-multiplier": 3.0},
            CANCER,
        ]
    ]
    assert failures(cases, check) == []


@pytest.mark.parametrize("settings", [OPEN, DP_SGD])
def test_an_optimizer_that_the_model_does_not_know(settings):
    with pytest.raises(ConfigError, match=r"client.optimizer must be 'sgd'"):
        model_and_trainer_of(parse(settings | {"client.optimizer": "adam"})).trainer  # noqa: B018
    assert "client.optimizer must be 'sgd'" in answer(settings | {"client.optimizer": "adam"}, None).error.reason


def test_scoring_makes_no_trainer():
    """A model that no trainer takes can be scored all the same."""
    settings = OPEN | {"client.optimizer": "adam", "task.test-fraction": 0.2}
    assert "accuracy" in dict(answer(settings, None, message_of(kind="evaluate")).content["metrics"])
