"""Minibatch training of a Keras model, with one compiled function per epoch for any number of examples."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from cloister.config.io import Scalar, as_pairs, suggestion
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Compiled, Network, Optimizer, Tensor
from cloister.utils.crash import quoted
from cloister.utils.errors import ConfigError

LOSSES = {
    "cross-entropy": (keras.losses.SparseCategoricalCrossentropy, tf.int32),
    "squared-error": (keras.losses.MeanSquaredError, tf.float32),
}
"""Keras class of a model's loss, and the dtype of its targets."""
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
    """Trainer with any Keras optimizer on the model's loss, and FedProx's penalty if the plan has one.

    The optimizer and the task's callbacks start afresh in every `fit`, so that no state passes between clients. An
    epoch is one graph. So callbacks receive the begin and end of training and of epochs, but no batch events. They may
    end training by `model.stop_training`, and set `model.optimizer.learning_rate`; the rates of later epochs change by
    the same factor.

    Args:
        model: trained in place.
        recipe: of the run: its optimizer, class weights and callbacks.

    Raises:
        ConfigError: Keras has no such optimizer or option, or a callback needs what a client's training does not have.
    """

    def __init__(self, model: KerasModel, recipe: Recipe) -> None:
        self.model, self._recipe = model, recipe
        loss, self._target = LOSSES[model.loss]
        self.loss = loss()
        callbacks_of(recipe)  # refused at the start
        self.optimizer = optimizer_named(recipe.optimizer, recipe.optimizer_options)
        self.optimizer.build(model.keras.trainable_variables)
        self._initial = [np.array(variable.numpy()) for variable in self.optimizer.variables]
        self._anchors = [tf.Variable(variable.numpy()) for variable in model.keras.trainable_variables]
        self._plain = self._compile(proximal=False)
        self._proximal = self._compile(proximal=True)

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train from the model's weights, which are also the centre of the penalty.

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
        x, y = tf.constant(examples.x), tf.constant(examples.y, self._target)
        factors = self._recipe.weights(examples.y)
        weights = tf.zeros([0]) if factors is None else tf.constant(factors)
        self.model.keras.stop_training = False
        callbacks = _Callbacks(self._recipe, self.model.keras, self.optimizer, plan)
        rng = np.random.default_rng(plan.seed)
        callbacks.told("on_train_begin")
        loss = 0.0
        for epoch in range(plan.epochs):
            callbacks.begin(epoch)
            if plan.augmentation is not None:
                x = tf.constant(plan.seen(examples, epoch).x)
            order = rng.permutation(len(examples)).astype(np.int32)
            loss = float(train(x, y, weights, order, np.int32(plan.batch_size), np.float32(plan.proximal_mu)))
            callbacks.told("on_epoch_end", epoch, {SEEN: loss})
            if self.model.keras.stop_training:
                break
        callbacks.told("on_train_end")
        return loss

    def _compile(self, proximal: bool) -> Compiled:
        """Compile an epoch into one graph.

        Its shapes are open, so that clients of any size share it.
        """
        (spec,) = self.model.keras.inputs
        features = list(spec.shape[1:])
        signature = [
            tf.TensorSpec([None, *features], spec.dtype),
            tf.TensorSpec([None], self._target),
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]

        weighs = self._recipe.maximum_weight != 1 or bool(self._recipe.class_weights)

        def epoch(
            x: Tensor, y: Tensor, weights: Tensor, order: Tensor, batch_size: Tensor, proximal_mu: Tensor
        ) -> Tensor:
            total = tf.constant(0.0)
            for start in tf.range(0, tf.size(order), batch_size):
                chosen = order[start : start + batch_size]
                # Gathering loses the static shape of an example, which layers need.
                inputs = tf.ensure_shape(tf.gather(x, chosen), [None, *features])
                chosen_weights = tf.gather(weights, chosen) if weighs else None
                loss = self._step(inputs, tf.gather(y, chosen), chosen_weights, proximal_mu if proximal else None)
                # The last minibatch may be smaller: weight losses by batch size.
                total += loss * tf.cast(tf.size(chosen), tf.float32)
            return total / tf.cast(tf.size(order), tf.float32)

        return tf.function(epoch, input_signature=signature)

    def _step(self, x: Tensor, y: Tensor, weights: Tensor, proximal_mu: Tensor) -> Tensor:
        """Train on one minibatch, and return its loss without the penalty."""
        variables = self.model.keras.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model.keras(x, training=True), sample_weight=weights)
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
        self._heard = keras.callbacks.CallbackList(made, model=model, epochs=plan.epochs) if made else None
        self._model, self._optimizer, self._plan, self._factor = model, optimizer, plan, 1.0
        self._set(plan.rate(0))

    def begin(self, epoch: int) -> None:
        """Set the rate of an epoch, times the factor by which callbacks have changed earlier ones."""
        if self._given:
            self._factor *= float(self._optimizer.learning_rate) / self._given
        self._set(self._plan.rate(epoch) * self._factor)
        self.told("on_epoch_begin", epoch)

    def told(self, event: str, *given: object) -> None:
        """Call the callbacks with an event."""
        if self._heard is None:
            return
        before = vars(self._model).get("optimizer")  # of a model that its task compiles
        object.__setattr__(self._model, "optimizer", self._optimizer)
        try:
            getattr(self._heard, event)(*given)
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
        own = [event for event in BATCH_EVENTS if not _is_of_keras(getattr(each, event))]
        if own:
            raise ConfigError(
                f"recipe.callbacks: {name} defines {own[0]}, and an epoch of a client's training has no batch events; "
                "use on_epoch_begin or on_epoch_end"
            )
    return made


def _is_of_keras(function: Callable[..., object]) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "keras"


def optimizer_named(name: str, options: Mapping[str, Scalar] = NO_OPTIONS) -> Optimizer:
    """Return a new Keras optimizer.

    Args:
        name: of the optimizer.
        options: its arguments.

    Raises:
        ConfigError: Keras has no optimizer of this name, or it has no such option or value.
    """
    try:
        found = keras.optimizers.get(name)
    except (ValueError, TypeError, KeyError) as error:  # some names are of other Keras objects
        raise ConfigError(
            f"client.optimizer must be the name of a Keras optimizer, such as sgd or adam; got {name!r}"
        ) from error
    if not options:
        return found
    defaults = {each.name: each.default for each in inspect.signature(type(found)).parameters.values()}
    known = [each for each in defaults if each not in (*ELSEWHERE, "name", "kwargs") and not each.startswith("ema_")]
    for option, value in options.items():
        if option in ELSEWHERE:
            raise ConfigError(f"client.optimizer-options: {option} has no effect, as {ELSEWHERE[option]}")
        if option not in known:
            raise ConfigError(
                f"client.optimizer-options: {name!r} has no option {option!r}; it has {', '.join(known)}"
                f"{suggestion(option, known)}"
            )
        if isinstance(value, str) or isinstance(value, bool) != isinstance(defaults[option], bool):
            kind = "true or false" if isinstance(defaults[option], bool) else "a number"
            raise ConfigError(f"client.optimizer-options: {option} = {value!r} is not valid: it must be {kind}")
    try:
        return type(found)(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"client.optimizer-options: {as_pairs(options)} is not valid: {quoted(error)}") from error
