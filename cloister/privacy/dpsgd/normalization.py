"""Per-unit gradients of the scale and the offset of a normalization of each example by itself."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from cloister.core.tensors import Layer, Tensor
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, NotCapturable
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows

KINDS = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)


def is_plain_normalization(layer: Layer) -> bool:
    """Return whether the layer scales and moves what it has normalized, all of it trained."""
    return type(layer) in KINDS and len(layer.trainable_variables) == len(layer.weights)


def normalization(captured: CapturedLayer, calls: Sequence[Call], rows: Rows) -> Part:
    """Return gradients held one by one: Σ over positions of δ·x̂ for the scale, and of δ for the offset.

    Args:
        captured: the layer, and its trainable variables.
        calls: of the layer in one forward computation.
        rows: which rows of a tensor belong to a unit.

    Raises:
        NotCapturable: the layer scales another axis than the last.
    """
    per_call = [_gradients(captured, call, rows) for call in calls]
    return PerUnit("normalization", [tf.add_n(same) for same in zip(*per_call, strict=True)], rows)


def _gradients(captured: CapturedLayer, call: Call, rows: Rows) -> list[Tensor]:
    layer, (inputs, deltas) = captured.layer, call.pair
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    if axis not in (-1, inputs.shape.rank - 1) or any(len(variable.shape) != 1 for variable in captured.variables):
        raise NotCapturable("a normalization that scales another axis than the last")
    if inputs.shape[0] != rows.count:
        raise NotCapturable("a normalization's inputs do not have an example in each row")
    unscaled = [(variable, tf.ones_like(variable)) for variable in captured.variables if variable is layer.gamma]
    unmoved = [(variable, tf.zeros_like(variable)) for variable in captured.variables if variable is layer.beta]
    with keras.StatelessScope([*unscaled, *unmoved]):
        normalized = layer.call(inputs)
    by_row = [tf.reshape(each, [rows.count, -1, each.shape[-1]]) for each in (deltas * normalized, deltas)]
    of_scale, of_offset = (tf.reduce_sum(each, axis=1) for each in by_row)
    return [of_scale if variable is layer.gamma else of_offset for variable in captured.variables]
