"""Training of a Keras model by minibatches. One compiled function runs an epoch, for any number of examples."""

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Compiled, Optimizer, Tensor
from cloister.utils.errors import ConfigError

LEAST_SQUARE = 1e-12
"""Added below the root of a mean square, whose slope at 0 is infinite."""


class KerasTrainer:
    """Trainer that minimises the model's loss with any Keras optimizer, and FedProx's penalty if the plan has one.

    The optimizer and the task's callbacks start afresh in every `fit`, so that no state passes between clients. One
    graph runs a whole epoch. So callbacks see the begin and end of training and of epochs, but no batches. They may end
    training by `model.stop_training`.

    Args:
        model: trained in place.
        recipe: of the run: its optimizer, class weights and callbacks.

    Raises:
        ConfigError: Keras has no such optimizer.
    """

    def __init__(self, model: KerasModel, recipe: Recipe) -> None:
        self.model, self._recipe = model, recipe
        self.optimizer = optimizer_named(recipe.optimizer)
        self.optimizer.build(model.keras.trainable_variables)
        self._initial = [np.array(variable.numpy()) for variable in self.optimizer.variables]
        self._anchors = [tf.Variable(variable.numpy()) for variable in model.keras.trainable_variables]
        self._plain = self._compile(proximal=False)
        self._proximal = self._compile(proximal=True)

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train the model from its current weights, and return the last epoch's mean loss.

        FedProx's penalty is centred on the weights at the start.

        Args:
            examples: to train on.
            plan: of this round.
        """
        for variable, value in zip(self.optimizer.variables, self._initial, strict=True):
            variable.assign(value)
        self.model.reseed(int(np.random.SeedSequence(plan.seed).generate_state(1)[0]))
        if plan.proximal_mu:
            for anchor, variable in zip(self._anchors, self.model.keras.trainable_variables, strict=True):
                anchor.assign(variable.value)
        train = self._proximal if plan.proximal_mu else self._plain
        x, y = self._tensors(examples.x), [tf.constant(each) for each in self.model.expected(examples.y)]
        factors = self._recipe.weights(examples)
        weights = tf.ones([len(examples)]) if factors is None else tf.constant(factors)
        self.model.keras.stop_training = False
        made = list(self._recipe.callbacks()) if self._recipe.callbacks else []
        callbacks = keras.callbacks.CallbackList(made, model=self.model.keras, epochs=plan.epochs)
        rng = np.random.default_rng(plan.seed)
        callbacks.on_train_begin()
        loss = 0.0
        for epoch in range(plan.epochs):
            callbacks.on_epoch_begin(epoch)
            if plan.augmentation is not None:
                x = self._tensors(plan.seen(examples, epoch).x)
            self.optimizer.learning_rate = plan.rate(epoch)
            order = rng.permutation(len(examples)).astype(np.int32)
            loss = float(train(x, y, weights, order, np.int32(plan.batch_size), np.float32(plan.proximal_mu)))
            callbacks.on_epoch_end(epoch, {"loss": loss})
            if self.model.keras.stop_training:
                break
        callbacks.on_train_end()
        return loss

    def _tensors(self, x: NDArray) -> Tensor:
        return tf.nest.map_structure(tf.constant, self.model.given(x))

    def _compile(self, proximal: bool) -> Compiled:
        """Compile an epoch into one graph.

        The number of examples is open in the graph, so that clients of all sizes share it.
        """
        specs = self.model.specs
        signature = [
            specs,
            [tf.TensorSpec([None, *target.shape], target.dtype) for target in self.model.targets.values()],
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]

        def epoch(
            x: Tensor, y: Tensor, weights: Tensor, order: Tensor, batch_size: Tensor, proximal_mu: Tensor
        ) -> Tensor:
            total = tf.constant(0.0)
            for start in tf.range(0, tf.size(order), batch_size):
                chosen = order[start : start + batch_size]
                inputs, targets = _taken(x, y, specs, chosen)
                loss = self._step(inputs, targets, tf.gather(weights, chosen), proximal_mu if proximal else None)
                # The last minibatch may be smaller: weight losses by batch size.
                total += loss * tf.cast(tf.size(chosen), tf.float32)
            return total / tf.cast(tf.size(order), tf.float32)

        return tf.function(epoch, input_signature=signature)

    def _loss(self, y: list[Tensor], outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the loss of a minibatch: of each output the weighted mean over examples, for `rmse` its root."""
        total = tf.constant(0.0)
        for target, losses in zip(self.model.targets.values(), self.model.losses(y, outputs), strict=True):
            losses *= tf.cast(weights, losses.dtype)
            loss = tf.reduce_sum(losses) / tf.cast(tf.size(losses), losses.dtype)
            if target.loss == "rmse":
                # The mean has the loss scale as a factor: so it is one of the root too.
                loss = tf.sqrt(loss * self._recipe.loss_scale + LEAST_SQUARE)
            total += target.weight * tf.cast(loss, tf.float32)
        return total

    def _step(self, x: Tensor, y: list[Tensor], weights: Tensor, proximal_mu: Tensor) -> Tensor:
        """Train on one minibatch, and return its loss without the penalty."""
        variables = self.model.keras.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model.keras(x, training=True), weights)
            objective = tf.add_n([loss, *self.model.keras.losses])
            if proximal_mu is not None:
                # μ/2·‖w - w_global‖² over the trainable weights
                pairs = zip(variables, self._anchors, strict=True)
                squares = [tf.reduce_sum(tf.square(variable.value - anchor)) for variable, anchor in pairs]
                objective += proximal_mu / 2 * tf.add_n(squares)
        self.optimizer.apply(tape.gradient(objective, variables), variables)
        return loss


def _taken(x: Tensor, y: list[Tensor], specs: Tensor, chosen: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the inputs and targets of a minibatch.

    Gathering loses the static shape of an example, which layers need.
    """
    inputs = tf.nest.map_structure(lambda spec, each: tf.ensure_shape(tf.gather(each, chosen), spec.shape), specs, x)
    return inputs, [tf.gather(each, chosen) for each in y]


def optimizer_named(name: str) -> Optimizer:
    """Return a new Keras optimizer.

    Raises:
        ConfigError: Keras has no optimizer of this name.
    """
    try:
        return keras.optimizers.get(name)
    except (ValueError, TypeError, KeyError) as error:  # some names are of other Keras objects
        raise ConfigError(
            f"client.optimizer must be the name of a Keras optimizer, such as sgd or adam; got {name!r}"
        ) from error
