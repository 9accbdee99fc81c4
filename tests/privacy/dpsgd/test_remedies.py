"""A refusal names the layer, and a remedy that is true for it; a model that is computed in turn names its reason."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import compile_nothing, dp_sgd, functional, head, small
from support import failures

from cloister.utils.errors import UnsupportedModel

layers = keras.layers


class Noisy(keras.Layer):
    """Draws from a state that Keras does not know."""

    def call(self, x):
        return x + tf.random.uniform(tf.shape(x))


class Printing(keras.Layer):
    def call(self, x):
        found = tf.py_function(lambda each: each, [x], tf.float32)
        found.set_shape(x.shape)
        return found


class Penalised(keras.Layer):
    """Adds a penalty to a weight of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), regularizer="l1", name="scale")

    def call(self, x):
        return x * self.scale


class Adding(keras.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def named(kind, *given, **more):
    return kind(*given, name="mine", **more)


DECAY = "set client.optimizer-options = 'weight_decay={}'"
REFUSED = [
    (lambda: small(named(layers.Dense, 3, kernel_regularizer=keras.regularizers.L2(0.003))), DECAY.format("0.006")),
    (lambda: small(named(layers.Dense, 3, bias_regularizer="l1")), "leave its bias_regularizer out, and set client"),
    (lambda: small(named(layers.Dense, 3, activity_regularizer="l2")), "leave its activity_regularizer out"),
    (lambda: small(named(Penalised)), "adds a penalty; leave it out, and set client.optimizer-options"),
    (lambda: small(named(Adding)), "(Adding) adds a loss of its own (add_loss)"),
    (lambda: small(named(Noisy)), "(Noisy) uses RandomUniform"),
    (lambda: small(named(Printing)), "(Printing) uses EagerPyFunc"),
]
IN_TURN = [
    (lambda: functional((4, 3), lambda x: head(layers.SimpleRNN(2, name="mine")(x))), "has no rule"),
    (lambda: small(named(Doubled)), "'mine/scale' is used by Square"),
]


class Doubled(keras.Layer):
    """Changes a weight before an example meets it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * keras.ops.square(self.scale)


def test_a_refusal_names_the_layer_and_a_remedy_that_a_task_can_follow():
    def check(build, says):
        with pytest.raises(UnsupportedModel) as refused:
            dp_sgd(build())
        assert "mine" in str(refused.value) and says in str(refused.value)
        assert "unroll" not in str(refused.value) and "loss function" not in str(refused.value)

    assert not failures(REFUSED, check)


def test_decay_by_the_remedy_is_the_gradient_of_the_penalty():
    strength, rate = 0.05, 0.1
    weight = np.array([1.5, -2.0], np.float32)
    penalty, decayed = keras.Variable(weight), keras.Variable(weight)
    with tf.GradientTape() as tape:
        value = keras.regularizers.L2(strength)(penalty.value)
    keras.optimizers.SGD(rate).apply([tape.gradient(value, penalty.value)], [penalty])
    keras.optimizers.SGD(rate, weight_decay=2 * strength).apply([tf.zeros(2)], [decayed])
    np.testing.assert_allclose(penalty.numpy(), decayed.numpy(), rtol=1e-6)


def test_a_layer_that_cannot_be_traced_is_named():
    fails = []

    def later(x):
        if fails:
            raise RuntimeError("patient 17")
        return x

    model = small(named(layers.Lambda, later))
    fails.append(True)
    with pytest.raises(UnsupportedModel, match=r"'mine' \(Lambda\) fails while its training is traced") as refused:
        dp_sgd(model)
    assert f"RuntimeError at {Path(__file__).name}:" in str(refused.value) and "patient" not in str(refused.value)


def test_a_model_without_trained_weights_is_told_what_it_lacks():
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.top = layers.Dense(3)

        def call(self, x):
            return self.top(x)

    frozen = small()
    frozen.trainable = False
    for model, says in ((Unbuilt(), r"build it, such as by model\.build"), (frozen, "set trainable = True")):
        with pytest.raises(UnsupportedModel, match=f"no trainable weights; {says}"):
            dp_sgd(model, probe=(np.zeros((3, 6), np.float32), np.zeros(3, np.int64)))


@pytest.mark.parametrize("number", range(len(IN_TURN)))
def test_a_model_in_turn_names_the_layer_that_puts_it_there(number, monkeypatch):
    compile_nothing(monkeypatch)
    build, says = IN_TURN[number]
    step = dp_sgd(build())
    assert step.method == "in turn" and says in step.why_in_turn
    assert "mine" in step.why_in_turn


def test_a_model_in_rows_has_no_reason():
    step = dp_sgd(small(layers.Dense(4)))
    assert step.method == "rows" and step.why_in_turn == ""
