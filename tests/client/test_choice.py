"""A client's choice of a hypothesis: by un-noised losses, or by the mechanism that protects the right unit."""

import numpy as np
import pytest
from support import failures

from cloister.client import trainers
from cloister.client.trainers import best, choice_of, chosen_to_train
from cloister.config.run import parse
from cloister.privacy.mechanisms.selection import PrivateChoice
from cloister.tasks.base import Examples

CLUSTERED = {"privacy.server": "laplace-clustering"}
BOUNDED = {"privacy.choice-epsilon": 2.0, "privacy.max-loss": 3.0}
EXAMPLES = Examples(np.array([[1.0], [2.0]]), np.array([1.0, 1.0]))
NOBODY = Examples(np.zeros((0, 1)), np.zeros(0))
GROUPED = Examples(EXAMPLES.x, EXAMPLES.y, np.array(["b", "a"]))


class Slope:
    """A model of one number that x is multiplied with."""

    def __init__(self):
        self.slope = None

    def assign(self, arrays):
        self.slope = float(arrays["slope"])

    def predict(self, x):
        return self.slope * x[:, 0]

    predict_alone = predict


class Distance:
    """A task whose loss is |prediction - y|."""

    def losses(self, y, predicted):
        return np.abs(predicted - y)


def slopes(*numbers):
    return [{"slope": np.float64(number)} for number in numbers]


def unprotected(clusters=3):
    return parse(CLUSTERED | {"privacy.clusters": clusters}).privacy


def protected(client):
    return parse(CLUSTERED | BOUNDED | {"privacy.client": client}).privacy


def heard(monkeypatch):
    """Record the inputs of the private choice, which always returns the last hypothesis."""
    asked = []

    def choose(self, losses, groups=None):
        asked.append((self, [list(each) for each in losses], None if groups is None else list(groups)))
        return len(losses) - 1

    monkeypatch.setattr(PrivateChoice, "choose", choose)
    return asked


class TestBest:
    def test_the_smallest_mean_loss_wins_and_is_in_the_model(self):
        def check(numbers, chosen):
            model = Slope()
            assert best(model, slopes(*numbers), Distance(), EXAMPLES) == chosen
            assert model.slope == numbers[chosen]

        cases = [
            ((0.0, 1.0, 9.0), 1),  # losses (1, 1), (0, 1), (8, 17)
            ((0.7, 0.0), 0),  # means 0.35 and 1: of the sums and the largest alone the same
            ((1.0, 0.5), 1),  # sums 1 and 0.5
            ((2.0, 2.0), 0),  # of equal ones the first
            ((np.nan, 9.0), 1),
            ((np.inf, 9.0), 1),
            ((5.0,), 0),
        ]
        assert failures(cases, check) == []

    def test_without_examples_it_is_the_first(self):
        model = Slope()
        assert best(model, slopes(3.0, 1.0), Distance(), NOBODY) == 0
        assert model.slope == 3.0

    def test_the_only_one_is_not_scored(self):
        """Its loss may be none at all."""
        assert best(Slope(), slopes(1.0), None, EXAMPLES) == 0


class Fragile(Slope):
    """A model that cannot compute a batch with a negative x in it."""

    def predict_alone(self, x):
        if (x < 0).any():
            raise FloatingPointError
        return self.predict(x)


class TestToTrain:
    @pytest.mark.parametrize("bad", [(), (0,), (1,), (6,), (0, 1), (2, 3, 5), range(7)])
    def test_a_row_that_cannot_be_computed_takes_no_other_along(self, monkeypatch, bad):
        asked, x, y = heard(monkeypatch), np.arange(1.0, 8.0), np.array([2.0, 0, 9, 1, 4, 3, 8])
        x[list(bad)] *= -1
        chosen_to_train(protected("dp-sgd"), Fragile(), slopes(1.0, 3.0), Distance(), Examples(x[:, None], y))
        ((_, losses, _),) = asked
        assert losses == [
            [np.inf if row < 0 else abs(slope * row - of) for row, of in zip(x, y, strict=True)] for slope in (1, 3)
        ]

    def test_nobody_has_no_losses(self, monkeypatch):
        asked = heard(monkeypatch)
        for client in ("dp-sgd", "gaussian"):
            chosen_to_train(protected(client), Slope(), slopes(1.0, 3.0), Distance(), NOBODY)
        assert [losses for _, losses, _ in asked] == [[[], []], [[], []]]

    def test_the_only_one_is_taken_unseen(self, monkeypatch):
        asked = heard(monkeypatch)
        assert chosen_to_train(unprotected(1), None, slopes(1.0), None, EXAMPLES) == 0
        assert not asked

    def test_exactly_where_the_run_does_not_protect_the_client(self, monkeypatch):
        asked, model = heard(monkeypatch), Slope()
        chosen = chosen_to_train(unprotected(), model, slopes(9.0, 1.0, 8.0), Distance(), EXAMPLES)
        assert (chosen, model.slope, asked) == (1, 1.0, [])

    @pytest.mark.parametrize(
        ("client", "examples", "unit", "groups"),
        [
            ("gaussian", EXAMPLES, "client", None),
            ("laplace", EXAMPLES, "client", None),
            ("dp-sgd", EXAMPLES, "example", None),
            ("dp-sgd", GROUPED, "group", [1, 0]),
        ],
    )
    def test_privately_where_it_does(self, monkeypatch, client, examples, unit, groups):
        asked = heard(monkeypatch)
        hypotheses = slopes(1.0, 3.0)
        assert chosen_to_train(protected(client), Slope(), hypotheses, Distance(), examples) == 1
        ((mechanism, losses, numbered),) = asked
        assert mechanism == PrivateChoice(2.0, 3.0, unit)
        assert losses == [[0.0, 1.0], [2.0, 5.0]]
        assert numbered == groups

    def test_a_client_without_examples_has_no_losses(self, monkeypatch):
        asked = heard(monkeypatch)
        chosen_to_train(protected("gaussian"), None, slopes(1.0, 3.0), None, NOBODY)
        assert asked[0][1] == [[], []]


def test_the_unit_of_a_choice():
    def check(grouped, client):
        expected = "client" if client != "dp-sgd" else "group" if grouped else "example"
        assert choice_of(protected(client), grouped) == PrivateChoice(2.0, 3.0, expected)

    cases = [(grouped, client) for grouped in [False, True] for client in ["gaussian", "laplace", "dp-sgd"]]
    assert failures(cases, check) == []


def test_a_mean_that_can_be_compared():
    def check(losses, mean):
        assert trainers._mean(np.array(losses)) == mean

    assert failures([([], 0.0), ([1.0, 4.0], 2.5), ([1.0, np.nan], np.inf), ([np.inf], np.inf)], check) == []
