"""Keras models of every kind of task: trained, scored, trained with DP-SGD, and saved, through the same code."""

import math
import warnings
from dataclasses import replace

import kinds
import numpy as np
import pytest
from kinds import made
from support import failures

from cloister.client.dp_sgd import Units
from cloister.client.dp_sgd_keras import PrivateKerasTrainer
from cloister.config.run import parse
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.faults import faults_of_attributes, faults_of_examples, faults_of_model, faults_of_naming, sample
from cloister.tasks.keras_model import KerasModel, import_keras
from cloister.tasks.making import model_of
from cloister.tasks.targets import Target
from cloister.training.keras_trainer import KerasTrainer
from cloister.training.plan import TrainingPlan
from cloister.utils.errors import ConfigError
from cloister.utils.state import is_state

FAST = [kinds.Findings, kinds.Scans, kinds.Subclassed]
REST = [kind for kind in kinds.KINDS if kind not in FAST]
each_kind = pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in REST)])
SILENT = {"privacy.dp-sgd-noise-multiplier": 0.0, "privacy.dp-sgd-clipping-norm": 1.0}


def privacy(**changes):
    return parse({"privacy.server": "none", "privacy.client": "dp-sgd"} | SILENT | changes).privacy


def plan(recipe):
    return TrainingPlan.of(recipe, (1, 1))


def given(model, rows):
    """The inputs, the targets and the weights of DP-SGD."""
    return model.given(rows.x), [*model.expected(rows.y), np.ones(len(rows), np.float32)]


def loss_of(task, model, examples):
    return task.metrics(examples.y, model.predict(examples.x))["loss"]


@each_kind
def test_a_model_learns_and_is_scored(kind):
    task = made(kind)
    data, model = task.load(), model_of(task)
    model.initialise(1)
    faults = [*faults_of_attributes(task), *faults_of_examples(task, data.train, "load()")]
    assert [*faults, *faults_of_naming(task, model), *faults_of_model(task, model, sample(task, data.train))] == []
    before = loss_of(task, model, data.test)
    KerasTrainer(model, task.recipe).fit(data.train, plan(task.recipe))
    assert loss_of(task, model, data.test) < before
    alone, together = model.predict_alone(data.test.x[:3]), model.predict(data.test.x)[:3]
    for name in together.dtype.names or [...]:
        np.testing.assert_allclose(alone[name], together[name], rtol=1e-4, atol=1e-6)


def test_the_loss_of_training_is_the_one_that_is_scored():
    """Keras' operations and NumPy's, for each example."""

    def check(kind):
        task = made(kind)
        model, rows = model_of(task), task.load().test
        model.initialise(3)
        outputs = model.keras(model.given(rows.x), training=False)
        parts = model.losses(model.expected(rows.y), outputs)
        total = sum(
            target.weight * np.asarray(part) for target, part in zip(model.targets.values(), parts, strict=True)
        )
        np.testing.assert_allclose(total, task.losses(rows.y, model.predict(rows.x)), rtol=1e-4)

    assert not failures(kinds.KINDS, check)


@each_kind
def test_dp_sgd_learns_too(kind):
    task = made(kind)
    data, model = task.load(), model_of(task)
    model.initialise(1)
    if kind is kinds.Rooted:
        with pytest.raises(ConfigError, match="use 'mse'"):
            PrivateKerasTrainer(model, task.recipe, privacy())
        return
    before = loss_of(task, model, data.test)
    PrivateKerasTrainer(model, task.recipe, privacy()).fit(data.train, plan(task.recipe))
    assert loss_of(task, model, data.test) < before


@pytest.mark.parametrize("kind", [kinds.Scans, kinds.Lesions])
def test_one_example_moves_a_clipped_sum_by_the_bound_at_most(kind):
    """For any inputs and targets: of several outputs the sum of losses has one gradient."""
    task = made(kind)
    model = model_of(task)
    model.initialise(1)
    trainer, rows = PrivateKerasTrainer(model, task.recipe, privacy()), task.load().train.take(np.arange(6))
    for own in (rows.x[name] if name else rows.x for name in rows.x.dtype.names or [""]):
        own[5] = 1e4
    sums = [trainer._dp_sgd.clipped_sum(*given(model, part), 0.1).sums for part in (rows, rows.take(np.arange(5)))]
    moved = np.sqrt(sum(np.square(one - other).sum() for one, other in zip(*sums, strict=True)))
    assert 0.09 < moved <= 0.1


def test_the_gradient_of_a_regression_under_dp_sgd_is_that_of_its_loss():
    """2·(x·w + b - y)·(x, 1) of each example, by hand."""

    class One(kinds.Rooted):
        target = Target("mse")

    task = made(One)
    model, rows = model_of(task), task.load().train.take(np.arange(5))
    kernel, bias = (model.arrays()[name] for name in sorted(model.arrays(), reverse=True))
    trainer = PrivateKerasTrainer(model, task.recipe, privacy())
    found = trainer._dp_sgd.clipped_sum(*given(model, rows), 1e6).sums
    residual = 2 * (rows.x @ kernel[:, 0] + bias[0] - rows.y)
    np.testing.assert_allclose(found[0][:, 0], rows.x.T @ residual, rtol=1e-4)
    np.testing.assert_allclose(found[1], residual.sum(keepdims=True), rtol=1e-4)


def test_a_weight_multiplies_an_example_s_gradient_before_it_is_clipped():
    class One(kinds.Rooted):
        target = Target("mse")

    model = model_of(made(One))
    model.initialise(1)
    rows = replace(made(One).load().train.take(np.arange(4)), weights=np.array([0.0, 1.0, 0.5, 3.0]))
    recipe = Recipe(1, 4, 1.0)
    kernel, bias = (model.arrays()[name] for name in sorted(model.arrays(), reverse=True))
    residual = 2 * (rows.x @ kernel[:, 0] + bias[0] - rows.y) * rows.weights
    each = np.concatenate([rows.x * residual[:, None], residual[:, None]], axis=1)

    def moved(trainer):
        model.assign(dict(zip(sorted(model.arrays(), reverse=True), (kernel, bias), strict=True)))
        trainer()
        found = model.arrays()
        return np.concatenate([(kernel - found[max(found)])[:, 0], bias - found[min(found)]])

    plain = moved(lambda: KerasTrainer(model, recipe).fit(rows, plan(recipe)))
    np.testing.assert_allclose(plain, each.mean(axis=0), rtol=1e-4)
    bound = 5.0
    trainer = PrivateKerasTrainer(model, recipe, privacy(**{"privacy.dp-sgd-clipping-norm": bound}))
    factors = np.minimum(1, bound / np.maximum(np.linalg.norm(each, axis=1), 1e-9))
    clipped = (each * factors[:, None]).sum(axis=0) / 4
    units = Units.of(rows, 1)
    trainer._begin(plan(recipe), GaussianNoise(1))
    np.testing.assert_allclose(moved(lambda: trainer._step(units, np.arange(4), bound, 1.0)), clipped, rtol=1e-3)


def test_inputs_of_any_dtype_train_alike():
    """Ids as integers, as a site's file holds them and as a simulation does; all are cast by the model's own dtype."""
    task = made(kinds.Words)
    data, ends = task.load().train, []
    model = model_of(task)
    trainer = KerasTrainer(model, task.recipe)
    for dtype in ("int32", "int64", "uint8", "float32", "float64"):
        model.initialise(1)
        trainer.fit(replace(data, x=data.x.astype(dtype)), plan(task.recipe))
        ends.append(model.arrays())
    for end in ends[1:]:
        for name, array in end.items():
            np.testing.assert_array_equal(array, ends[0][name])


def test_rmse_is_the_root_of_a_batch_s_mean_and_scales_with_the_loss():
    task, ends = made(kinds.Rooted), []
    rows, model = task.load().train.take(np.arange(8)), model_of(task)
    model.initialise(1)
    start = model.arrays()
    for scale in (1.0, 3.0):
        recipe = Recipe(1, 8, 0.1, loss_scale=scale)
        model.assign(start)
        loss = KerasTrainer(model, recipe).fit(rows, plan(recipe))
        ends.append({name: array - start[name] for name, array in model.arrays().items()})
        model.assign(start)
        assert loss == pytest.approx(scale * task.metrics(rows.y, model.predict(rows.x))["rmse"], rel=1e-5)
    for name, moved in ends[0].items():
        np.testing.assert_allclose(ends[1][name], 3 * moved, rtol=1e-4)


def test_a_model_without_a_task_implies_its_targets():
    def check(shape, expected):
        def build():
            import keras

            return keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(math.prod(shape)), keras.layers.Reshape(shape)]
            )

        (target,) = KerasModel(build).targets.values()
        assert (target.loss, target.shape, target.classes) == expected

    shapes = {(3,): ("cross-entropy", (), 3), (5, 3): ("cross-entropy", (5,), 3), (5, 1): ("mse", (5,), 0)}
    assert not failures(shapes.items(), check)


def test_a_loss_of_a_model_is_refused_and_the_message_names_the_target_of_the_task():
    def check(given):
        with pytest.raises(ConfigError, match=r"the task states it, as in target = Target"):
            KerasModel(lambda: None, **given)

    assert not failures([{"loss": "mae"}, {"loss": lambda y, predicted: y}], check)


def test_what_a_model_and_its_task_do_not_agree_on_is_named():
    def check(kind, attributes, says):
        with pytest.raises(ConfigError) as refusal:
            model_of(made(type("Mine", (kind,), attributes)))
        assert str(refusal.value).startswith("task 'digits': build(): the model has the ") and says in str(
            refusal.value
        )

    assert not failures(
        [
            (kinds.Pairs, {"input_shape": (6,)}, "(4,), 'input_layer_1' (2,), and the task one array without a name"),
            (kinds.Scans, {"target": Target("mse")}, "outputs 'stage' (3,), 'volume' (1,), and the task one array"),
            (
                kinds.Scans,
                {"input_shape": {"picture": (4, 4, 1)}},
                "'age' (1,), 'picture' (4, 4, 1), and the task 'picture'",
            ),
        ],
        check,
    )


def test_a_loss_function_of_a_whole_batch_is_named():
    class Whole(kinds.Measures):
        target = Target(lambda y, predicted: ((y - predicted) ** 2).mean(), shape=(2,))

    task = made(Whole)
    (first, *_) = map(str, faults_of_model(task, model_of(task), task.load().test.x))
    assert "one number per example, found shape (); a Keras loss needs reduction='none'" in first


@pytest.mark.parametrize("kind", [kinds.Subclassed, kinds.NoInput])
def test_a_model_that_was_built_for_its_data_is_saved_and_loaded(kind, tmp_path):
    task = made(kind)
    one, other = model_of(task), model_of(task)
    one.initialise(1)
    other.initialise(2)
    one.save(tmp_path / "model.keras")
    other.load(tmp_path / "model.keras")
    x = task.load().test.x
    np.testing.assert_array_equal(one.predict(x), other.predict(x))


def test_a_model_that_cannot_be_saved_is_a_fault_before_the_run():
    class Unsaved(kinds.Subclassed):
        def network(self, keras):
            class Small(keras.Model):
                def __init__(self, change):
                    super().__init__()
                    self.change, self.last = change, keras.layers.Dense(2, "softmax")

                def call(self, x):
                    return self.last(self.change(x))

            return Small(lambda x: 2 * x)

    task = made(Unsaved)
    (fault,) = map(str, faults_of_model(task, model_of(task), task.load().test.x))
    assert "the model cannot be saved: NotImplementedError" in fault and "write get_config()" in fault


def test_ids_beyond_those_of_float32_are_kept_by_a_task_that_states_their_dtype(tmp_path):
    ids = np.array([[22_298_006, 22_298_007, 0, 1, 2]] * 4)
    np.savez(tmp_path / "site.npz", x=ids, y=ids % 2)
    exact = made(type("Codes", (kinds.Words,), {"input_dtype": "int32"}))
    model = model_of(exact)
    np.testing.assert_array_equal(model.given(exact.read(tmp_path / "site.npz").x), ids)
    assert not np.array_equal(model.given(made(kinds.Words).read(tmp_path / "site.npz").x), ids)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_model_is_built_for_the_dtype_of_the_task(dtype):
    task = made(type("Built", (kinds.Subclassed,), {"input_dtype": dtype}))
    (tensor,) = model_of(task).keras.inputs
    assert tensor.dtype == dtype and tensor.shape == (None, 6)


def test_an_example_of_several_inputs_is_a_row():
    rows = made(kinds.Pairs).load().train
    assert isinstance(rows, Examples) and len(rows) == kinds.ROWS and rows.x.dtype.names == ("0", "1")


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_model_of_named_inputs_is_called_by_their_names(names):
    """One with batch normalisation, whose state a training call finds."""
    keras = import_keras()

    def network():
        inputs = {name: keras.Input((3,), name=name) for name in names}
        x = keras.layers.BatchNormalization()(inputs["a"] + 2 * inputs["b"])
        return keras.Model(inputs, keras.layers.Dense(2, "softmax")(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = KerasModel(network)
    assert sum(map(is_state, model.arrays())) == 2


def test_a_run_of_several_inputs_and_outputs_ends_in_order(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS._table, "scans", "kinds:Scans")
    run = {"num-rounds": 1, "privacy.server": "none", "tensorboard": False, "output-dir": str(tmp_path)}
    outcome = simulate({"task.name": "scans", **run}, 2)
    assert outcome.ended == "as-asked" and (outcome.directory.path / "model.keras").exists()
