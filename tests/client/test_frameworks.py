"""The contract of models, trainers and nodes, over every framework: steps, files that load, policy and ledger."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import DP_SGD, answer, entries_of, message_of, own_node, policy_file, write_data
from frameworks import (
    DATA,
    FRAMEWORKS,
    MINIBATCHED,
    SGD,
    Softmax,
    as_weights,
    by_hand,
    shared,
    slopes,
    task,
    trainer_of,
)

from cloister.privacy.accounting.events import Gaussian, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.tasks import TASKS
from cloister.tasks.making import frozen_digest, model_of
from cloister.tasks.recipe import Augmentation
from cloister.tasks.targets import cross_entropies
from cloister.training.plan import Schedule, TrainingPlan
from cloister.utils.errors import CloisterError, ConfigError, FederationError

PLAIN = ("numpy", "sklearn")
"""Frameworks without another optimizer."""


def plan(**changes):
    defaults = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "proximal_mu": 0.0, "seed": (1, 1, 0)}
    return TrainingPlan(**(defaults | changes))


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def model(framework):
    """A model with weights that are not the initial ones."""
    found, rng = shared(framework)[0], np.random.default_rng(3)
    found.assign({name: rng.normal(size=array.shape).astype(np.float32) for name, array in found.arrays().items()})
    return found


@pytest.fixture
def trainer(framework, model):
    return shared(framework)[1]


def check_steps(model, trainer, the_plan, factors=None, data=DATA):
    """Compare a training with steps by hand: minibatches of a shuffle for each epoch, at the rate of the epoch.

    A model of scikit-learn has one example: its order of several is scikit-learn's own.
    """
    factors = np.ones(len(data)) if factors is None else factors
    if model.kind == "sklearn":
        data, factors = data.take(np.array([3])), factors[3:4]
    expected, rng = as_weights(model), np.random.default_rng(the_plan.seed)
    anchor = [array.copy() for array in expected]
    for epoch in range(the_plan.epochs):
        order = rng.permutation(len(data))
        for start in range(0, len(data), the_plan.batch_size):
            chosen = order[start : start + the_plan.batch_size]
            steps = slopes(model.kind, expected, data.take(chosen), factors[chosen])
            expected = [
                w - the_plan.rate(epoch) * (step + the_plan.proximal_mu * (w - a))
                for w, step, a in zip(expected, steps, anchor, strict=True)
            ]
    trainer.fit(data, the_plan)
    for found, array in zip(as_weights(model), expected, strict=True):
        np.testing.assert_allclose(found, array, atol=2e-6)


class TestTraining:
    def test_it_steps_down_the_gradient_from_the_current_weights(self, model, trainer):
        check_steps(model, trainer, plan(epochs=2))

    @pytest.mark.parametrize("framework", MINIBATCHED, indirect=True)
    def test_the_penalty_is_centred_on_the_weights_at_the_start(self, model, trainer):
        check_steps(model, trainer, plan(epochs=2, proximal_mu=0.7))

    @pytest.mark.parametrize("shape", ["linear", lambda passed: 0.1**passed], ids=["name", "function"])
    def test_each_epoch_is_at_the_rate_of_its_schedule(self, model, trainer, shape):
        check_steps(model, trainer, plan(epochs=2, schedule=Schedule(shape, 1)))

    def test_weights_of_classes_and_the_scale_multiply_losses(self, model):
        recipe = replace(SGD, class_weights=(1.0, 4.0, 0.5), loss_scale=2.0)
        check_steps(model, trainer_of(model, recipe), plan(), 2 * np.array([1.0, 4.0, 0.5])[DATA.y])

    def test_weights_of_examples_multiply_their_losses(self, model, trainer):
        weights = np.random.default_rng(1).random(len(DATA)).astype(np.float32)
        check_steps(model, trainer, plan(), weights, replace(DATA, weights=weights))

    @pytest.mark.parametrize("framework", MINIBATCHED, indirect=True)
    def test_a_larger_mu_keeps_the_client_closer_to_the_global_model(self, model, trainer):
        start, before, moved = model.arrays(), as_weights(model)[0], []
        for mu in (0.0, 0.5, 5.0):
            model.assign(start)
            trainer.fit(DATA, plan(epochs=3, proximal_mu=mu))
            moved.append(np.linalg.norm(as_weights(model)[0] - before))
        assert moved[0] > moved[1] > moved[2] > 0

    def test_equal_seeds_give_equal_weights_after_any_other_training(self, framework, model):
        trainer = trainer_of(model, SGD if framework in PLAIN else replace(SGD, optimizer="adam"))
        start, ends = model.arrays(), []
        for seed in (1, 1, 2):
            model.assign(start)
            trainer.fit(DATA, plan(epochs=2, seed=(seed,), learning_rate=0.01))
            ends.append(as_weights(model)[0])
        np.testing.assert_array_equal(*ends[:2])
        assert not np.array_equal(*ends[1:])

    def test_its_loss_is_the_mean_over_the_examples(self, model, trainer):
        """The last minibatch is smaller than the others."""
        loss = trainer.fit(DATA, plan(learning_rate=1e-9))
        assert loss == pytest.approx(cross_entropies(DATA.y, model.predict(DATA.x)).mean(), rel=1e-5)

    def test_examples_are_changed_anew_in_every_epoch(self, model, trainer):
        seen, before = [], as_weights(model)[0]

        def noted(example, rng):
            seen.append(float(rng.random()))
            return np.zeros_like(example)

        trainer.fit(DATA, plan(epochs=2, augmentation=Augmentation((noted,))))
        assert len(set(seen)) == len(seen) == 2 * len(DATA)
        np.testing.assert_array_equal(as_weights(model)[0], before)

    @pytest.mark.parametrize("options", [{"optimizer": "nonsense"}, {"optimizer_options": {"nonsense": 1.0}}])
    def test_an_optimizer_or_an_option_that_it_lacks_is_refused(self, model, options):
        with pytest.raises(ConfigError, match=r"^client\.optimizer.*nonsense"):
            trainer_of(model, replace(SGD, **options))


class TestModel:
    def test_its_arrays_are_copies(self, model, trainer):
        arrays = model.arrays()
        before = {name: array.copy() for name, array in arrays.items()}
        trainer.fit(DATA, plan())
        np.testing.assert_equal(arrays, before)

    def test_what_is_assigned_is_what_it_has(self, framework, model):
        other = model_of(task(framework))
        other.assign(model.arrays())
        np.testing.assert_equal(other.arrays(), model.arrays())
        np.testing.assert_array_equal(other.predict(DATA.x), model.predict(DATA.x))

    def test_arrays_of_other_names_or_shapes_are_refused(self, model):
        (kernel, matrix), (bias, vector) = model.arrays().items()
        with pytest.raises(FederationError, match=f"'{bias}' is in only one"):
            model.assign({kernel: matrix})
        with pytest.raises(FederationError, match=rf"'{bias}' must have shape \(3,\), found \(4,\)"):
            model.assign({kernel: matrix, bias: np.append(vector, 0)})

    def test_equal_seeds_give_equal_initial_weights(self, model):
        found = []
        for seed in (5, 5, 6):
            model.initialise(seed)
            found.append(model.arrays())
        np.testing.assert_equal(*found[:2])
        is_constant = not as_weights(model)[0].any()  # that of NumPy begins with zeros
        assert is_constant or not np.array_equal(*(next(iter(each.values())) for each in found[1:]))

    def test_predictions_are_probabilities_by_hand(self, model):
        _, expected = by_hand(model.kind, as_weights(model), DATA.x)
        np.testing.assert_allclose(model.predict(DATA.x), expected, rtol=1e-5)

    def test_a_prediction_alone_depends_on_its_row_and_not_on_others(self, model):
        alone = model.predict_alone(DATA.x[:7])
        np.testing.assert_allclose(alone, model.predict(DATA.x[:7]), rtol=1e-5)
        others = DATA.x[:7].copy()
        others[:3], others[4:] = np.nan, 1e30
        np.testing.assert_array_equal(model.predict_alone(others)[3], alone[3])
        np.testing.assert_array_equal(model.predict_alone(DATA.x[3:4])[0], alone[3])

    def test_a_saved_model_loads(self, framework, model, tmp_path):
        model.save(tmp_path / f"model{model.suffix}")
        other = model_of(task(framework))
        other.load(tmp_path / f"model{model.suffix}")
        np.testing.assert_equal(other.arrays(), model.arrays())
        assert [path.name for path in tmp_path.iterdir()] == [f"model{model.suffix}"]

    @pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"\x80\x04N."])
    def test_another_file_is_refused(self, model, tmp_path, content):
        path = tmp_path / f"model{model.suffix}"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CloisterError, match="holds no model"):
            model.load(path)

    def test_nothing_of_it_is_frozen(self, model):
        assert model.frozen() == {} and frozen_digest(model) == ""


class TestNode:
    """DP-SGD on a node with data, a policy and a ledger of its own."""

    STEPS = Repeated(Gaussian(1.0, Sampling("bounded-poisson", 0.2)), 5)

    @pytest.fixture
    def reply(self, framework, tmp_path, monkeypatch):
        """Ask a node to train, with this noise multiplier and this configuration."""
        monkeypatch.setitem(TASKS._table, "small", f"{Softmax.__module__}:{Softmax.__name__}")
        rules = {"tasks": ["small"], "mechanisms": ["dp-sgd"], "min_server_noise_multiplier": None}
        policy = policy_file(tmp_path, min_dp_sgd_noise_multiplier=0.9, **rules)
        data = write_data(tmp_path, x=DATA.x[:40], y=DATA.y[:40])
        settings = DP_SGD | {"task.name": "small", "task.model": framework, "client.batch-size": 8}

        def made(noise=1.0, number=1, **configured):
            self.node = own_node(tmp_path, data, policy=str(policy), **configured)
            message = message_of(model_of(task(framework)).arrays(), server_round=number)
            return answer(settings | {"privacy.dp-sgd-noise-multiplier": noise}, self.node, message)

        return made

    def test_a_policy_refuses_less_noise_and_the_ledger_stays_empty(self, reply):
        assert "privacy.dp-sgd-noise-multiplier = 0.5, demanded: at least 0.9" in reply(0.5).error.reason
        assert not list(Path(self.node["ledger-dir"]).glob("*"))

    def test_the_ledger_has_the_steps_of_each_round(self, reply):
        for number in (1, 2):
            assert not reply(number=number).has_error()
        entries = entries_of(self.node, "example")
        assert [(entry.round, entry.event, entry.done) for entry in entries] == [(n, self.STEPS, True) for n in (1, 2)]

    def test_a_budget_ends_training_before_it_is_passed(self, reply):
        replies = [reply(number=number, max_example_epsilon=6.0) for number in (1, 2)]
        assert not replies[0].has_error() and "BudgetExhausted" in replies[1].error.reason
        assert len(entries_of(self.node, "example")) == 1
