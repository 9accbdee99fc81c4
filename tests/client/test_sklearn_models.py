"""Linear models of scikit-learn: trained by scikit-learn, under DP-SGD by our gradients."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Perceptron, SGDClassifier, SGDRegressor

from cloister.client.dp_sgd_sklearn import PrivateSklearnTrainer
from cloister.config.privacy import PrivacyConfig
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.datasets.patients import BreastCancer
from cloister.tasks.sklearn_models import SklearnModel
from cloister.training.plan import TrainingPlan
from cloister.training.sklearn_trainer import SklearnTrainer
from cloister.utils.errors import ConfigError, UnsupportedModel

RNG = np.random.default_rng(0)
X = RNG.random((60, 4)).astype(np.float32)
Y = {
    2: (X[:, 0] > X[:, 1]).astype(np.int64),
    3: X[:, :3].argmax(axis=1).astype(np.int64),
    0: (X @ [1.0, -2.0, 0.5, 3.0]).astype(np.float32),
}
RECIPE, RATE = Recipe(1, 20, 0.1), 0.1
MODELS = {
    "two classes": lambda **extra: SklearnModel(SGDClassifier(loss="log_loss", **extra), 4, 2),
    "three classes": lambda **extra: SklearnModel(SGDClassifier(loss="log_loss", **extra), 4, 3),
    "numbers": lambda **extra: SklearnModel(SGDRegressor(**extra), 4),
    "solver": lambda **extra: SklearnModel(LogisticRegression(**extra), 4, 3),
}
STEPPED = list(MODELS)[:3]


def examples_of(model):
    return Examples(X, Y[model.classes])


def plan(**changes):
    defaults = {"epochs": 20, "batch_size": 20, "learning_rate": RATE, "proximal_mu": 0.0, "seed": (1, 1, 0)}
    return TrainingPlan(**(defaults | changes))


def privacy(sigma=1.0, clip=1.0):
    return PrivacyConfig(server="none", client="dp-sgd", dp_sgd_noise_multiplier=sigma, dp_sgd_clipping_norm=clip)


def perturbed(model, seed=1):
    rng = np.random.default_rng(seed)
    model.assign({name: rng.standard_normal(array.shape).astype(np.float32) for name, array in model.weights.items()})
    return model


@pytest.mark.parametrize("name", MODELS)
def test_training_lowers_the_loss(name):
    model = MODELS[name]()
    trainer, examples = SklearnTrainer(model, RECIPE), examples_of(model)
    first = trainer.fit(examples, plan(epochs=1))
    assert trainer.fit(examples, plan(epochs=30)) < first


@pytest.mark.parametrize("name", MODELS)
def test_equal_seeds_give_equal_weights_whatever_was_trained_before(name):
    model = MODELS[name]()
    trainer, examples, found = SklearnTrainer(model, RECIPE), examples_of(model), []
    for _ in range(2):
        perturbed(model)
        trainer.fit(examples, plan(epochs=3))
        found.append(model.arrays())
    assert all((found[0][key] == found[1][key]).all() for key in found[0])


@pytest.mark.parametrize("name", STEPPED)
def test_gradients_are_those_of_scikit_learn(name):
    """Without a penalty, a step of `partial_fit` on one example is the rate times our gradient."""
    model = perturbed(MODELS[name](penalty=None))
    one, before = examples_of(model).take(np.array([7])), model.arrays()
    _, gradients = model.loss_and_gradients(one.x, one.y)
    SklearnTrainer(model, RECIPE).fit(one, plan(epochs=1))
    for key, gradient in gradients.items():
        assert model.weights[key] == pytest.approx(before[key] - RATE * gradient, abs=1e-5)


@pytest.mark.parametrize("name", STEPPED)
def test_the_loss_is_the_one_of_the_gradients(name):
    model = perturbed(MODELS[name]())
    examples, small = examples_of(model), 1e-2
    _, gradients = model.loss_and_gradients(examples.x, examples.y)
    for key, array in model.weights.items():
        index = (0,) * array.ndim
        array[index] += small
        above, _ = model.loss_and_gradients(examples.x, examples.y)
        array[index] -= 2 * small
        below, _ = model.loss_and_gradients(examples.x, examples.y)
        array[index] += small
        assert gradients[key][index] == pytest.approx((above - below) / (2 * small), abs=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_site_may_lack_a_class(name):
    model = MODELS[name]()
    examples = examples_of(model)
    if model.classes:
        examples = examples.take(np.flatnonzero(examples.y == 1))
    shapes = {key: array.shape for key, array in model.weights.items()}
    SklearnTrainer(model, RECIPE).fit(examples, plan(epochs=2))
    assert {key: array.shape for key, array in model.arrays().items()} == shapes
    assert np.isfinite(model.predict(X)).all()


def test_an_intercept_that_is_not_fitted_gets_no_noise():
    model = MODELS["two classes"](fit_intercept=False)
    trainer = PrivateSklearnTrainer(model, RECIPE, privacy())
    trainer.fit(examples_of(model), plan(epochs=1))
    SklearnTrainer(model, RECIPE).fit(examples_of(model), plan(epochs=1))
    assert list(model.arrays()) == ["coef"] and not model.fitted().intercept_.any()


def test_class_weights_act():
    model = MODELS["three classes"]()
    examples, found = examples_of(model), []
    for weights in ((), (1.0, 1.0, 20.0)):
        model.initialise(0)
        SklearnTrainer(model, replace(RECIPE, class_weights=weights)).fit(examples, plan())
        found.append(model.predict(X)[:, 2].mean())
    assert found[1] > 1.3 * found[0]


def test_weights_that_overflow_are_not_finite():
    model = MODELS["numbers"]()
    SklearnTrainer(model, RECIPE).fit(Examples(X, Y[0] * np.float32(1e30)), plan(learning_rate=1e30))
    assert not np.isfinite(model.weights["coef"]).any()


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_without_noise_is_the_mean_of_clipped_gradients(name):
    model = perturbed(MODELS[name](alpha=0.5))
    examples, before, clip = examples_of(model), model.arrays(), 0.05
    total = {key: np.zeros(array.shape) for key, array in before.items()}
    model.weights["coef"] *= 1 - RATE * 0.5
    for number in range(len(examples)):
        one = examples.take(np.array([number]))
        _, own = model.loss_and_gradients(one.x, one.y)
        norm = np.sqrt(sum(np.square(array.astype(float)).sum() for array in own.values()))
        total = {key: total[key] + own[key] * min(1, clip / norm) for key in total}
    expected = {key: array - RATE * total[key] / len(examples) for key, array in model.arrays().items()}
    model.assign(before)
    trainer = PrivateSklearnTrainer(model, RECIPE, privacy(0.0, clip))
    trainer.fit(examples, plan(epochs=1, batch_size=len(examples)))
    assert all(model.weights[key] == pytest.approx(expected[key], abs=1e-4) for key in expected)


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (MODELS["solver"](), "SGDClassifier"),
        (SklearnModel(SGDRegressor(loss="huber"), 4), "squared_error"),
        (MODELS["two classes"](penalty="l1"), "penalty='l2'"),
    ],
)
def test_dp_sgd_refuses_what_has_no_gradients(model, remedy):
    with pytest.raises(UnsupportedModel, match=remedy):
        PrivateSklearnTrainer(model, RECIPE, privacy())


@pytest.mark.parametrize(
    ("estimator", "classes", "message"),
    [
        (Perceptron(), 2, "Perceptron is not supported"),
        (SGDClassifier(), 2, "loss='log_loss'"),
        (SGDRegressor(), 2, "cannot predict 2 classes"),
        (LogisticRegression(), 0, "cannot predict 0 classes"),
        (SGDClassifier(loss="log_loss", average=True), 2, "average"),
        (LogisticRegression(class_weight="balanced"), 2, "client.class-weights"),
    ],
)
def test_estimators_that_do_not_fit_are_refused(estimator, classes, message):
    with pytest.raises(ConfigError, match=message):
        SklearnModel(estimator, 4, classes)


def test_a_penalty_on_the_distance_is_refused():
    model = MODELS["numbers"]()
    with pytest.raises(ConfigError, match="proximal-mu"):
        SklearnTrainer(model, RECIPE).fit(examples_of(model), plan(proximal_mu=0.1))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_read_again(name, tmp_path):
    model, other = perturbed(MODELS[name]()), MODELS[name]()
    model.save(tmp_path / "model.npz")
    other.load(tmp_path / "model.npz")
    assert (other.predict(X) == model.predict(X)).all()


class Tumours(BreastCancer):
    """Bundled data, and a model of scikit-learn."""

    public = True
    models = ("stepped", "solver")
    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.1)

    def build(self):
        return MODELS_OF_TUMOURS[self.model_name]()


MODELS_OF_TUMOURS = {
    "stepped": lambda: SklearnModel(SGDClassifier(loss="log_loss"), 30, 2),
    "solver": lambda: SklearnModel(LogisticRegression(), 30, 2),
}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("solver", {"privacy.server": "none"}),
        (
            "stepped",
            {"privacy.server": "none", "privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 0.5},
        ),
    ],
)
def test_a_federation_learns(model, settings, monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS._table, "tumours", f"{__name__}:Tumours")
    common = {"task.name": "tumours", "task.model": model, "num-rounds": 3, "report": False, "tensorboard": False}
    outcome = simulate({**common, **settings, "seed": 1, "output-dir": str(tmp_path)}, clients=3)
    assert outcome.rounds[-1].central["accuracy"] > 0.8
