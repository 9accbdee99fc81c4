"""DP-SGD in a client: the right step, noise of its own for everybody, nothing carried from one client to the next."""

from dataclasses import replace
from functools import cache, partial

import kinds
import numpy as np
import pytest
from frameworks import MINIBATCHED, as_weights, task
from support import failures

from cloister.client import dp_sgd
from cloister.client.dp_sgd import NoiseSource, PrivateNumpyTrainer
from cloister.client.dp_sgd_keras import PrivateKerasTrainer
from cloister.client.trainers import PRIVATE_TRAINERS
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd.noise import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.making import model_of
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.recipe import Augmentation
from cloister.training.plan import Schedule, TrainingPlan
from cloister.utils.errors import ConfigError, PrivacyError, UnsupportedModel

RNG = np.random.default_rng(0)
DATA = Examples(RNG.random((40, 6)).astype(np.float32), RNG.integers(0, 3, 40))
RATE = 0.5
SGD, ADAM = Recipe(1, 40, RATE), Recipe(1, 40, RATE, "adam")


def plan(**changes):
    defaults = {"epochs": 1, "batch_size": 40, "learning_rate": RATE, "proximal_mu": 0.0, "seed": (1, 1, 0)}
    return TrainingPlan(**(defaults | changes))


def privacy(sigma=1.0, clip=1.0, **settings):
    return PrivacyConfig(
        server="none", client="dp-sgd", dp_sgd_noise_multiplier=sigma, dp_sgd_clipping_norm=clip, **settings
    )


def linear(*extra):
    import keras

    layers = [keras.Input((6,)), *extra, keras.layers.Dense(3, activation="softmax", name="out")]
    return keras.Sequential(layers, name="net")


@cache
def trainer_of(kind, recipe, **settings):
    """One trainer for all tests of its settings: each begins at weights of its own."""
    return PRIVATE_TRAINERS.load(kind)(model_of(task(kind)), recipe, privacy(**settings))


@pytest.fixture(params=MINIBATCHED)
def kind(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def make(kind):
    return partial(trainer_of, kind, SGD)


def started(trainer, seed=2):
    """At the same weights, whatever the kind of model."""
    kernel, bias = np.random.default_rng(seed).standard_normal((6, 3)), np.full(3, 0.1)
    own = {(6, 3): kernel, (3, 6): kernel.T, (3,): bias}
    trainer.model.assign({name: own[array.shape] for name, array in trainer.model.arrays().items()})
    return kernel, bias


def flat(trainer):
    """Return the weights as one vector, in the order of `gradients`."""
    return np.concatenate([array.ravel() for array in as_weights(trainer.model)])


def moved(trainer, examples=DATA, **changes):
    """Return the change of the weights by training, as one vector."""
    before = flat(trainer)
    assert trainer.fit(examples, plan(**changes)) is None
    return flat(trainer) - before


def gradients(kernel, bias, examples=DATA):
    """Of each example: (x, 1) ⊗ (softmax - one-hot), flat in the order of the weights."""
    scores = np.exp(examples.x @ kernel + bias)
    residual = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[examples.y]
    return np.concatenate(
        [(examples.x[:, :, None] * residual[:, None, :]).reshape(len(examples), 18), residual], axis=1
    )


@pytest.mark.parametrize("clip", [0.3, 1e3])
def test_a_step_is_the_clipped_sum_over_the_configured_batch_size(make, clip):
    trainer = make(sigma=0.0, clip=clip)
    own = gradients(*started(trainer))
    norms = np.linalg.norm(own, axis=1)
    assert (norms > 0.3).any() and (norms < 1e3).all()
    expected = -RATE / 40 * (own * np.minimum(1, clip / norms)[:, None]).sum(axis=0)
    np.testing.assert_allclose(moved(trainer), expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("size", [40, 7, 0])
def test_the_sum_for_a_shared_step_is_the_clipped_sum_of_the_clients_own_units(make, size):
    """With q = 1, so that all of them are drawn; places follow the client's size, and not a batch of the recipe."""
    trainer, few = make(sigma=1.0, clip=0.3, dp_sgd_sampling_rate=1.0), DATA.take(np.arange(size))
    own = gradients(*started(trainer), few)
    expected = (own * np.minimum(1, 0.3 / np.linalg.norm(own, axis=1))[:, None]).sum(axis=0)
    before = trainer.model.arrays()
    sums = trainer.summed(few, plan(batch_size=max(1, size), public_size=max(1, size)))
    assert {name: array.shape for name, array in sums.items()} == {name: each.shape for name, each in before.items()}
    assert all(np.array_equal(before[name], array) for name, array in trainer.model.arrays().items())
    trainer.model.assign(sums)
    np.testing.assert_allclose(flat(trainer), expected, atol=2e-3)


def test_a_small_client_is_divided_by_the_same_size(make):
    trainer = make(sigma=0.0, clip=1e3)
    few = DATA.take(np.arange(10))
    expected = -RATE / 40 * gradients(*started(trainer), few).sum(axis=0)
    np.testing.assert_allclose(moved(trainer, few), expected, rtol=1e-4, atol=1e-7)


def test_the_noise_is_that_of_the_multiplier(make):
    """Of a client without rows a step is noise alone: that of the multiplier and the clip, number by number."""
    trainer = make(sigma=50.0, clip=0.3, noise_seed=3)
    started(trainer)
    like, noise = (np.zeros(18), np.zeros(3)), NoiseSource(3).noise(plan())
    expected = noisy_sum([], like, clipping_norm=0.3, noise_multiplier=50.0, noise=noise)
    found = moved(trainer, DATA.take(np.arange(0)))
    arrays = trainer.model.arrays()
    trainer.model.assign({name: own.reshape(arrays[name].shape) for name, own in zip(arrays, expected, strict=True)})
    np.testing.assert_allclose(found, -RATE / 40 * flat(trainer), rtol=1e-4, atol=1e-6)


def test_clients_rounds_and_processes_have_noise_of_their_own(make):
    trainer = make(sigma=5.0)
    moves = []
    for _ in range(3):
        started(trainer)
        moves.append(moved(trainer))
    assert len({move.tobytes() for move in moves}) == 3


def test_seeded_noise_differs_between_clients_and_rounds_and_repeats(make):
    trainer = make(sigma=5.0, noise_seed=0)

    def of(*seed):
        started(trainer)
        return moved(trainer, seed=seed).tobytes()

    assert len({of(1, 1, 0), of(1, 1, 1), of(1, 2, 0), of(2, 1, 0)}) == 4
    assert of(1, 1, 0) == of(1, 1, 0)


def test_the_clip_follows_the_round(make):
    trainer = make(sigma=0.0, clip=0.2, clipping_decay=0.5, min_clipping_norm=0.04)
    sizes = []
    for number in (1, 2, 3, 4):
        started(trainer)
        sizes.append(np.linalg.norm(moved(trainer, round=number)))
    # All gradients are longer than 0.2 but for a few.
    np.testing.assert_allclose(np.array(sizes) / sizes[-1], [5.0, 2.5, 1.25, 1.0], rtol=0.05)


def test_a_gradient_that_is_not_finite_contributes_nothing(make):
    trainer = make(sigma=0.0, clip=1e3)
    whole = DATA.take(np.arange(39))
    broken = Examples(np.concatenate([whole.x, np.full((1, 6), np.nan, np.float32)]), np.append(whole.y, 0))
    expected = -RATE / 40 * gradients(*started(trainer), whole).sum(axis=0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(moved(trainer, broken), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("count", [0, 40])
def test_steps_and_noise_are_those_of_the_stated_size_whatever_the_rows(make, count):
    """8 steps that are noise: 5 rounds of 21 numbers know its deviation to 6.9 %, and four times that is allowed."""
    trainer = make(sigma=1000.0, clip=1e-4, noise_seed=3)
    moves = []
    for number in range(5):
        started(trainer)
        few = DATA.take(np.arange(count))
        moves.append(moved(trainer, few, public_size=160, epochs=2, seed=(1, number, 0)))
    assert np.std(moves) == pytest.approx(RATE / 40 * 1000.0 * 1e-4 * np.sqrt(8), rel=0.3)


def test_rows_are_drawn_at_the_rate_of_the_stated_size(make):
    """At B/N = 1/4 of what is stated, a fourth of the rows on average, although there are fewer: 60 steps of 20 rows.

    Without noise and clip a step moves by the sum of its gradients; the model barely moves at this rate.
    """
    trainer, few = make(sigma=0.0, clip=1e3, noise_seed=3), DATA.take(np.arange(20))
    whole = -1e-6 / 40 * gradients(*started(trainer), few).sum(axis=0)
    found = np.asarray(moved(trainer, few, public_size=160, epochs=15, learning_rate=1e-3))
    assert found @ whole / (whole @ whole) == pytest.approx(60 * 0.25 * 1e3, rel=0.45)


def test_shuffled_batches_do_not_go_with_another_number(make):
    with pytest.raises(PrivacyError, match="'shuffle' needs a public number of units"):
        make(batch_sampling="shuffle").fit(DATA, plan(public_size=41))


def test_fedproxs_penalty_is_refused(make):
    with pytest.raises(ConfigError, match=r"strategy.proximal-mu = 0\.1 cannot go with privacy.client = 'dp-sgd'"):
        make(sigma=5.0).fit(DATA, plan(proximal_mu=0.1))


def test_the_optimizer_starts_afresh():
    trainer = PrivateKerasTrainer(KerasModel(linear), ADAM, privacy(sigma=0.0))
    moves = []
    for _ in range(2):
        started(trainer)
        moves.append(moved(trainer, learning_rate=0.01))
    np.testing.assert_allclose(*moves, rtol=1e-5)  # units have other places, and other roundings


@pytest.mark.parametrize("kind", MINIBATCHED[1:], indirect=True)
def test_another_batch_size_is_refused_where_a_step_has_places(make):
    with pytest.raises(ConfigError, match=r"client\.batch-size = 8 must be 40 in this run"):
        make(sigma=5.0).fit(DATA, plan(batch_size=8))


def test_batch_normalisation_is_refused_with_its_replacement():
    import keras

    with pytest.raises(UnsupportedModel, match="GroupNormalization"):
        PrivateKerasTrainer(KerasModel(lambda: linear(keras.layers.BatchNormalization())), SGD, privacy())


def test_a_loss_of_a_whole_batch_is_refused():
    with pytest.raises(ConfigError, match="'rmse' is one of a whole batch; use 'mse'"):
        PrivateKerasTrainer(model_of(kinds.made(kinds.Rooted)), SGD, privacy())


def test_numpy_models_know_one_optimizer():
    with pytest.raises(ConfigError, match="must be 'sgd'"):
        PrivateNumpyTrainer(SoftmaxRegression(6, 3), ADAM, privacy())


class TestOneByOne:
    LIKE = (np.zeros(3), np.zeros(1))

    def of(self, gradients, clip=1.0, sigma=0.0):
        each = [lambda gradient=gradient: gradient for gradient in gradients]
        return noisy_sum(each, self.LIKE, clipping_norm=clip, noise_multiplier=sigma, noise=GaussianNoise(1))

    def test_an_empty_batch_is_noise(self):
        assert all((piece != 0).all() for piece in self.of([], sigma=1.0))
        assert all((piece == 0).all() for piece in self.of([]))

    def test_one_norm_over_all_arrays(self):
        first, second = self.of([(np.array([3.0, 0, 0]), np.array([4.0]))], clip=1.0)
        np.testing.assert_allclose([*first, *second], [0.6, 0, 0, 0.8], rtol=1e-4)

    def test_zeros_and_what_is_not_finite(self):
        broken = [(np.array([np.inf, 0, 0]), np.zeros(1)), (np.zeros(3), np.array([np.nan])), self.LIKE]
        assert all((piece == 0).all() for piece in self.of(broken))


class TestRecipe:
    """Options of the recipe: none lets one row move a step by more than S, nor any other row's part."""

    WEIGHTS = replace(SGD, class_weights=(1.0, 50.0, 0.02), loss_scale=3.0)

    def make(self, kind, recipe, sigma=0.0, clip=0.3, **settings):
        return trainer_of(kind, recipe, sigma=sigma, clip=clip, **settings)

    def test_no_weights_make_a_model_pass_that_couples_examples(self):
        """Those of the made-up examples' labels could be nothing: gradients of 0 depend on nobody."""

        def check(weights):
            import keras

            class Centred(keras.layers.Layer):
                def call(self, inputs):
                    return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)

            with pytest.raises(UnsupportedModel, match=r"Centred.* takes the examples of a batch together"):
                PrivateKerasTrainer(KerasModel(lambda: linear(Centred())), replace(SGD, **weights), privacy())

        cases = [{"class_weights": (1.0, 1e-60, 1e-60)}, {"loss_scale": 1e-60}, {"loss_scale": 1e38}]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("clip", [0.3, 100.0])
    def test_a_weighted_gradient_is_clipped_to_the_share_of_its_class(self, kind, clip):
        """All gradients are clipped at 0.3, and some at 100."""
        trainer, weights = self.make(kind, self.WEIGHTS, clip=clip), np.array([1.0, 50.0, 0.02])[DATA.y]
        own = gradients(*started(trainer)) * 3.0 * weights[:, None]
        factors = np.minimum(1, clip * weights / 50 / np.linalg.norm(own, axis=1))
        assert (factors < 1).all() == (clip == 0.3) and (factors < 1).any()
        expected = -RATE / 40 * (own * factors[:, None]).sum(axis=0)
        np.testing.assert_allclose(moved(trainer), expected, rtol=2e-3, atol=2e-5)

    @pytest.mark.parametrize("label", [0, 1])
    def test_however_much_a_class_weighs_one_row_moves_a_step_by_s_at_most(self, kind, label):
        """All rows but one, and all of them, in one step of everybody: they differ by one clipped gradient."""
        trainer = self.make(kind, self.WEIGHTS)
        last = int(np.flatnonzero(DATA.y == label)[0])
        order = np.append(np.delete(np.arange(40), last), last)
        steps = []
        for count in (39, 40):
            started(trainer)
            steps.append(moved(trainer, DATA.take(order[:count]), public_size=40) * 40 / RATE)
        assert np.linalg.norm(steps[1] - steps[0]) == pytest.approx(0.3 * (1.0 if label else 0.02), rel=5e-3)

    def test_weights_raise_the_recall_of_a_rare_class_although_every_gradient_is_clipped(self):
        rng = np.random.default_rng(4)
        y = (np.arange(400) < 20).astype(np.int64)
        data = Examples((rng.normal(0, 1, (400, 6)) + y[:, None]).astype(np.float32), y)
        recalls = []
        for weights in ((), (1.0, 19.0)):
            recipe, model = replace(SGD, class_weights=weights), SoftmaxRegression(6, 2)
            trainer = PrivateNumpyTrainer(model, recipe, privacy(0.5, 0.01, noise_seed=1))
            trainer.fit(data, plan(epochs=10, learning_rate=20.0))
            recalls.append(np.mean(model.predict(data.x)[:20].argmax(axis=1)))
        assert recalls[0] < 0.5 and recalls[1] > 0.8

    def test_a_group_is_clipped_to_the_mean_share_of_its_examples(self):
        trainer = PrivateNumpyTrainer(SoftmaxRegression(6, 3), self.WEIGHTS, privacy(0.0, 0.3), group_cap=10)
        grouped = Examples(DATA.x[:4], np.array([0, 0, 1, 2]), np.zeros(4, np.int64))
        started(trainer)
        found = np.linalg.norm(moved(trainer, grouped, public_size=40)) * 40 / RATE
        assert found == pytest.approx(0.3 * (0.02 + 0.02 + 1.0 + 0.0004) / 4, rel=2e-3)

    def test_any_label_has_a_share_of_its_own(self):
        labels = np.array([0, 1, 2, -5, 9])
        shares = self.WEIGHTS.clip_shares(Examples(np.zeros((5, 2)), labels))
        np.testing.assert_allclose(shares, [0.02, 1.0, 0.0004, 0.02, 0.0004])
        assert (SGD.clip_shares(Examples(np.zeros((4, 2)), np.zeros((4, 3)))) == np.ones(4)).all()

    def test_a_row_s_joining_changes_nobody_else_s_random_changes(self, kind):
        """Seeded, both runs draw the same batch of everybody; only the last row is one more."""
        trainer, plans = self.make(kind, SGD, noise_seed=1), {"augmentation": Augmentation((jittered,))}
        steps = []
        for count in (39, 40):
            started(trainer)
            few = DATA.take(np.arange(count))
            steps.append(moved(trainer, few, public_size=40, **plans) * 40 / RATE)
        assert np.linalg.norm(steps[1] - steps[0]) == pytest.approx(0.3, rel=2e-3)

    def test_examples_are_changed_anew_in_every_round_by_the_secret(self, kind):
        trainer, plans = self.make(kind, SGD, clip=1e3), {"augmentation": Augmentation((jittered,))}
        steps = []
        for _ in range(2):
            started(trainer)
            steps.append(moved(trainer, **plans))
        assert not np.allclose(*steps)

    def test_a_row_whose_change_fails_contributes_nothing(self, kind):
        trainer, last = self.make(kind, SGD, clip=1e3), DATA.x[39].tobytes()

        def failing(example, rng):
            if example.tobytes() == last:
                raise ValueError
            return example

        expected = -RATE / 40 * gradients(*started(trainer), DATA.take(np.arange(39))).sum(axis=0)
        found = moved(trainer, augmentation=Augmentation((failing,)))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)

    def test_steps_of_an_epoch_are_at_its_rate(self, kind):
        """Without noise and at a tiny rate, two epochs at 1 and 1/2 of it move 3/4 as far as two at the whole."""
        trainer, plans = self.make(kind, SGD, clip=1e3), {"epochs": 2, "learning_rate": 1e-3}
        lengths = []
        for schedule in (Schedule(), Schedule("linear", 1)):
            started(trainer)
            lengths.append(np.linalg.norm(moved(trainer, schedule=schedule, **plans)))
        assert lengths[1] / lengths[0] == pytest.approx(0.75, rel=1e-2)

    def test_a_group_is_weighted_example_by_example(self):
        trainer = PrivateNumpyTrainer(SoftmaxRegression(6, 3), self.WEIGHTS, privacy(0.0, 1e3), group_cap=10)
        grouped = Examples(DATA.x[:4], DATA.y[:4], np.zeros(4, np.int64))
        weights = 3.0 * np.array([1.0, 50.0, 0.02])[grouped.y]
        own = (gradients(*started(trainer), grouped) * weights[:, None]).mean(axis=0)
        np.testing.assert_allclose(moved(trainer, grouped, public_size=40), -RATE / 40 * own, rtol=1e-3, atol=1e-6)


def jittered(example, rng):
    return example + rng.normal(0, 1, example.shape).astype(example.dtype)


def test_the_sum_of_a_softmax_regression_counts_weights_of_classes_and_examples():
    """A class weight scales the loss and the bound; an example's own weight its loss."""
    recipe, own = Recipe(1, 40, RATE, class_weights=(1.0, 0.25, 0.5)), np.random.default_rng(1).uniform(0, 3, 40)
    trainer = PrivateNumpyTrainer(SoftmaxRegression(6, 3), recipe, privacy(clip=0.3, dp_sgd_sampling_rate=1.0))
    weighted = replace(DATA, weights=own.astype(np.float32))
    each = np.array(recipe.class_weights)[DATA.y]
    grads = gradients(*started(trainer), weighted) * (each * own)[:, None]
    expected = (grads * np.minimum(1, 0.3 * each / np.linalg.norm(grads, axis=1))[:, None]).sum(axis=0)
    sums = trainer.summed(weighted, plan(public_size=40))
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in sums.values()]), expected, atol=2e-3)


class RaisesForThree(SoftmaxRegression):
    """Raises for the fourth example of `DATA`."""

    def predict(self, x):
        if (x == DATA.x[3]).all(axis=-1).any():
            raise ArithmeticError("no prediction")
        return super().predict(x)


def test_an_example_whose_gradient_raises_in_a_model_of_ones_own_counts_as_zero():
    recipe, others = Recipe(1, 40, RATE), np.delete(np.arange(40), 3)
    sums = []
    for model, data in ((RaisesForThree(6, 3), DATA), (SoftmaxRegression(6, 3), DATA.take(others))):
        trainer = PrivateNumpyTrainer(model, recipe, privacy(clip=0.3, dp_sgd_sampling_rate=1.0))
        sums.append(trainer.summed(data, plan(public_size=40)))
    for found, expected in zip(sums[0].values(), sums[1].values(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_more_features_than_the_sum_of_products_allows_are_summed_one_by_one(monkeypatch):
    trainer = PrivateNumpyTrainer(SoftmaxRegression(6, 3), Recipe(1, 40, RATE), privacy(dp_sgd_sampling_rate=1.0))
    expected = trainer.summed(DATA, plan(public_size=40))
    monkeypatch.setattr(dp_sgd, "MAX_FEATURES", 5)
    monkeypatch.setattr(dp_sgd, "clipped_products", None)
    for one, other in zip(trainer.summed(DATA, plan(public_size=40)).values(), expected.values(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
