"""A frozen backbone: not sent, not noised, without gradients of its own, and the same at every site or none at all."""

import json
from functools import cache

import keras
import numpy as np
import pytest
from asking import DP_SGD, GAUSSIAN, OPEN, answer, arrays_of, message_of
from support import failures

from cloister.client.dp_sgd_keras import PrivateKerasTrainer
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import TaskConfig
from cloister.privacy.mechanisms.grid import Grid
from cloister.server.reports.html.data import Facts
from cloister.server.reports.html.page import write_report
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.faults import faults_of_naming
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.making import Parameters, frozen_digest, frozen_digest_field
from cloister.training.keras_trainer import KerasTrainer
from cloister.training.plan import TrainingPlan
from cloister.utils.state import STATE
from cloister.utils.wire import FROZEN

RNG = np.random.default_rng(0)
DATA = Examples(RNG.random((24, 64)).astype(np.float32), RNG.integers(0, 10, 24))
SGD = Recipe(1, 8, 0.1)
HEAD = ["net/head/bias", "net/head/kernel"]


def backbone(seed=0, after=list):
    """A frozen layer of 64-8 that its seed decides, what `after` makes, frozen too, and a head of 8-10."""

    def build():
        initial = keras.initializers.GlorotUniform(seed)
        layers = [keras.layers.Dense(8, activation="relu", kernel_initializer=initial, name="backbone"), *after()]
        for layer in layers:
            layer.trainable = False
        return keras.Sequential(
            [keras.Input((64,)), *layers, keras.layers.Dense(10, "softmax", name="head")], name="net"
        )

    return KerasModel(build)


class Frozen(Digits):
    """Digits behind a frozen layer."""

    models = ("frozen",)
    seed = 0

    def build(self):
        return backbone(self.seed)


@pytest.fixture
def task(monkeypatch):
    """Its name, under which server and clients find it."""
    monkeypatch.setitem(TASKS._table, "frozen-digits", f"{__name__}:Frozen")
    return "frozen-digits"


def settings_of(base, **changes):
    kept = {key: value for key, value in base.items() if key != "task.model"}
    return kept | {"task.name": "frozen-digits"} | changes


@cache
def sent():
    """Return what a server sends first: the head, and the digest of the backbone."""
    model = backbone()
    model.initialise(1)
    return model.arrays(), frozen_digest_field(model)[FROZEN]


class TestModel:
    def test_only_the_head_is_sent(self):
        model = backbone()
        assert sorted(model.arrays()) == HEAD
        assert sorted(model.frozen()) == ["net/backbone/bias", "net/backbone/kernel"]
        model.assign({name: np.ones_like(array) for name, array in model.arrays().items()})
        assert (model.arrays()["net/head/kernel"] == 1).all()

    def test_new_initial_weights_are_the_head_s(self):
        model = backbone(None)
        before, heads = model.frozen(), []
        for seed in (1, 1, 2):
            model.initialise(seed)
            heads.append(model.arrays()["net/head/kernel"])
        np.testing.assert_array_equal(heads[0], heads[1])
        assert not np.array_equal(heads[0], heads[2])
        for name, array in model.frozen().items():
            np.testing.assert_array_equal(array, before[name])

    def test_batch_normalisation_is_sent_unless_it_is_frozen(self):
        def build():
            normal, still = (keras.layers.BatchNormalization(name=name) for name in ("normal", "still"))
            still.trainable = False
            return keras.Sequential([keras.Input((4,)), normal, still, keras.layers.Dense(3, name="head")], name="net")

        model, statistics = KerasModel(build), ("moving_mean", "moving_variance")
        assert {f"{STATE}net/normal/{name}" for name in statistics} < set(model.arrays())
        assert {f"net/still/{name}" for name in ("beta", "gamma", *statistics)} == set(model.frozen())

    def test_a_frozen_model_inside_a_model_is_frozen_as_a_whole(self):
        def build():
            layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(4, name="second")]
            inner = keras.Sequential([keras.Input((6,)), *layers], name="inner")
            inner.trainable = False
            return keras.Sequential([keras.Input((6,)), inner, keras.layers.Dense(3, name="top")], name="outer")

        model = KerasModel(build)
        assert {name.split("/")[-2] for name in model.arrays()} == {"top"}
        assert {name.split("/")[-2] for name in model.frozen()} == {"first", "second"}

    def test_the_digest_is_of_names_shapes_and_bits(self):
        one, same, other = (frozen_digest(backbone(seed)) for seed in (0, 0, 1))
        assert one == same != other and len(one) == 64
        assert frozen_digest(KerasModel(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))) == ""
        assert str(Parameters.of(backbone())) == f"90 parameters trained and sent, 520 frozen (SHA-256 {one[:12]}…)"

    def test_a_saved_model_is_whole(self, tmp_path):
        model, empty = backbone(0), backbone(1)
        model.initialise(3)
        model.save(tmp_path / "model.keras")
        empty.load(tmp_path / "model.keras")
        np.testing.assert_array_equal(model.predict(DATA.x), empty.predict(DATA.x))


class TestTraining:
    def trained(self, trainer):
        trainer.model.initialise(1)
        before = trainer.model.frozen(), trainer.model.arrays()
        trainer.fit(DATA, TrainingPlan(1, 8, 0.5, 0.0, (1,)))
        return before, (trainer.model.frozen(), trainer.model.arrays())

    def make(self, model, private):
        if not private:
            return KerasTrainer(model, SGD)
        return PrivateKerasTrainer(model, SGD, PrivacyConfig(server="none", client="dp-sgd"))

    @pytest.mark.parametrize("private", [False, True])
    def test_training_moves_the_head_alone(self, private):
        (frozen, head), (frozen_after, head_after) = self.trained(self.make(backbone(), private))
        assert all(np.array_equal(frozen[name], frozen_after[name]) for name in frozen)
        assert not any(np.array_equal(head[name], head_after[name]) for name in head)

    def test_frozen_layers_have_no_gradients_of_single_examples(self):
        """For any layer: only the head has a kernel of DP-SGD, and noise only for its numbers."""

        def after():
            layers = keras.layers
            convolution = layers.Conv1D(4, 3, kernel_regularizer="l2")
            return [layers.Reshape((8, 1)), convolution, layers.LayerNormalization(), layers.Flatten()]

        trainer = self.make(backbone(0, after), private=True)
        self.trained(trainer)
        assert trainer._dp_sgd.kernels == {"net/head/kernel": "outer", "net/head/bias": "whole"}
        means = trainer._dp_sgd._noised_mean([np.zeros((24, 10)), np.zeros(10)], Grid(1.0, 1.0, 256))
        assert trainer._dp_sgd._parameters == 250 and [array.shape for array in means] == [(24, 10), (10,)]


class TestNode:
    @pytest.mark.parametrize("base", [OPEN, GAUSSIAN, DP_SGD], ids=["open", "gaussian", "dp-sgd"])
    def test_a_reply_holds_the_head_and_nothing_else(self, task, base):
        arrays, digest = sent()
        found = arrays_of(answer(settings_of(base), None, message_of(arrays, **{FROZEN: digest})))
        assert sorted(found) == HEAD
        assert all(not np.array_equal(found[name], arrays[name]) for name in HEAD)

    @pytest.mark.parametrize("kind", ["train", "evaluate"])
    def test_another_backbone_is_refused(self, task, kind, caplog):
        arrays, digest = sent()
        told = "0" * 64
        settings = settings_of(OPEN, **{"task.test-fraction": 0.2})
        reply = answer(settings, None, message_of(arrays, kind, **{FROZEN: told}))
        assert reply.error.reason == (
            f"FederationError: the frozen weights of the model are not those of the server, which has SHA-256 "
            f"{told[:12]}…; install the same version of the task and of its files"
        )
        assert digest[:12] not in reply.error.reason and digest[:12] in caplog.text, "it is for this node's own log"
        assert "the server, which has none" in answer(settings, None, message_of(arrays, kind)).error.reason

    def test_a_server_with_frozen_weights_and_a_node_without(self):
        reply = answer(OPEN, None, message_of(**{FROZEN: "1" * 64}))
        assert "the server, which has SHA-256 111111111111…;" in reply.error.reason

    def test_what_is_no_digest_is_refused(self):
        def check(value):
            reply = answer(OPEN, None, message_of(**{FROZEN: value}))
            assert f"must carry '{FROZEN}' as a SHA-256 digest, or not at all" in reply.error.reason

        assert failures(["", "abc", "G" * 64, 5, 2.0], check) == []

    def test_frozen_arrays_in_a_message_are_refused(self, task):
        """A server cannot put a backbone of its choice under the head."""
        arrays, digest = sent()
        whole = arrays | backbone(7).frozen()
        reply = answer(settings_of(OPEN), None, message_of(whole, **{FROZEN: digest}))
        assert "array 'net/backbone/bias' is in only one of the model sent and the model here" in reply.error.reason


def test_a_run_says_what_is_frozen(task, tmp_path, capsys):
    settings = settings_of(OPEN) | {"output-dir": str(tmp_path), "num-rounds": 1, "seed": 1, "tensorboard": False}
    outcome = simulate(settings, 2)
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [2]
    digest = frozen_digest(backbone())
    assert f"90 parameters trained and sent, 520 frozen (SHA-256 {digest[:12]}…)" in capsys.readouterr().out
    assert json.loads((outcome.directory.path / "parameters.json").read_text()) == {
        "sent": 90,
        "frozen": 520,
        "digest": digest,
        "state": 0,
        "kept": 0,
    }
    assert Facts.read(outcome.directory.path).parameters == Parameters(90, 520, digest)
    write_report(outcome.directory.path)
    page = (outcome.directory.path / "report.html").read_text()
    assert f"The model has 90 parameters trained and sent, 520 frozen (SHA-256 {digest[:12]}…)." in page


def test_a_backbone_that_every_build_makes_anew_is_a_fault():
    class Anew(Frozen):
        seed = None

    anew, same = (kind(TaskConfig()) for kind in (Anew, Frozen))
    (fault,) = map(str, faults_of_naming(anew, anew.build()))
    assert fault.startswith("build(): frozen weights that differ when it is called again; load them from a file")
    assert not list(faults_of_naming(same, same.build()))
