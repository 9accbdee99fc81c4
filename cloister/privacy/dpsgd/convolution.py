"""Per-unit gradients of a two-dimensional convolution.

An example's kernel gradient costs as many multiplications as its share of the ordinary one; what differs is how well a
processor is used. With T positions of the output, k×k taps, c channels in and o out:

    gram     products of patches, where T is so small beside k²·c·o that the kernel gradient itself is the larger thing
    one-hot  patches by a convolution with a kernel of ones and zeros: few channels and few taps
    loop     the ordinary gradient of one example after another: large images, few examples
    gather   patches by one gather of positions, and one product of matrices an example: all else

`tf.image.extract_patches` takes longer than any of them; so does a product of matrices for each tap.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from cloister.core.tensors import Layer, Tensor
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, NotCapturable
from cloister.privacy.dpsgd.dense import gram, gram_is_cheaper, gram_squares
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows, rows_times

LARGE_OUTPUT = 700
"""Positions from which one example keeps both cores busy."""
FEW_CHANNELS = 3
FEW_INPUTS = 100
"""Taps times channels up to which a convolution makes patches faster than a gather does."""
MANY_EXAMPLES = 64
"""Copies of an operation in the graph above which it takes too long to compile."""
KERNELS = ("gram", "one-hot", "loop", "gather")


def convolution(captured: CapturedLayer, calls: Sequence[Call], rows: Rows) -> Part:
    """The form that `choose` names; several calls of one layer add up.

    Args:
        captured: the layer, and its trainable variables.
        calls: of the layer in one forward computation.
        rows: how many rows of a tensor belong to a unit, and how many units there are.
    """
    layer, pairs = captured.layer, [call.pair for call in calls]
    if any(inputs.shape[0] != rows.count for inputs, _ in pairs):
        raise NotCapturable("a convolution's inputs do not have an example in each row")
    names = [choose(layer, inputs.shape, deltas.shape, rows.each) for inputs, deltas in pairs]
    if names == ["gram"]:
        return Gram(layer, *pairs[0], rows)
    # Several calls add up as gradients, which the Gram form never makes.
    names = ["gather" if name == "gram" else name for name in names]
    return held(layer, [(name, *pair) for name, pair in zip(names, pairs, strict=True)], rows)


def choose(layer: Layer, inputs: Sequence[int], deltas: Sequence[int], each: int = 1) -> str:
    """The form for these shapes, (rows, height, width, channels) in and out, and so many rows of each unit.

    The limits are measured, on two cores.

    Args:
        layer: the convolution.
        inputs, deltas: shapes of what goes in, and of the gradient of what comes out.
        each: rows of a unit.
    """
    batch, positions, taps = inputs[0], deltas[1] * deltas[2], math.prod(layer.kernel_size)
    channels, filters = inputs[3], deltas[3]
    if gram_is_cheaper(each * positions, taps * channels, filters):
        return "gram"
    # The ordinary gradient of a dilated convolution does not run on every processor.
    can_loop = batch <= MANY_EXAMPLES and max(layer.dilation_rate) == 1
    is_small = channels <= FEW_CHANNELS and taps * channels <= FEW_INPUTS and max(layer.dilation_rate) == 1
    if is_small and (positions < 4 * LARGE_OUTPUT or not can_loop):
        return "one-hot"
    return "loop" if can_loop and positions >= LARGE_OUTPUT else "gather"


def held(layer: Layer, named: Sequence[tuple[str, Tensor, Tensor]], rows: Rows) -> Part:
    """Kernel gradients held one by one, computed for each call in the form it names.

    Args:
        layer: the convolution.
        named: for each call the name of a form, its inputs and its deltas.
        rows: of the units.
    """
    forms = {"one-hot": _by_one_hot, "loop": _one_after_another, "gather": _by_gather}
    kernels = tf.add_n([forms[name](layer, inputs, deltas) for name, inputs, deltas in named])
    gradients = [kernels]
    if layer.use_bias:
        gradients.append(tf.add_n([tf.reduce_sum(_positions(deltas), axis=1) for _, _, deltas in named]))
    return PerUnit(" + ".join(name for name, _, _ in named), gradients, rows)


class Gram:
    """Kernel gradients that are never made: norms come from products of patches, all of it in double precision.

    Patches can cancel as positions of a dense layer can, and for the same reasons.
    """

    kernel = "gram"

    def __init__(self, layer: Layer, inputs: Tensor, deltas: Tensor, rows: Rows) -> None:
        self._layer, self._rows = layer, rows
        self._inputs, self._deltas = tf.cast(inputs, tf.float64), tf.cast(deltas, tf.float64)
        self.held: Sequence[Tensor] = (rows.by_unit(self._inputs), rows.by_unit(self._deltas))

    def squared_norms(self) -> Tensor:
        """Σ_{s,t} (patch_s·patch_t + 1)(d_s·d_t), the 1 being the bias, and a part of the squared mass."""
        padded = _padded(self._layer, self._inputs, self._deltas)
        taps = [_tap(self._layer, padded, self._deltas, u, v) for u, v in _taps(self._layer)]
        patches = tf.add_n([gram(self._of_units(tap)) for tap in taps]) + float(self._layer.use_bias)
        return gram_squares(patches, gram(self._of_units(self._deltas)))

    def weighted_sum(self, factors: Tensor, clean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The ordinary gradient, of deltas scaled first; tap by tap, since a dilated one has no other.

        Args:
            factors: of each unit, shape (U,).
            clean: puts zeros where a unit's numbers are not finite.
        """
        inputs = self._flat(clean(self._rows.by_unit(self._inputs)))
        deltas = self._flat(rows_times(clean(self._rows.by_unit(self._deltas)), factors))
        padded, flat = _padded(self._layer, inputs, deltas), tf.reshape(deltas, [-1, deltas.shape[3]])
        taps = [_tap(self._layer, padded, deltas, u, v) for u, v in _taps(self._layer)]
        products = [tf.matmul(tf.reshape(tap, [-1, tap.shape[3]]), flat, transpose_a=True) for tap in taps]
        kernel = tf.reshape(tf.stack(products), [*self._layer.kernel_size, inputs.shape[3], deltas.shape[3]])
        return [kernel, tf.reduce_sum(flat, axis=0)] if self._layer.use_bias else [kernel]

    def _of_units(self, tensor: Tensor) -> Tensor:
        """(rows, height, width, channels) as (U, T, channels)."""
        return tf.reshape(tensor, [self._rows.units, -1, tensor.shape[3]])

    def _flat(self, tensor: Tensor) -> Tensor:
        """(U, rows of a unit, ...) as (rows, ...)."""
        return tf.reshape(tensor, [self._rows.count, *tensor.shape[2:]])


def _one_after_another(layer: Layer, inputs: Tensor, deltas: Tensor) -> Tensor:
    """Shape (B, k, k, c, o). The copies of the operation run on as many cores as there are."""
    shape = [*layer.kernel_size, inputs.shape[3], deltas.shape[3]]
    gradients = [
        tf.raw_ops.Conv2DBackpropFilter(
            input=inputs[i : i + 1],
            filter_sizes=shape,
            out_backprop=deltas[i : i + 1],
            strides=[1, *layer.strides, 1],
            padding=layer.padding.upper(),
        )
        for i in range(inputs.shape[0])
    ]
    return tf.stack(gradients)


def _by_gather(layer: Layer, inputs: Tensor, deltas: Tensor) -> Tensor:
    """Shape (B, k, k, c, o): the patches that one gather of positions makes, times the deltas."""
    padded = _padded(layer, inputs, deltas)
    height, width, channels = padded.shape[1:]
    down, across = (
        np.arange(out)[:, None] * stride + np.arange(taps) * dilation
        for out, stride, taps, dilation in zip(
            deltas.shape[1:3], layer.strides, layer.kernel_size, layer.dilation_rate, strict=True
        )
    )
    places = down[:, None, :, None] * width + across[None, :, None, :]
    places = places.reshape(len(down) * len(across), -1).astype(np.int32)
    pixels = tf.reshape(padded, [padded.shape[0], height * width, channels])
    return _of_patches(layer, tf.gather(pixels, tf.constant(places), axis=1), inputs, deltas)


def _by_one_hot(layer: Layer, inputs: Tensor, deltas: Tensor) -> Tensor:
    """Shape (B, k, k, c, o): the patches that a convolution with ones and zeros makes, times the deltas."""
    numbers = math.prod(layer.kernel_size) * inputs.shape[3]
    kernel = tf.reshape(tf.eye(numbers, dtype=inputs.dtype), [*layer.kernel_size, inputs.shape[3], numbers])
    patches = tf.nn.conv2d(inputs, kernel, layer.strides, layer.padding.upper(), dilations=layer.dilation_rate)
    return _of_patches(layer, patches, inputs, deltas)


def _of_patches(layer: Layer, patches: Tensor, inputs: Tensor, deltas: Tensor) -> Tensor:
    flat = _positions(deltas)
    patches = tf.reshape(patches, [inputs.shape[0], flat.shape[1], -1])
    return tf.reshape(tf.matmul(patches, flat, transpose_a=True), _kernels_shape(layer, inputs, deltas))


def _padded(layer: Layer, inputs: Tensor, deltas: Tensor) -> Tensor:
    """The inputs with the zeros that `same` padding puts around them: the odd one after, as TensorFlow does."""
    if layer.padding != "same":
        return inputs
    around = [[0, 0]]
    for size, out, k, stride, dilation in zip(
        inputs.shape[1:3], deltas.shape[1:3], layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        total = max((out - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        around.append([total // 2, total - total // 2])
    return tf.pad(inputs, [*around, [0, 0]])


def _tap(layer: Layer, padded: Tensor, deltas: Tensor, row: int, column: int) -> Tensor:
    """What tap (row, column) of the kernel meets at every position of the output: shape (B, height, width, c)."""
    spans = []
    for tap, out, stride, dilation in zip(
        (row, column), deltas.shape[1:3], layer.strides, layer.dilation_rate, strict=True
    ):
        start = tap * dilation
        spans.append(slice(start, start + (out - 1) * stride + 1, stride))
    return padded[:, spans[0], spans[1], :]


def _taps(layer: Layer) -> list[tuple[int, int]]:
    rows, columns = layer.kernel_size
    return [(u, v) for u in range(rows) for v in range(columns)]


def _positions(tensor: Tensor) -> Tensor:
    """(B, height, width, channels) as (B, T, channels)."""
    return tf.reshape(tensor, [tensor.shape[0], -1, tensor.shape[3]])


def _kernels_shape(layer: Layer, inputs: Tensor, deltas: Tensor) -> list[int]:
    return [inputs.shape[0], *layer.kernel_size, inputs.shape[3], deltas.shape[3]]
