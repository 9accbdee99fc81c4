"""Sent parts of a Keras model: trained weights and statistics, by weight and not by layer; statistics that stay."""

import json

import keras
import numpy as np
import pytest
from asking import GAUSSIAN, OPEN, arrays_of, message_of
from flwr.app import Context, RecordDict
from support import failures

from cloister.client.app import app
from cloister.config.run import TaskConfig, parse
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Recipe, Task
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.making import Parameters, model_of
from cloister.training.keras_trainer import KerasTrainer
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import from_record
from cloister.utils.errors import CloisterError, ConfigError
from cloister.utils.state import STATE, is_state

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (60, 6)).astype(np.float32)
DATA = Examples(X, (X[:, 0] > 3).astype(np.int64))
MEAN, VARIANCE = f"{STATE}net/norm/moving_mean", f"{STATE}net/norm/moving_variance"


def network(*parts):
    return keras.Sequential([keras.Input((6,)), *parts, layers.Dense(2, "softmax", name="head")], name="net")


def normalised():
    return network(layers.Dense(4, name="dense"), layers.BatchNormalization(name="norm"))


class Level(layers.Layer):
    """A running maximum of its own, which training writes, and a constant, which it does not."""

    def build(self, shape):
        self.level = self.add_weight(name="level", initializer="zeros", trainable=False)
        self.constant = self.add_weight(name="constant", initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.level.assign(keras.ops.maximum(self.level, keras.ops.max(x) + 1))
        return x * self.constant


class Adapter(layers.Layer):
    """An adapter of a user's own: a fixed kernel, and a trained one of low rank beside it."""

    def build(self, shape):
        fixed = keras.initializers.GlorotUniform(1)
        self.base = self.add_weight(name="base", shape=(shape[-1], 4), initializer=fixed, trainable=False)
        self.down = self.add_weight(name="down", shape=(shape[-1], 1))
        self.up = self.add_weight(name="up", shape=(1, 4), initializer="zeros")

    def call(self, x):
        return x @ self.base + x @ self.down @ self.up


def lora(layer):
    """A network around a layer whose kernel a seed decides and LoRA freezes."""
    model = network(layer)
    layer.enable_lora(2)
    return model


def adapted():
    scale = layers.Normalization(name="scale")
    scale.adapt(X)
    return network(scale, layers.BatchNormalization(name="norm"))


def half_frozen():
    still = layers.BatchNormalization(name="still")
    still.trainable = False
    return network(layers.BatchNormalization(name="norm"), still)


INITIAL = keras.initializers.GlorotUniform(5)
NETWORKS = {
    "batch normalisation": (normalised, {MEAN, VARIANCE}, set()),
    "half frozen": (
        half_frozen,
        {MEAN, VARIANCE},
        {f"net/still/{n}" for n in ["gamma", "beta", "moving_mean", "moving_variance"]},
    ),
    "statistics of the task": (adapted, {MEAN, VARIANCE}, {f"scale/{n}" for n in ("mean", "variance", "count")}),
    "a layer of the user's": (lambda: network(Level(name="own")), {f"{STATE}net/own/level"}, {"net/own/constant"}),
    "LoRA": (lambda: lora(layers.Dense(4, kernel_initializer=INITIAL, name="dense")), set(), {"net/dense/kernel"}),
    "LoRA of several axes": (
        lambda: lora(layers.EinsumDense("ab,bc->ac", 4, kernel_initializer=INITIAL, name="mixed")),
        set(),
        {"net/mixed/kernel"},
    ),
    "an adapter of the user's": (lambda: network(Adapter(name="own")), set(), {"net/own/base"}),
    "a power iteration": (
        lambda: network(layers.SpectralNormalization(layers.Dense(4, name="dense"), name="bounded")),
        {f"{STATE}net/bounded/vector_u"},
        set(),
    ),
}


def test_each_weight_is_trained_state_or_frozen():
    def check(name):
        build, state, frozen = NETWORKS[name]
        model = KerasModel(build)
        trained = {weight.path for weight in model.keras.trainable_variables}
        assert set(model.arrays()) == trained | state and set(model.frozen()) == frozen

    assert failures(NETWORKS, check) == []


def test_training_moves_what_is_sent_and_nothing_else():
    """So no weight is left that a client changes and does not send, or sends without a change."""

    def check(name):
        model = KerasModel(NETWORKS[name][0])
        model.initialise(1)
        frozen, before = model.frozen(), model.arrays()
        KerasTrainer(model, Recipe(1, 20, 0.5)).fit(DATA, TrainingPlan(1, 20, 0.5, 0.0, (1,)))
        assert all(np.array_equal(array, frozen[path]) for path, array in model.frozen().items())
        assert [path for path, array in model.arrays().items() if np.array_equal(array, before[path])] == []

    assert failures(["half frozen", "a layer of the user's", "LoRA", "an adapter of the user's"], check) == []


def test_a_model_is_not_changed_by_the_search_for_its_state():
    def check(name):
        model = KerasModel(NETWORKS[name][0])
        for path, array in model.arrays().items():
            if is_state(path) and "vector_u" not in path:
                assert np.unique(array).tolist() in ([0.0], [1.0])

    assert failures(NETWORKS, check) == []


def test_it_is_said_what_is_trained_averaged_kept_and_frozen():
    model = KerasModel(normalised)
    assert str(Parameters.of(model)) == "46 parameters trained and sent, 8 of statistics averaged"
    model.keep_state()
    assert str(Parameters.of(model)) == "46 parameters trained and sent, 8 of statistics kept at each site"


class Small(Task):
    recipe = Recipe(local_epochs=1, batch_size=16, learning_rate=0.1)
    classes, input_shape, models, public = 2, (6,), ("small",), True
    network = staticmethod(normalised)

    def load(self):
        return Dataset(DATA, DATA.take(np.arange(20)))

    def build(self):
        return KerasModel(self.network)


class Adapted(Small):
    network = staticmethod(NETWORKS["LoRA"][0])
    public = True


class Plain(Small):
    network = staticmethod(network)
    public = True


class Deep(Small):
    network = staticmethod(lambda: network(layers.Dense(4, name="dense")))
    public = True


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    for kind in (Small, Adapted, Plain, Deep):
        monkeypatch.setitem(TASKS._table, kind.__name__.lower(), f"{__name__}:{kind.__name__}")


def settings_of(base, **changes):
    kept = {key: value for key, value in base.items() if key != "task.model"}
    return kept | {"task.name": "small", "task.test-fraction": 0.2, "task.statistics": "local"} | changes


LOCAL = settings_of(OPEN)


def node_of(settings=LOCAL, number=0, **node):
    return Context(1, number + 1, {"partition-id": number, "num-partitions": 2, **node}, RecordDict(), settings)


def statistics_of(node):
    """Return the arrays that a node keeps, of the model's own types and shapes."""
    return from_record(node.state.array_records["statistics"])


def new_model(statistics="local"):
    model = model_of(Small(TaskConfig(name="small", model="small", statistics=statistics)))
    model.initialise(1)
    return model


class TestLocal:
    def test_no_statistics_leave_a_site(self):
        arrays = new_model().arrays()
        assert not any(map(is_state, arrays))
        for settings in (LOCAL, settings_of(GAUSSIAN)):
            assert set(arrays_of(app(message_of(arrays), node_of(settings)))) == set(arrays)

    def test_a_site_goes_on_from_its_own_statistics(self):
        """Two rounds at a site move them on; another site of the process begins anew."""
        arrays, one, found = new_model().arrays(), node_of(), []
        for _ in range(2):
            arrays_of(app(message_of(arrays), one))
            found.append(statistics_of(one)[MEAN])
        other = node_of(number=1)
        arrays_of(app(message_of(arrays), other))
        first = statistics_of(other)[MEAN]
        assert (first.dtype, first.shape) == (np.float32, (4,))
        assert np.linalg.norm(found[1]) > 1.5 * np.linalg.norm(found[0]) > 0
        assert 0 < np.linalg.norm(first - found[0]) < np.linalg.norm(first)

    def test_a_site_scores_with_its_own_statistics(self):
        arrays, fresh, trained = new_model().arrays(), node_of(), node_of()
        arrays_of(app(message_of(arrays), trained))
        losses = []
        for node in (fresh, trained):
            reply = app(message_of(arrays, "evaluate"), node)
            losses.append(next(iter(reply.content.metric_records.values()))["loss"])
        assert losses[0] != losses[1]

    def test_a_failed_training_leaves_the_statistics_as_they_were(self, monkeypatch):
        arrays, node = new_model().arrays(), node_of()
        arrays_of(app(message_of(arrays), node))
        before = statistics_of(node)
        monkeypatch.setattr(KerasTrainer, "fit", lambda *_: 1 / 0)
        assert app(message_of(arrays), node).has_error()
        np.testing.assert_equal(statistics_of(node), before)

    def test_each_site_keeps_a_model_with_its_own_statistics(self, tmp_path):
        arrays, saved = new_model().arrays(), []
        for number in (0, 1):
            node = node_of(number=number, **{"model-dir": str(tmp_path / str(number))})
            arrays_of(app(message_of(arrays), node))
            assert not app(message_of(arrays, "query"), node).has_error()
            model = KerasModel(normalised)
            model.load(tmp_path / str(number) / "model.keras")
            saved.append(model.arrays())
            np.testing.assert_array_equal(saved[-1][MEAN], statistics_of(node)[MEAN])
        np.testing.assert_array_equal(saved[0]["net/dense/kernel"], saved[1]["net/dense/kernel"])
        assert not np.array_equal(saved[0][VARIANCE], saved[1][VARIANCE])

    def test_a_model_without_statistics_refuses_the_key(self):
        with pytest.raises(ConfigError, match="= 'local' has no effect: no layer"):
            model_of(Plain(TaskConfig(name="plain", model="small", statistics="local")))

    def test_a_model_that_cannot_keep_any_refuses_the_key(self):
        with pytest.raises(ConfigError, match="has no statistics that can stay at a site"):
            simulate(OPEN | {"task.statistics": "local"}, 2)


def run(folder, clients=2, **changes):
    quiet = {"output-dir": str(folder), "num-rounds": 2, "seed": 1, "tensorboard": False, "report": False}
    return simulate(settings_of(OPEN, **quiet) | changes, clients)


def test_a_run_says_where_statistics_are(tmp_path, capsys):
    outcome = run(tmp_path)
    said = capsys.readouterr().out
    assert "46 parameters trained and sent, 8 of statistics kept at each site" in said
    assert "the released model holds no site's statistics" in said
    released = KerasModel(normalised)
    released.load(outcome.directory.path / "model.keras")
    assert (released.arrays()[MEAN] == 0).all() and (released.arrays()[VARIANCE] == 1).all()
    assert json.loads((outcome.directory.path / "parameters.json").read_text())["kept"] == 8


def test_only_adapters_travel_in_a_private_run(tmp_path):
    noise = {"privacy.server": "global-dp", "privacy.noise-multiplier": 1.0, "task.statistics": "average"}
    outcome = run(tmp_path, **noise, **{"task.name": "adapted"})
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [2, 2]
    build = NETWORKS["LoRA"][0]
    trained = {weight.path for weight in KerasModel(build).keras.trainable_variables}
    assert set(from_record(outcome.arrays)) == trained and any("lora" in path for path in trained)
    here, saved = KerasModel(build), KerasModel(build)
    before = here.predict(X)
    here.assign(from_record(outcome.arrays))
    saved.load(outcome.directory.path / "model.keras")  # in which Keras has merged the adapters into the kernels
    np.testing.assert_allclose(saved.predict(X), here.predict(X), atol=1e-5)
    assert np.abs(here.predict(X) - before).max() > 0.1


def test_a_model_without_finite_predictions_is_named_and_the_next_run_begins(tmp_path):
    """Weights that single precision holds, and whose products it does not."""
    average = {"task.statistics": "average", "task.name": "deep", "num-rounds": 1}
    with pytest.raises(CloisterError, match="cannot be used: weights or predictions"):
        run(tmp_path, **average, **{"strategy.name": "fedavgm", "strategy.server-learning-rate": 1e31})
    (folder,) = (path for path in tmp_path.iterdir() if (path / "privacy.json").exists())
    ended = json.loads((folder / "privacy.json").read_text())["ended"]
    assert ended["how"] == "error" and "the loss was last a finite number in round 0" in ended["why"]
    assert run(tmp_path, **average).ended == "as-asked"


def test_the_server_does_not_score_a_model_without_statistics(tmp_path):
    outcome = run(tmp_path, **{"evaluation.patience": 1})
    assert not any(done.central for done in outcome.rounds) and outcome.rounds[-1].federated["loss"] > 0
    assert not (outcome.directory.path / "evaluation.json").exists()


def test_scores_that_need_the_statistics_of_sites_are_refused():
    with pytest.raises(ConfigError, match=r"evaluation.central = True contradicts task.statistics = 'local'"):
        parse(LOCAL | {"evaluation.central": True})
    with pytest.raises(ConfigError, match=r"evaluation.patience = 1 needs scores: evaluation.federated or"):
        parse(LOCAL | {"evaluation.federated": "off", "evaluation.patience": 1})
