"""Training of a Keras model by minibatches. One compiled function runs an epoch, for any number of examples."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.config.io import Scalar, as_pairs
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.plan import TrainingPlan, check_optimizer_options
from cloister.utils.arrays import Compiled, Network, Optimizer, Tensor
from cloister.utils.crash import quoted
from cloister.utils.errors import ConfigError

LEAST_SQUARE = 1e-12
"""Added below the root of a mean square, whose slope at 0 is infinite."""
SEEN = "loss"
"""Name of the only metric of a client's training."""
BATCH_EVENTS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
ELSEWHERE = {
    "learning_rate": "client.learning-rate sets it",
    "use_ema": "only trained weights are sent, and not their average",
    "loss_scale_factor": "the loss is not scaled; client.loss-scale does it",
    "gradient_accumulation_steps": "a round would lose the last gradients; client.batch-size has this effect",
}
"""Arguments of Keras optimizers without effect in a client's training, with the reason."""
NO_OPTIONS: Mapping[str, Scalar] = {}


class KerasTrainer:
    """Trainer that minimises the model's loss with any Keras optimizer, and FedProx's penalty if the plan has one.

    The optimizer and the task's callbacks start afresh in every `fit`, so that no state passes between clients. One
    graph runs a whole epoch. So callbacks see the begin and end of training and of epochs, but no batches. They may end
    training by `model.stop_training`, and set `model.optimizer.learning_rate`; the rates of later epochs change by the
    same factor.

    Args:
        model: trained in place.
        recipe: of the run: its optimizer, class weights and callbacks.

    Raises:
        ConfigError: Keras has no such optimizer or option, or a callback needs what a client's training does not have.
    """

    def __init__(self, model: KerasModel, recipe: Recipe) -> None:
        self.model, self._recipe = model, recipe
        callbacks_of(recipe)  # refused at the start
        self.optimizer = optimizer_named(recipe.optimizer, recipe.optimizer_options)
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
        callbacks = _Callbacks(self._recipe, self.model.keras, self.optimizer, plan)
        rng = np.random.default_rng(plan.seed)
        callbacks.notify("on_train_begin")
        loss = 0.0
        for epoch in range(plan.epochs):
            callbacks.begin(epoch)
            if plan.augmentation is not None:
                x = self._tensors(plan.seen(examples, epoch).x)
            order = rng.permutation(len(examples)).astype(np.int32)
            loss = float(train(x, y, weights, order, np.int32(plan.batch_size), np.float32(plan.proximal_mu)))
            callbacks.notify("on_epoch_end", epoch, {SEEN: loss})
            if self.model.keras.stop_training:
                break
        callbacks.notify("on_train_end")
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
                # Gathering loses the static shape of an example, which layers need.
                rows = tf.nest.map_structure(partial(tf.gather, indices=chosen), x)
                inputs = tf.nest.map_structure(lambda spec, each: tf.ensure_shape(each, spec.shape), specs, rows)
                targets = [tf.gather(each, chosen) for each in y]
                loss = self._step(inputs, targets, tf.gather(weights, chosen), proximal_mu if proximal else None)
                # The last minibatch may be smaller: weight losses by batch size.
                total += loss * tf.cast(tf.size(chosen), tf.float32)
            return total / tf.cast(tf.size(order), tf.float32)

        return tf.function(epoch, input_signature=signature)

    def _step(self, x: Tensor, y: list[Tensor], weights: Tensor, proximal_mu: Tensor) -> Tensor:
        """Train on one minibatch, and return its loss without the penalty."""
        variables = self.model.keras.trainable_variables
        with tf.GradientTape() as tape:
            # The loss of each output is the weighted mean over examples, for `rmse` its root.
            loss, of_outputs = tf.constant(0.0), self.model.losses(y, self.model.keras(x, training=True))
            for target, losses in zip(self.model.targets.values(), of_outputs, strict=True):
                losses *= tf.cast(weights, losses.dtype)
                mean = tf.reduce_sum(losses) / tf.cast(tf.size(losses), losses.dtype)
                if target.loss == "rmse":
                    # The mean has the loss scale as a factor: so it is one of the root too.
                    mean = tf.sqrt(mean * self._recipe.loss_scale + LEAST_SQUARE)
                loss += target.weight * tf.cast(mean, tf.float32)
            objective = tf.add_n([loss, *self.model.keras.losses])
            if proximal_mu is not None:
                # μ/2·‖w - w_global‖² over the trainable weights
                pairs = zip(variables, self._anchors, strict=True)
                squares = [tf.reduce_sum(tf.square(variable.value - anchor)) for variable, anchor in pairs]
                objective += proximal_mu / 2 * tf.add_n(squares)
        self.optimizer.apply(tape.gradient(objective, variables), variables)
        return loss


class _Callbacks:
    """Callbacks of one client's training in a round, and the learning rate that they may set.

    The model has the optimizer only during an event. Keras would save an optimizer of the model with it.

    Args:
        recipe: with the function that makes them.
        model, optimizer: of the client's training.
        plan: of the round.
    """

    def __init__(self, recipe: Recipe, model: Network, optimizer: Optimizer, plan: TrainingPlan) -> None:
        made = callbacks_of(recipe)
        self._list = keras.callbacks.CallbackList(made, model=model, epochs=plan.epochs) if made else None
        self._model, self._optimizer, self._plan, self._factor = model, optimizer, plan, 1.0
        self._set(plan.rate(0))

    def begin(self, epoch: int) -> None:
        """Set the rate of an epoch, times the factor by which callbacks have changed earlier ones."""
        if self._given:
            self._factor *= float(self._optimizer.learning_rate) / self._given
        self._set(self._plan.rate(epoch) * self._factor)
        self.notify("on_epoch_begin", epoch)

    def notify(self, event: str, *given: object) -> None:
        """Call the callbacks with an event."""
        if self._list is None:
            return
        before = vars(self._model).get("optimizer")  # of a model that its task compiles
        object.__setattr__(self._model, "optimizer", self._optimizer)
        try:
            getattr(self._list, event)(*given)
        finally:
            object.__delattr__(self._model, "optimizer")
            if before is not None:
                object.__setattr__(self._model, "optimizer", before)

    def _set(self, rate: float) -> None:
        self._optimizer.learning_rate = rate
        self._given = float(self._optimizer.learning_rate)


def callbacks_of(recipe: Recipe) -> Sequence[keras.callbacks.Callback]:
    """Return new callbacks of a recipe.

    Raises:
        ConfigError: they are no callbacks, monitor another metric than the loss, or need batch events.
    """
    made = recipe.callbacks() if recipe.callbacks else []
    if not isinstance(made, Sequence) or not all(isinstance(each, keras.callbacks.Callback) for each in made):
        raise ConfigError("recipe.callbacks must return a list of Keras callbacks")
    for each in made:
        name, monitored = type(each).__name__, getattr(each, "monitor", SEEN)
        if monitored != SEEN:
            raise ConfigError(
                f"recipe.callbacks: {name} monitors {monitored!r}, and a client's training has {SEEN!r} alone; "
                f"use monitor={SEEN!r}, or evaluation.patience, by which scores end a run"
            )
        # Keras' own callbacks use batch events for displays and saved files.
        modules = {event: str(getattr(getattr(each, event), "__module__", "")) for event in BATCH_EVENTS}
        own = [event for event, module in modules.items() if module.partition(".")[0] != "keras"]
        if own:
            raise ConfigError(
                f"recipe.callbacks: {name} defines {own[0]}, and an epoch of a client's training has no batch events; "
                "use on_epoch_begin or on_epoch_end"
            )
    return made


def optimizer_named(name: object, options: Mapping[str, Scalar] = NO_OPTIONS) -> Optimizer:
    """Return a new Keras optimizer.

    Args:
        name: of the optimizer; a function, as PyTorch models take it, is refused.
        options: its arguments.

    Raises:
        ConfigError: Keras has no optimizer of this name, or it has no such option or value.
    """
    try:
        if not isinstance(name, str):
            raise TypeError(name)
        found = keras.optimizers.get(name)
    except (ValueError, TypeError, KeyError) as error:  # some names are of other Keras objects
        raise ConfigError(
            f"client.optimizer must be the name of a Keras optimizer, such as sgd or adam; got {name!r}"
        ) from error
    if not options:
        return found
    defaults = {each.name: each.default for each in inspect.signature(type(found)).parameters.values()}
    hidden = (*ELSEWHERE, "name", "kwargs")
    known = {option: of for option, of in defaults.items() if option not in hidden and not option.startswith("ema_")}
    check_optimizer_options(name, options, known, ELSEWHERE)
    try:
        return type(found)(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"client.optimizer-options: {as_pairs(options)} is not valid: {quoted(error)}") from error
