"""A network of large pictures whose first layers are computed for one example after another.

What comes out for an example then does not depend on how many there are, so a batch need not be filled up to a size
for it. Each row has its own copy of the weights: the ordinary gradient with respect to that is the row's. The copies of
the operations run on as many cores as there are, and take no longer than one operation on all rows.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property

import keras
import tensorflow as tf

from cloister.core.tensors import Compiled, Layer, Network, Tensor
from cloister.privacy.dpsgd.capture import is_plain_convolution
from cloister.privacy.dpsgd.convolution import choose
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows

Copies = list[list[Tensor]]
"""Of each row, a copy of each trainable variable of the first layers."""


class RowByRow:
    """A model as a chain of layers.

    Args:
        model: a plain `keras.Sequential`.
        length: how many of its layers take one row after another.

    Attributes:
        layers: those.
        variables: their trainable variables.
        kernel: the name of the form in which their gradients are held.
    """

    kernel = "row by row"

    def __init__(self, model: Network, length: int) -> None:
        self._pixels = tf.TensorSpec([1, *model.inputs[0].shape[1:]], model.inputs[0].dtype)
        self.layers, self._others = model.layers[:length], model.layers[length:]
        self.variables = tuple(variable for layer in self.layers for variable in layer.trainable_variables)

    def copies(self, rows: int) -> Copies:
        """The weights of the first layers, for each row.

        Args:
            rows: how many.
        """
        return [[tf.identity(variable.value) for variable in self.variables] for _ in range(rows)]

    def outputs(self, x: Tensor, copies: Copies, count: int) -> Tensor:
        """Shape (count, ...): zeros stand behind x where the other layers begin.

        Args:
            x: at most `count` examples.
            copies: one for each of them.
            count: rows of the other layers.
        """
        rows = [self._of_one(tf.cast(x[i : i + 1], self._pixels.dtype), own) for i, own in enumerate(copies)]
        return _through(self._others, _filled(tf.concat(rows, axis=0), count))

    def part(self, gradients: Copies, rows: Rows) -> Part:
        """The first layers' gradients.

        Args:
            gradients: with respect to the copies.
            rows: which rows are a unit. Those behind the copies have no gradient: zero.
        """
        stacked = [_filled(tf.stack(same), rows.count) for same in zip(*gradients, strict=True)]
        return PerUnit(self.kernel, stacked, rows)

    @cached_property
    def _of_one(self) -> Compiled:
        """Traced once for all rows of all graphs."""
        weights = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self.variables]
        compiled = tf.function(self._features, input_signature=[self._pixels, weights], autograph=False)
        return compiled.get_concrete_function()

    def _features(self, row: Tensor, own: Sequence[Tensor]) -> Tensor:
        with keras.StatelessScope(list(zip(self.variables, own, strict=True))):
            return _through(self.layers, row)


def row_by_row(model: Network) -> RowByRow | None:
    """The model so computed, up to the last convolution of large pictures in front; None: there is none.

    Args:
        model: built.
    """
    if type(model) is not keras.Sequential:
        return None
    length = 0
    for number, layer in enumerate(model.layers):
        if layer.variables and not is_plain_convolution(layer):
            break
        # Pools behind the last convolution go with it.
        if _is_large(layer) or (length == number and number and not layer.variables):
            length = number + 1
    return RowByRow(model, length) if length else None


def _is_large(layer: Layer) -> bool:
    """Whether one picture keeps all cores busy."""
    if not is_plain_convolution(layer):
        return False
    inputs, outputs = ((1, *tensor.shape[1:]) for tensor in (layer.input, layer.output))
    return None not in (*inputs, *outputs) and choose(layer, inputs, outputs) == "loop"


def _through(layers: Sequence[Layer], tensor: Tensor) -> Tensor:
    """What comes out in training."""
    for layer in layers:
        # Of the type: `capture` puts another function in the place of a layer's own.
        takes = inspect.signature(type(layer).call).parameters
        tensor = layer(tensor, training=True) if "training" in takes else layer(tensor)
    return tensor


def _filled(tensor: Tensor, count: int) -> Tensor:
    """With zeros behind it up to `count` rows."""
    missing = count - tensor.shape[0]
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (len(tensor.shape) - 1)) if missing else tensor
