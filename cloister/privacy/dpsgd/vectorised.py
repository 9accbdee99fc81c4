"""Per-example gradients by vectorisation: of one layer that has no form of its own, or of the whole model."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from cloister.core.tensors import Network, Tensor
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, NotCapturable
from cloister.privacy.dpsgd.draws import seeds_of
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows
from cloister.privacy.dpsgd.trial_calls import CallMode

Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of shape (batch,) from labels and the model's outputs, each of its own example alone."""


def layer(captured: CapturedLayer, calls: Sequence[Call], rows: Rows) -> Part:
    """Every call is repeated example by example, and what comes out is differentiated with respect to the weights.

    Args:
        captured: the layer, and its trainable variables.
        calls: of the layer in one forward computation.
        rows: how many rows of a tensor belong to a unit, and how many units there are.
    """
    per_call = [_gradients_of_call(captured, call, rows.count) for call in calls]
    return PerUnit("vectorised", [tf.add_n(same) for same in zip(*per_call, strict=True)], rows)


def _gradients_of_call(captured: CapturedLayer, call: Call, batch: int) -> Sequence[Tensor]:
    arguments = (call.args, call.kwargs)
    flat = tf.nest.flatten(arguments)
    tensors = tuple(leaf for leaf in flat if tf.is_tensor(leaf))
    deltas = tuple(delta for delta in call.deltas if delta is not None)
    if any(tensor.shape.rank == 0 or tensor.shape[0] != batch for tensor in (*tensors, *deltas)):
        name = captured.layer.name
        raise NotCapturable(f"layer {name!r} is given something that does not have an example in each row")
    values = [variable.value for variable in captured.variables]

    def of_one(example: tuple[Sequence[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        # A layer wants a batch: the example is one of size 1.
        leaves, own_deltas = iter(example[0]), [delta[None] for delta in example[1]]
        repeated = [next(leaves)[None] if tf.is_tensor(leaf) else leaf for leaf in flat]
        args, kwargs = tf.nest.pack_sequence_as(arguments, repeated)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            with keras.StatelessScope(list(zip(captured.variables, values, strict=True))):
                outputs = tf.nest.flatten(captured.layer.call(*args, **kwargs))
            floats = [output for output in outputs if output.dtype.is_floating]
            reached = [output for output, delta in zip(floats, call.deltas, strict=True) if delta is not None]
        return _dense_gradients(tape.gradient(reached, values, own_deltas, tf.UnconnectedGradients.ZERO))

    return tf.vectorized_map(of_one, (tensors, deltas))


def whole_model(
    model: Network, loss: Loss, x: Tensor, y: Tensor, rows: Rows, loss_weights: Tensor, mode: Tensor
) -> Part:
    """The gradients of every trainable variable, in the model's order. They take rows × parameters of memory.

    Each example draws its own random numbers, from seeds split off the model's, which move on.

    Args:
        model, loss, x, y: as in `Gradients`.
        rows: which rows are a unit.
        loss_weights: shape (rows,), what the loss of each row is multiplied with.
        mode: a `CallMode`, scalar: in a trial all examples draw from one fixed seed.
    """
    seeds = seeds_of(model)
    split = [tf.random.split(tf.cast(seed.value, tf.int64), x.shape[0] + 1) for seed in seeds]
    own_seeds = tuple(tf.where(mode == CallMode.TRAINING, several, tf.zeros_like(several))[:-1] for several in split)
    gradients = tf.vectorized_map(lambda row: gradients_of_one(model, loss, *row), (x, y, own_seeds, loss_weights))
    # The last of each split is what the model draws from next.
    for seed, several in zip(seeds, split, strict=True):
        seed.assign(tf.cast(several[-1], seed.dtype))
    return PerUnit("whole model", gradients, rows)


def gradients_of_one(
    model: Network, loss: Loss, x: Tensor, y: Tensor, seeds: Sequence[Tensor], loss_weight: Tensor
) -> list[Tensor]:
    """The gradient of one example, whose random numbers come from `seeds`.

    Args:
        model: with the weights of this step.
        loss: (labels, outputs) -> (batch,).
        x, y: one example, without a batch dimension.
        seeds: a state for each random layer.
        loss_weight: what the loss is multiplied with.
    """
    values, given = [variable.value for variable in model.trainable_variables], iter(seeds)
    mapping = [*zip(model.trainable_variables, values, strict=True)]
    mapping += [(variable, tf.cast(next(given), variable.dtype)) for variable in seeds_of(model)]
    with tf.GradientTape(watch_accessed_variables=False) as tape, keras.StatelessScope(mapping):
        tape.watch(values)
        losses = loss(y[None], model(x[None], training=True))
        own = tf.reduce_sum(losses) * tf.cast(loss_weight, losses.dtype)
    return _dense_gradients(tape.gradient(own, values, unconnected_gradients=tf.UnconnectedGradients.ZERO))


def _dense_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
    """All gradients as dense tensors. An embedding's comes as `IndexedSlices`."""
    return [
        _dense_rows(gradient) if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
        for gradient in gradients
    ]


def _dense_rows(gradient: tf.IndexedSlices) -> Tensor:
    """The dense tensor of an embedding's gradient. Indices outside the table add nothing.

    A GPU raises no exception for them, and vectorisation would count them as rows of another example.
    """
    inside = (gradient.indices >= 0) & (gradient.indices < tf.cast(gradient.dense_shape[0], gradient.indices.dtype))
    rows = tf.where(inside, gradient.indices, tf.zeros_like(gradient.indices))
    of_row = tf.reshape(inside, [-1] + [1] * (len(gradient.values.shape) - 1))
    values = tf.where(of_row, gradient.values, tf.zeros_like(gradient.values))
    return tf.convert_to_tensor(tf.IndexedSlices(values, rows, gradient.dense_shape))
