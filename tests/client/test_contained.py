"""Where a client protects itself, whatever goes wrong with its data ends in the same kind of reply as success."""

import logging
import math

import numpy as np
import pytest
from asking import (
    CLUSTERED,
    DP_SGD,
    GAUSSIAN,
    MECHANISMS,
    OPEN,
    SOFTMAX,
    answer,
    arrays_of,
    entries_of,
    message_of,
    own_node,
    policy_file,
    write_data,
)
from support import failures

from cloister.client import app
from cloister.client.data import _own_data, _own_file
from cloister.client.trainers import model_and_trainer_of
from cloister.config.run import parse
from cloister.training.trainers import NumpyTrainer
from cloister.utils.arrays import stacked

ROWS = np.random.default_rng(0).random((40, 64))
LABELS = np.arange(40) % 10
BROKEN = {
    "missing file": None,
    "no archive": b"PK\x03\x04 cut short",
    "another shape": {"x": np.zeros((40, 63)), "y": LABELS},
    "no labels": {"x": ROWS},
    "labels that are numbers": {"x": ROWS, "y": LABELS + 0.5},
    "no rows": {"x": ROWS[:0], "y": LABELS[:0]},
    "one nan": {"x": np.where(np.arange(64) == 5, np.nan, ROWS), "y": LABELS},
    "infinite": {"x": ROWS + np.inf, "y": LABELS},
    "no class": {"x": ROWS, "y": LABELS + 90},
    "one row": {"x": ROWS[:1], "y": LABELS[:1]},
}


def broken_node(folder, kind, **configured):
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / "data.npz", BROKEN[kind]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    return own_node(folder, path, **configured)


def shape_of(reply):
    """Everything of a reply but the numbers in it."""
    assert not reply.has_error(), reply.error.reason
    arrays = {name: (array.shape, array.dtype) for name, array in arrays_of(reply).items()}
    return list(reply.content), arrays, dict(reply.content["metrics"])


def charged(node):
    """The events in a node's ledger, by unit."""
    units = ("client", "example", "group", "neighbourhood")
    return {unit: [entry.event for entry in entries_of(node, unit)] for unit in units}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("mechanism", MECHANISMS)
class TestData:
    def test_is_answered_with_noise_and_charged_like_any_other(self, tmp_path, mechanism, kind, caplog):
        settings, good = MECHANISMS[mechanism], own_node(tmp_path / "good")
        bad = broken_node(tmp_path / "bad", kind)
        expected = shape_of(answer(settings, good))
        with caplog.at_level(logging.WARNING, "cloister.client"):
            reply = answer(settings, bad)
        assert shape_of(reply) == expected
        assert charged(bad) == charged(good)
        if kind not in ("one row", "no rows") or (kind == "no rows" and mechanism != "dp-sgd"):
            assert caplog.text, "the reason is in the node's log"
        sent = arrays_of(reply).values()
        assert all(np.isfinite(array).all() and len(np.unique(array)) > array.size // 2 for array in sent)


@pytest.mark.parametrize("mechanism", MECHANISMS)
class TestTraining:
    def test_an_exception_is_answered_with_noise(self, tmp_path, mechanism, monkeypatch, caplog):
        settings, node = MECHANISMS[mechanism], own_node(tmp_path)
        expected = shape_of(answer(settings, node))
        trainer = type(model_and_trainer_of(parse(settings)).trainer)
        fit = trainer.fit

        def fails(self, examples, plan):
            if len(examples):
                self.model.assign({name: array + 7 for name, array in self.model.arrays().items()})
                raise ArithmeticError("row 17 holds 3.25")
            return fit(self, examples, plan)

        monkeypatch.setattr(trainer, "fit", fails)
        with caplog.at_level(logging.ERROR, "cloister.client"):
            reply = answer(settings, node)
        assert shape_of(reply) == expected and "row 17" in caplog.text
        # Nothing of a training that was cut off is in it: 7 everywhere would show.
        assert all(abs(np.mean(array)) < 4 for array in arrays_of(reply).values())
        assert len(entries_of(node, "example")) == 2

    def test_divergence_is_answered_with_noise(self, tmp_path, mechanism):
        """A search over messages once read features one by one from overflows of weights near the largest number."""
        settings = MECHANISMS[mechanism] | {"client.learning-rate": 3e38}
        near = {name: np.full_like(array, 3e38) for name, array in SOFTMAX.items()}
        node = own_node(tmp_path)
        with np.errstate(all="ignore"):
            reply = answer(settings, node, message_of(near))
        if mechanism == "dp-sgd":
            # What left the steps was noised before; whether it overflows is post-processing.
            assert set(arrays_of(reply)) == set(SOFTMAX)
        else:
            assert all(np.isfinite(array).all() for array in arrays_of(reply).values())
        assert len(entries_of(node, "example")) == 1

    def test_too_few_rows_of_the_policy(self, tmp_path, mechanism):
        """By what it states with dp-sgd, and so a refusal; otherwise the true number must not show."""
        policy = {"mechanisms": [mechanism], "min_server_noise_multiplier": None, "max_example_epsilon": 1e9}
        settings = MECHANISMS[mechanism]
        replies = []
        for name, count in (("few", 3), ("many", 60)):
            rules = (
                policy | {"min_rows": 40, "min_radius": 1.0} if mechanism == "laplace" else policy | {"min_rows": 40}
            )
            folder = tmp_path / name
            node = own_node(folder, write_data(folder, count), policy=str(policy_file(folder, **rules)))
            replies.append(shape_of(answer(settings, node)))
        assert replies[0] == replies[1]

    def test_how_training_failed_is_nowhere_in_a_reply(self, tmp_path, mechanism):
        node = broken_node(tmp_path, "missing file")
        reply = answer(MECHANISMS[mechanism], node)
        assert not reply.has_error() and dict(reply.content["metrics"]) == {}


class TestOneBadRow:
    """With dp-sgd a row that cannot be used is one that is not there: the others train as without it."""

    def model(self, tmp_path, name, **arrays):
        settings = DP_SGD | {"privacy.noise-seed": 3, "client.batch-size": 40, "privacy.dp-sgd-noise-multiplier": 0.0}
        node = own_node(tmp_path / name, write_data(tmp_path, name=f"{name}.npz", **arrays))
        return arrays_of(answer(settings, node))

    def test_it_changes_nothing_else(self, tmp_path):
        """All rows take part in every step (B = N), and there is no noise: sums can be compared."""
        spoiled = ROWS.copy()
        spoiled[11, 3] = np.nan
        keep = np.arange(40) != 11
        bad = self.model(tmp_path, "bad", x=spoiled, y=LABELS)
        without = self.model(tmp_path, "without", x=ROWS[keep], y=LABELS[keep])
        whole = self.model(tmp_path, "whole", x=ROWS, y=LABELS)
        for name in SOFTMAX:
            np.testing.assert_array_equal(bad[name], without[name])
            assert not np.array_equal(bad[name], whole[name])


class TestOpenRuns:
    """Without a mechanism of its own a client says that it failed, by type alone."""

    def test_an_error_of_the_data(self, tmp_path_factory):
        def check(kind):
            tmp_path = tmp_path_factory.mktemp("case")
            reply = answer(OPEN, broken_node(tmp_path, kind))
            assert reply.error.reason == "DataError: details are in the log of the node"

        assert failures([(kind,) for kind in [kind for kind in BROKEN if kind != "one row"]], check) == []

    def test_an_exception_in_training(self, monkeypatch):
        def fails(*_):
            raise ArithmeticError("row 17 holds 3.25")

        monkeypatch.setattr(NumpyTrainer, "fit", fails)
        assert answer(OPEN, None).error.reason == "ArithmeticError: details are in the log of the node"


class TestChoice:
    def test_losses_that_fail_are_answered_too(self, tmp_path, monkeypatch):
        settings = CLUSTERED | {"privacy.client": "gaussian", "privacy.gaussian-noise-multiplier": 2.0}
        two = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])
        node = own_node(tmp_path)
        expected = shape_of(answer(settings, node, message_of(two, hypotheses=2)))
        chosen = app.chosen_to_train

        def fails(privacy, model, models, task, examples):
            if len(examples):
                raise FloatingPointError
            return chosen(privacy, model, models, task, examples)

        monkeypatch.setattr(app, "chosen_to_train", fails)
        reply = answer(settings, node, message_of(two, hypotheses=2))
        assert shape_of(reply) == expected and len(entries_of(node, "client")) == 4


class TestPersonalModel:
    def kept(self, tmp_path, settings, kind=None):
        place = tmp_path / "models"
        node = own_node(tmp_path, **{"model-dir": str(place)}) if kind is None else broken_node(tmp_path, kind)
        node |= {"model-dir": str(place)}
        return answer(settings, node, message_of(kind="query")), place

    def test_it_is_kept_and_nothing_leaves(self, tmp_path):
        reply, place = self.kept(tmp_path, GAUSSIAN)
        assert not list(reply.content) and (place / "model.npz").exists()

    def test_a_failure_is_told_to_nobody(self, tmp_path_factory):
        def check(mechanism, kind):
            tmp_path = tmp_path_factory.mktemp("case")
            reply, _ = self.kept(tmp_path, MECHANISMS[mechanism], kind)
            assert not reply.has_error() and not list(reply.content)

        cases = [(mechanism, kind) for mechanism in MECHANISMS for kind in ["missing file", "one nan", "no rows"]]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("kind", ["missing file", "one nan", "no class"])
    def test_under_a_policy_not_even_in_an_open_run(self, tmp_path, kind):
        """The policy would not train in such a run: keeping a model asks for no noise."""
        policy = policy_file(tmp_path, mechanisms=["dp-sgd"], min_server_noise_multiplier=None, max_example_epsilon=8.0)
        node = broken_node(tmp_path, kind, policy=str(policy)) | {"model-dir": str(tmp_path / "models")}
        reply = answer(OPEN, node, message_of(kind="query"))
        assert not reply.has_error() and not list(reply.content)

    def test_nor_under_a_limit_of_the_node(self, tmp_path_factory):
        """Nothing is charged for keeping a model: an error would tell of a bad row for nothing, as often as asked."""

        def check(limit):
            tmp_path = tmp_path_factory.mktemp("case")
            node = broken_node(tmp_path, "one nan") | {"model-dir": str(tmp_path / "models"), limit: 1.0}
            reply = answer(OPEN, node, message_of(kind="query"))
            assert not reply.has_error() and not list(reply.content)

        assert failures(["max-epsilon", "max-example-epsilon", "max-leakage"], check) == []

    def test_in_an_open_run_its_type_is_told(self, tmp_path):
        reply, _ = self.kept(tmp_path, OPEN, "missing file")
        assert reply.error.reason == "DataError: details are in the log of the node"


def test_a_failure_that_the_server_chose_is_an_error():
    """A penalty that dp-sgd has no steps for does not depend on data."""
    reply = answer(DP_SGD, None, message_of(proximal_mu=0.1))
    assert reply.error.reason == (
        "ConfigError: strategy.proximal-mu = 0.1 cannot go with privacy.client = 'dp-sgd': the penalty is not in its "
        "steps; use strategy.name = 'fedavg'"
    )


def test_replies_of_a_client_that_failed_have_noise_like_any_other(tmp_path):
    """Two-sided, 650 parameters of deviation z·C = 2: within 20 % is 7 standard errors."""
    sent = arrays_of(answer(GAUSSIAN, broken_node(tmp_path, "missing file")))
    noise = np.concatenate([array.ravel() for array in sent.values()])
    assert np.std(noise) == pytest.approx(2.0, rel=0.2) and abs(noise.mean()) < 6 * 2.0 / math.sqrt(noise.size)


@pytest.fixture(autouse=True)
def unread():
    """Files of two tests may have the same path."""
    _own_data.cache_clear()
    _own_file.cache_clear()
