"""A network of large pictures whose first layers are computed for one example after another.

Each row is an operation of its own, of the shape of one row: what comes out for an example does not depend on how many
there are, so a batch need not be filled up to a size for it. Each row has its own copy of the weights, too: the
ordinary gradient with respect to that is the row's. The operations of several rows run on as many cores as there are,
and take no longer than one operation on all rows.

TensorFlow rewrites graphs: it moves what is done to each number behind a `concat`, where the rows' numbers are computed
as one tensor, and its last numbers otherwise than the rest. So rows are taken apart and stacked, which nothing is moved
behind, and the first layers end with a pool or with `Flatten`.
"""

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property

import keras
import tensorflow as tf

from cloister.core.tensors import Compiled, Layer, Network, Tensor
from cloister.privacy.dpsgd.capture import is_plain_convolution
from cloister.privacy.dpsgd.convolution import choose
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows

Copies = list[list[Tensor]]
"""Of each row, a copy of each trainable variable of the first layers."""
BORDERS = (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D, keras.layers.Flatten)
"""Layers that the first ones may end with."""
OTHERS = (keras.layers.Activation, keras.layers.ReLU, keras.layers.Rescaling, keras.layers.ZeroPadding2D)
"""Layers without weights that may stand among them: none draws, or makes a mask."""


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
        values = [tf.convert_to_tensor(variable.value) for variable in self.variables]
        return [[tf.identity(value) for value in values] for _ in range(rows)]

    def outputs(self, x: Tensor, copies: Copies, count: int) -> Tensor:
        """Shape (count, ...). Behind x the other layers are given the first example again: what they do with another
        picture, such as raising an exception, would depend on how many examples there are.

        Args:
            x: at most `count` examples.
            copies: one for each of them.
            count: rows of the other layers.
        """
        rows = [self._of_one(tf.cast(x[i : i + 1], self._pixels.dtype), own) for i, own in enumerate(copies)]
        again = [tf.stop_gradient(rows[0])] * (count - len(rows))
        return _through(self._others, tf.stack([*rows, *again]))

    def part(self, gradients: Copies, rows: Rows) -> Part:
        """The first layers' gradients.

        Args:
            gradients: with respect to the copies.
            rows: which rows are a unit. Those behind the copies have no gradient: zero.
        """
        missing = rows.count - len(gradients)
        stacked = [tf.stack([*same, *[tf.zeros_like(same[0])] * missing]) for same in zip(*gradients, strict=True)]
        return PerUnit(self.kernel, stacked, rows)

    @cached_property
    def _of_one(self) -> Compiled:
        """Traced once for all rows of all graphs."""
        weights = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self.variables]
        compiled = tf.function(self._features, input_signature=[self._pixels, weights], autograph=False)
        return compiled.get_concrete_function()

    def _features(self, row: Tensor, own: Sequence[Tensor]) -> Tensor:
        with keras.StatelessScope(list(zip(self.variables, own, strict=True))):
            return _through(self.layers, row)[0]


def row_by_row(model: Network) -> RowByRow | None:
    """The model so computed; None if no convolution of large pictures is among its first layers.

    Args:
        model: built.
    """
    if type(model) is not keras.Sequential or not getattr(model, "inputs", None):
        return None
    length, large = 0, False
    for number, (layer, inputs, outputs) in enumerate(_leading(model)):
        large |= is_plain_convolution(layer) and choose(layer, inputs, outputs) == "loop"
        if large and type(layer) in BORDERS:
            length = number + 1
    return RowByRow(model, length) if length else None


def _leading(model: Network) -> Iterator[tuple[Layer, tuple[int, ...], tuple[int, ...]]]:
    """The layers that could be among the first ones, with the shapes of one example in and out."""
    shape = (1, *model.inputs[0].shape[1:])
    for layer in model.layers:
        if None in shape or not (is_plain_convolution(layer) or type(layer) in BORDERS + OTHERS):
            return
        inputs, shape = shape, tuple(layer.compute_output_shape(shape))
        yield layer, inputs, shape


def _through(layers: Sequence[Layer], tensor: Tensor) -> Tensor:
    """What comes out in training."""
    for layer in layers:
        # Of the type: `capture` puts another function in the place of a layer's own.
        takes = inspect.signature(type(layer).call).parameters
        tensor = layer(tensor, training=True) if "training" in takes else layer(tensor)
    return tensor
