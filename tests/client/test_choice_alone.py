"""A row's loss in a private choice is the same for any other rows; otherwise one row would move them all."""

import numpy as np
import pytest

from cloister.client.data import task_of
from cloister.client.trainers import chosen_to_train, model_and_trainer_of
from cloister.config.run import parse
from cloister.privacy.mechanisms.selection import PrivateChoice
from cloister.tasks.base import Examples
from cloister.tasks.numpy_models import SoftmaxRegression

CHOICE = {
    "privacy.server": "laplace-clustering",
    "privacy.clusters": 2,
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 1.0,
}
SOFTMAX = CHOICE | {"task.name": "mnist", "task.model": "softmax"}
CNN = CHOICE | {"task.name": "mnist"}
REGRESSION = CHOICE | {"task.name": "hospital-charges"}


class Chooser:
    """Private choices of a run, whose losses can be looked at."""

    def __init__(self, settings, monkeypatch):
        self.config = parse(settings)
        self.model, self.task = model_and_trainer_of(self.config).model, task_of(self.config.task)
        self.seen = []
        monkeypatch.setattr(PrivateChoice, "choose", lambda _, losses, *__: self.seen.append(losses) or 0)

    def rows(self, count, seed=0):
        """Examples of the task's shapes."""
        rng = np.random.default_rng(seed)
        x = rng.random((count, *self.task.input_shape), np.float32)
        return Examples(x, rng.integers(0, self.task.classes, count) if self.task.classes else x[:, 0])

    def losses(self, examples, weights):
        """Of the first of two hypotheses."""
        with np.errstate(all="ignore"):
            chosen_to_train(self.config.privacy, self.model, (weights, weights), self.task, examples)
        return self.seen[-1][0]

    def random_weights(self, scale):
        rng = np.random.default_rng(1)
        arrays = self.model.arrays()
        return {name: (scale * rng.standard_normal(a.shape)).astype(a.dtype) for name, a in arrays.items()}


def cancelling():
    """Weights of softmax regression on MNIST whose scores are nothing but roundings."""
    rng = np.random.default_rng(0)
    half = rng.standard_normal((392, 10)).astype(np.float32) * np.float32(2e6)
    kernel = rng.permuted(np.concatenate([half, -half]), axis=0)
    return {"softmax/kernel": kernel, "softmax/bias": np.zeros(10, np.float32)}


def overflowing():
    """Weights whose sums over the pixels overflow in one order of summation, and not in another."""
    column = np.concatenate([np.full(256, 3e36), np.full(264, 6e36), np.full(264, -6e36)])
    kernel = np.repeat(column[:, None], 10, axis=1).astype(np.float32)
    return {"softmax/kernel": kernel, "softmax/bias": np.zeros(10, np.float32)}


CANCELLING, OVERFLOWING = cancelling(), overflowing()


@pytest.mark.parametrize("weights", [CANCELLING, OVERFLOWING], ids=["cancelling", "overflowing"])
def test_one_row_more_changes_no_other_loss(monkeypatch, weights):
    chooser = Chooser(SOFTMAX, monkeypatch)
    rows = chooser.rows(130)
    if weights is CANCELLING:
        rows.x[:] = 1
    else:  # the largest sum on the way overflows for some rows and not for others
        rows.x[:] = np.linspace(0.1, 0.4, len(rows))[:, None, None, None]
    whole = chooser.losses(rows, weights)
    for count in [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]:
        np.testing.assert_array_equal(chooser.losses(rows.take(np.arange(count)), weights), whole[:count])


@pytest.mark.parametrize("settings", [SOFTMAX, CNN], ids=["softmax", "cnn"])
def test_a_row_has_one_loss_at_every_place_and_in_a_batch(monkeypatch, settings):
    chooser = Chooser(settings, monkeypatch)
    rows, weights = chooser.rows(17), CANCELLING if settings is SOFTMAX else chooser.random_weights(0.3)
    if settings is SOFTMAX:
        rows.x[:] = (1 + np.arange(17) / 64)[:, None, None, None]
    alone = np.concatenate([chooser.losses(rows.take(np.array([i])), weights) for i in range(len(rows))])
    assert len(set(alone.tolist())) > 1
    for count in (2, 7, 16, 17):
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(rows))[:count]
            np.testing.assert_array_equal(chooser.losses(rows.take(order), weights), alone[order])


def test_the_losses_are_those_of_the_whole_set_to_rounding(monkeypatch):
    for settings in (SOFTMAX, CNN, REGRESSION):
        chooser = Chooser(settings, monkeypatch)
        rows, weights = chooser.rows(8), chooser.random_weights(0.05)
        found = chooser.losses(rows, weights)
        assert found.shape == (8,)
        np.testing.assert_allclose(found, chooser.task.losses(rows.y, chooser.model.predict(rows.x)), rtol=1e-4)
        assert chooser.losses(rows.take(np.zeros(0, int)), weights).shape == (0,)


def test_a_row_that_cannot_be_scored_counts_as_the_largest_loss_and_changes_no_other(monkeypatch):
    chooser = Chooser(SOFTMAX, monkeypatch)
    rows, weights = chooser.rows(21), CANCELLING
    usual, own = chooser.losses(rows, weights), SoftmaxRegression.predict
    rows.x[13] = -1.0

    def fails(self, x):
        if (x == -1.0).all(axis=(1, 2, 3)).any():
            raise MemoryError
        return own(self, x)

    monkeypatch.setattr(SoftmaxRegression, "predict", fails)
    found = chooser.losses(rows, weights)
    assert found[13] == np.inf
    np.testing.assert_array_equal(np.delete(found, 13), np.delete(usual, 13))
