"""The contract of models and trainers, over every framework: the right steps, nothing carried over, files that load."""

from dataclasses import replace

import numpy as np
import pytest
from frameworks import DATA, FRAMEWORKS, SGD, as_weights, shared, slopes, task, trainer_of

from cloister.tasks.making import frozen_digest, model_of
from cloister.tasks.recipe import Augmentation
from cloister.tasks.targets import cross_entropies
from cloister.training.plan import Schedule, TrainingPlan
from cloister.utils.errors import CloisterError, ConfigError, FederationError


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
    """Compare a training with steps by hand: minibatches of a shuffle for each epoch, at the rate of the epoch."""
    factors = np.ones(len(data)) if factors is None else factors
    expected, rng = as_weights(model), np.random.default_rng(the_plan.seed)
    anchor = [array.copy() for array in expected]
    for epoch in range(the_plan.epochs):
        order = rng.permutation(len(data))
        for start in range(0, len(data), the_plan.batch_size):
            chosen = order[start : start + the_plan.batch_size]
            steps = slopes(expected, data.take(chosen), factors[chosen])
            expected = [
                w - the_plan.rate(epoch) * (step + the_plan.proximal_mu * (w - a))
                for w, step, a in zip(expected, steps, anchor, strict=True)
            ]
    trainer.fit(data, the_plan)
    for found, array in zip(as_weights(model), expected, strict=True):
        np.testing.assert_allclose(found, array, atol=2e-6)


class TestTraining:
    @pytest.mark.parametrize("mu", [0.0, 0.7])
    def test_it_steps_down_the_gradient_from_the_current_weights(self, model, trainer, mu):
        check_steps(model, trainer, plan(epochs=2, proximal_mu=mu))

    def test_each_epoch_is_at_the_rate_of_its_schedule(self, model, trainer):
        check_steps(model, trainer, plan(epochs=2, schedule=Schedule("linear", 1)))

    def test_weights_of_classes_and_the_scale_multiply_losses(self, model):
        recipe = replace(SGD, class_weights=(1.0, 4.0, 0.5), loss_scale=2.0)
        check_steps(model, trainer_of(model, recipe), plan(), 2 * np.array([1.0, 4.0, 0.5])[DATA.y])

    def test_weights_of_examples_multiply_their_losses(self, model, trainer):
        weights = np.random.default_rng(1).random(len(DATA)).astype(np.float32)
        check_steps(model, trainer, plan(), weights, replace(DATA, weights=weights))

    def test_a_larger_mu_keeps_the_client_closer_to_the_global_model(self, model, trainer):
        start, before, moved = model.arrays(), as_weights(model)[0], []
        for mu in (0.0, 0.5, 5.0):
            model.assign(start)
            trainer.fit(DATA, plan(epochs=3, proximal_mu=mu))
            moved.append(np.linalg.norm(as_weights(model)[0] - before))
        assert moved[0] > moved[1] > moved[2] > 0

    def test_equal_seeds_give_equal_weights_after_any_other_training(self, framework, model):
        trainer = trainer_of(model, SGD if framework == "numpy" else replace(SGD, optimizer="adam"))
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
        kernel, bias = as_weights(model)
        scores = np.exp(DATA.x @ kernel + bias)
        np.testing.assert_allclose(model.predict(DATA.x), scores / scores.sum(axis=1, keepdims=True), rtol=1e-5)

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
