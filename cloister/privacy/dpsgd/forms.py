"""Representations of a layer's per-unit gradients, from its inputs and the gradients of its outputs.

A unit is an example, or a group of examples that are clipped together. Tensors of a call have a row for each example;
rows of one unit are adjacent. Examples of a group, and calls of a layer that is called more than once, are further
positions of one unit.

A dense layer's gradient at one position is the outer product of an input a and its delta d, so its norm is ‖a‖·‖d‖
(Goodfellow, 2015, arXiv:1510.01799). At T positions it is Σ_t a_t d_tᵀ, with squared norm Σ_{s,t} (a_s·a_t)(d_s·d_t)
(Li et al., 2022, arXiv:2110.05679, §4). Either way the clipped sum is one product of matrices, of deltas scaled first.
An embedding is a dense layer whose inputs are one-hot: a_s·a_t is 1 where two indices are equal. A convolution is a
dense layer at each position of its output, whose inputs are the patch of numbers that the kernel covers there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from cloister.privacy.dpsgd.noise import MASS_PER_NORM, MAX_POSITIONS, UNDERFLOW, UNIT
from cloister.privacy.dpsgd.tracing import (
    Call,
    NotCapturable,
    is_plain_convolution,
    is_plain_dense,
    is_plain_einsum,
)
from cloister.utils.arrays import Layer, Tensor

WIDEST = 4096
"""Most squares that are summed in float32 before double precision takes over."""
PART = 512
"""Most squares if an axis is longer than `WIDEST` and is cut: each summand increases the overstatement a little."""
GRAM_COST = 3
"""Cost of a multiplication of the Gram form, in double precision, relative to one of the ordinary form."""
MAX_PAIRS = 1 << 24
"""Most pairs of positions in a call of an embedding: each takes some 25 bytes."""
FEW_CHANNELS = 3
"""Most channels of a picture whose patches a convolution copies faster than a gather."""
SMALL_PATCH = 100
"""Most numbers of such a patch: the convolution multiplies each by all of them."""


@dataclass(frozen=True)
class Rows:
    """Shape of a call.

    Attributes:
        units: U > 0.
        each: rows per unit, > 0.
    """

    units: int
    each: int = 1

    @property
    def count(self) -> int:
        """Return the total number of rows."""
        return self.units * self.each

    def summed(self, tensor: Tensor) -> Tensor:
        """Return a tensor of shape (rows, ...), summed over the rows of each unit: (U, ...)."""
        if self.each == 1:
            return tensor
        return tf.reduce_sum(tf.reshape(tensor, [self.units, self.each, *tensor.shape[1:]]), axis=1)

    def by_position(self, tensor: Tensor, axes: int = 1) -> Tensor:
        """Return a tensor of shape (rows, ..., *last axes) as (U, T, *last axes), given the number of these axes.

        Raises:
            NotCapturable: the tensor does not have an example in each row.
        """
        if tensor.shape[0] != self.count:
            raise NotCapturable("a layer whose inputs do not have an example in each row")
        return tf.reshape(tensor, [self.units, -1, *tensor.shape[tensor.shape.rank - axes :]])


class Part(Protocol):
    """Gradients of each of U units with respect to some of the variables.

    Attributes:
        kernel: the name of their form.
        held: tensors of leading size U from which all results are computed.
        holds_gradients: whether `held` are the gradients, so usually larger than a sum of them.
    """

    kernel: str
    held: Sequence[Tensor]
    holds_gradients: bool

    def squared_norms(self) -> Tensor:
        """Return upper bounds of the units' squared L2 norms, shape (U,), double.

        Guarantee: its root also bounds the factor of γ in `noise`. If a gradient is not finite, neither is this.
        """

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Σ factors[i]·gradient[i] for every variable, in single or double precision.

        Args:
            held: of one or several calls: as `held`, but of any number n of units. Rows of units without a finite
                gradient are zeros, since 0·∞ is not 0.
            factors: shape (n,), double; 0 for each such unit.
        """


class PerUnit:
    """Gradients that are held separately: tensors of shape (U, *variable.shape).

    The bound applies to the held gradients, so it holds for any rounding in their computation. They are the sums of
    the given ones, shape (rows, *variable.shape), over the rows of each unit.
    """

    holds_gradients = True

    def __init__(self, kernel: str, gradients: Sequence[Tensor], rows: Rows) -> None:
        self.kernel = kernel
        self.held: Sequence[Tensor] = [rows.summed(gradient) for gradient in gradients]

    def squared_norms(self) -> Tensor:
        """Return upper bounds of the squared norms; see `Part`."""
        return tf.add_n([squares(gradient) for gradient in self.held])

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Σ factors[i]·gradient[i] for every variable; see `Part`."""
        sums = []
        for gradient in held:
            own = tf.cast(factors, gradient.dtype)
            if gradient.shape[0] == 1:
                sums.append(gradient[0] * own[0])  # as a product of matrices it took five times as long
                continue
            rows = tf.reshape(gradient, [-1, math.prod(gradient.shape[1:])])
            sums.append(tf.reshape(tf.matmul(own[None], rows), gradient.shape[1:]))
        return sums


def squares(tensor: Tensor) -> Tensor:
    """Return upper bounds of the sum of squares in each row, in double precision.

    Squares of float32 numbers are summed in float32, `WIDEST` at most: n of them are understated by less than 2nu,
    and by `UNDERFLOW` each if they are too small. Both errors are added. An overflow is infinite, so not finite.

    Returns:
        Shape (rows,).
    """
    size = math.prod(tensor.shape[1:])
    width = _width(tensor.shape[1:])
    wide = tf.cast(tensor, tf.float64) if width == 1 else tensor
    blocks = tf.reduce_sum(tf.square(tf.reshape(wide, [tensor.shape[0], -1, width])), axis=2)
    total = tf.reduce_sum(tf.cast(blocks, tf.float64), axis=1)
    return total * (1 + 2 * (width + 1) * UNIT) + size * UNDERFLOW


def _width(shape: Sequence[int]) -> int:
    """Return how many trailing entries `WIDEST` allows for: whole last axes, and an equal part of the next one."""
    width = 1
    for axis in reversed(shape):
        if width * axis > WIDEST:
            return width * max((part for part in range(1, PART // width + 1) if axis % part == 0), default=1)
        width *= axis
    return width


def rows_times(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return each row of a tensor of leading size U times its factor, of shape (U,)."""
    return tensor * tf.reshape(tf.cast(factors, tensor.dtype), [-1] + [1] * (len(tensor.shape) - 1))


def dense(layer: Layer, calls: Sequence[Call], rows: Rows) -> Part:
    """Return the cheapest form of a plain dense layer's gradients for the number of positions; see `Form`."""
    pairs = [tuple(map(rows.by_position, call.pair)) for call in calls]
    return _of_positions(pairs, bool(layer.use_bias))


def _of_positions(pairs: Sequence[tuple[Tensor, ...]], bias: bool) -> Part:
    """Return the cheapest form for Σ_t a_t d_tᵀ, and Σ_t d_t for the bias.

    Args:
        pairs: inputs and deltas of each call, of shapes (U, T, numbers in) and (U, T, numbers out).
        bias: whether the layer has a bias.
    """
    inputs, deltas = (tf.concat(same, axis=1) for same in zip(*pairs, strict=True))
    positions, fan_in, fan_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if positions == 1:
        return OuterProduct(inputs, deltas, bias)
    # The Gram form's bound holds up to `MAX_POSITIONS`.
    if positions <= MAX_POSITIONS and GRAM_COST * positions * (fan_in + fan_out) < fan_in * fan_out:
        return Gram(inputs, deltas, bias)
    gradients = [tf.matmul(inputs, deltas, transpose_a=True)]
    if bias:
        gradients.append(tf.reduce_sum(deltas, axis=1))
    return PerUnit("dense one by one", gradients, Rows(inputs.shape[0]))


class OuterProduct:
    """Form for one position per unit, without any per-unit tensor of the size of the weights.

    No positions can cancel, so the bound on the norm is that on the roundings of a sum in single precision too.
    """

    kernel = "dense"
    holds_gradients = False

    def __init__(self, inputs: Tensor, deltas: Tensor, bias: bool) -> None:
        self._inputs, self._deltas, self._bias = inputs, deltas, bias
        self.held: Sequence[Tensor] = (inputs, deltas)

    def squared_norms(self) -> Tensor:
        """Return (‖a‖² + 1)·‖d‖², the 1 for the bias."""
        return (squares(self._inputs) + float(self._bias)) * squares(self._deltas)

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Aᵀ(f·D), the ordinary gradient of scaled deltas, without units of factor 0; see `Part`."""
        counted = tf.where(factors > 0)[:, 0]
        inputs, deltas, own = (tf.gather(each, counted) for each in (*held, factors))
        inputs, deltas = _flat(inputs), _flat(rows_times(deltas, own))
        kernel = tf.matmul(inputs, deltas, transpose_a=True)
        return [kernel, tf.reduce_sum(deltas, axis=0)] if self._bias else [kernel]


class Gram(OuterProduct):
    """Form for several positions per unit, fewer than the weights have rows or columns.

    Positions can cancel each other. Then an underestimated norm would let a contribution exceed the bound, and so
    would the roundings of a sum whose terms are longer than their total. Both are computed in double precision, in
    which products of single-precision numbers are exact, and the total norm of the positions is added to the norm.
    """

    kernel = "dense gram"

    def __init__(self, inputs: Tensor, deltas: Tensor, bias: bool) -> None:
        super().__init__(tf.cast(inputs, tf.float64), tf.cast(deltas, tf.float64), bias)

    def squared_norms(self) -> Tensor:
        """Return Σ_{s,t} (a_s·a_t + 1)(d_s·d_t) + a part of (Σ_t ‖(a_t, 1)‖‖d_t‖)²."""
        return gram_squares(gram(self._inputs) + float(self._bias), gram(self._deltas))


def gram(tensor: Tensor) -> Tensor:
    """Return the products of all pairs of rows: (U, T, n) to (U, T, T), double."""
    return tf.matmul(tensor, tensor, transpose_b=True)


def gram_squares(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return upper bounds of the squared norms of Σ_t a_t d_tᵀ.

    They are also upper bounds of (Σ_t ‖a_t‖‖d_t‖ / `MASS_PER_NORM`)².

    Rounding reduces the sum of products by at most (n + T² + 2)·2⁻⁵² of the squared mass, n numbers in a and d: less
    than half of the added part.

    Args:
        inputs, deltas: the Gram matrices of a and of d, shape (U, T, T), in double precision.

    Returns:
        Shape (U,).
    """
    total = tf.reduce_sum(inputs * deltas, axis=(1, 2))
    mass = tf.reduce_sum(tf.sqrt(tf.linalg.diag_part(inputs) * tf.linalg.diag_part(deltas)), axis=1)
    # Rounding may make a zero negative.
    return tf.maximum(total, tf.zeros_like(total)) + tf.square(mass / MASS_PER_NORM)


def _flat(tensor: Tensor) -> Tensor:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])


class Einsum:
    """Form of a layer of `keras.layers.EinsumDense`, such as in attention: a dense layer on transposed tensors.

    The first letter of the equation stands for examples. Each further letter is in two of three terms:

        input and output    a position
        input and kernel    numbers in
        output and kernel   numbers out

    It is a `Form`.

    Raises:
        NotCapturable: the equation has another form, or the bias is not one for each number out.
    """

    def __init__(self, layer: Layer, calls: Sequence[Call], rows: Rows) -> None:
        given, self._kernel, made = layer.equation.replace(" ", "").replace("->", ",").split(",")
        positions = [letter for letter in made[1:] if letter in given]
        self._ins, self._outs = ([letter for letter in term[1:] if letter in self._kernel] for term in (given, made))
        self._bias = layer.bias
        orders = [given[0], *positions, *self._ins], [made[0], *positions, *self._outs]
        is_known = sorted(orders[0]) == sorted(given) and sorted(orders[1]) == sorted(made) and given[0] == made[0]
        if not is_known or sorted(self._ins + self._outs) != sorted(self._kernel) or "." in layer.equation:
            raise NotCapturable("an einsum of another kind than products of numbers in and numbers out")
        self._sizes = dict(zip(self._kernel, layer.kernel.shape, strict=True))
        if self._bias is not None and sorted(layer.bias_axes) != sorted(self._outs):
            raise NotCapturable("an einsum whose bias is not one for each number out")
        pairs = []
        for call in calls:
            turned = (
                tf.transpose(tensor, [term.index(letter) for letter in order])
                for tensor, term, order in zip(call.pair, (given, made), orders, strict=True)
            )
            axes = len(self._ins), len(self._outs)
            flat = [rows.by_position(each, own) for each, own in zip(turned, axes, strict=True)]
            pairs.append(tuple(tf.reshape(each, [*each.shape[:2], -1]) for each in flat))
        self._part = _of_positions(pairs, self._bias is not None)
        self.kernel, self.held = self._part.kernel, self._part.held
        self.holds_gradients = self._part.holds_gradients

    def squared_norms(self) -> Tensor:
        """Return upper bounds of the squared norms; see `Part`."""
        return self._part.squared_norms()

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Σ factors[i]·gradient[i] for every variable; see `Part`."""
        kernel, *bias = self._part.weighted_sum(held, factors)
        order = self._ins + self._outs
        apart = tf.reshape(kernel, [self._sizes[letter] for letter in order])
        turned = tf.transpose(apart, [order.index(letter) for letter in self._kernel])
        return [turned, *(tf.reshape(each, self._bias.shape) for each in bias)]


class Convolution:
    """Form of an ordinary convolution: a dense layer on the patches of its input.

    Raises:
        NotCapturable: a call does not have an example in each row.
    """

    def __init__(self, layer: Layer, calls: Sequence[Call], rows: Rows) -> None:
        self._shape = layer.kernel.shape
        pairs = [tuple(map(rows.by_position, (patches(layer, *call.pair), call.delta))) for call in calls]
        self._part = _of_positions(pairs, bool(layer.use_bias))
        self.kernel = self._part.kernel.replace("dense", "convolution")
        self.held, self.holds_gradients = self._part.held, self._part.holds_gradients

    def squared_norms(self) -> Tensor:
        """Return upper bounds of the squared norms; see `Part`."""
        return self._part.squared_norms()

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Σ factors[i]·gradient[i] for every variable; see `Part`."""
        kernel, *bias = self._part.weighted_sum(held, factors)
        return [tf.reshape(kernel, self._shape), *bias]


def convolution(layer: Layer, calls: Sequence[Call], rows: Rows) -> Part:
    """Return the form of any convolution; see `Form`."""
    if isinstance(layer, (keras.layers.Conv1D, keras.layers.Conv2D)):
        return Convolution(layer, calls, rows)
    per_call = [_of_units(layer, call, rows) for call in calls]
    gradients = [tf.add_n(same) for same in zip(*per_call, strict=True)]
    return PerUnit("convolution one by one", gradients, Rows(rows.units))


def _of_units(layer: Layer, call: Call, rows: Rows) -> list[Tensor]:
    """Return gradients of units for a call of a transposed, depthwise or separable convolution.

    A transposed one is the gradient of a convolution: inputs and deltas change places. A depthwise one has a product
    for each channel. A separable one is a depthwise one, then a dense layer at each position.
    """
    inputs, deltas = call.pair
    out = rows.by_position(deltas)
    if isinstance(layer, (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose)):
        covered = rows.by_position(patches(layer, deltas, inputs))
        kernels = [tf.matmul(covered, rows.by_position(inputs), transpose_a=True)]
    else:
        kernel, *rest = (tf.cast(weight, deltas.dtype) for weight in call.weights)
        taps, (channels, multiplier) = math.prod(layer.kernel_size), kernel.shape[-2:]
        covered = rows.by_position(patches(layer, inputs, deltas))
        covered = tf.reshape(covered, [*covered.shape[:2], taps, channels, 1])
        between, kernels = out, list[Tensor]()
        if isinstance(layer, (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)):
            depthwise = tf.reduce_sum(covered * tf.reshape(kernel, [taps, channels, multiplier]), axis=2)
            kernels = [tf.matmul(tf.reshape(depthwise, [*out.shape[:2], -1]), out, transpose_a=True)]
            between = tf.matmul(out, tf.reshape(rest[0], [channels * multiplier, -1]), transpose_b=True)
        between = tf.reshape(between, [*out.shape[:2], 1, channels, multiplier])
        kernels = [tf.reduce_sum(covered * between, axis=1), *kernels]
    gradients = [*kernels, tf.reduce_sum(out, axis=1)] if layer.use_bias else kernels
    pairs = zip(gradients, call.weights, strict=True)
    return [tf.reshape(gradient, [rows.units, *weight.shape]) for gradient, weight in pairs]


def patches(layer: Layer, inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return the numbers that the kernel of a convolution covers at each position of its output.

    Args:
        layer: any convolution, channels last.
        inputs, deltas: of a call, shapes (rows, *positions, channels).

    Returns:
        Shape (rows, *positions of the output, numbers in).
    """
    around, indices = [[0, 0]], np.zeros((1, 1), np.int32)
    sizes = zip(inputs.shape[1:-1], deltas.shape[1:-1], strict=True)
    windows = zip(layer.kernel_size, layer.strides, layer.dilation_rate, strict=True)
    for (size, positions), (taps, stride, dilation) in zip(sizes, windows, strict=True):
        more = max((positions - 1) * stride + (taps - 1) * dilation + 1 - size, 0)
        # Without padding none is needed. The odd one of `same` padding is behind.
        before = more if layer.padding == "causal" else more // 2
        around.append([before, more - before])
        own = np.arange(positions)[:, None] * stride + np.arange(taps) * dilation
        both = indices[:, None, :, None] * (size + more) + own[:, None, :]
        indices = both.reshape(len(indices) * positions, -1)
    padded, channels = tf.pad(inputs, [*around, [0, 0]]), inputs.shape[-1]
    numbers = math.prod(layer.kernel_size) * channels
    if channels <= FEW_CHANNELS and numbers <= SMALL_PATCH and max(layer.dilation_rate) == 1:
        kernel = tf.reshape(tf.eye(numbers, dtype=inputs.dtype), [*layer.kernel_size, channels, numbers])
        return tf.nn.convolution(padded, kernel, layer.strides, "VALID")
    flat = tf.reshape(padded, [inputs.shape[0], -1, channels])
    return tf.reshape(tf.gather(flat, tf.constant(indices), axis=1), [*deltas.shape[:-1], numbers])


def is_plain_embedding(layer: Layer) -> bool:
    """Return whether the layer looks up rows of one trained table."""
    trained = [id(variable) for variable in layer.trainable_variables]
    return type(layer) is keras.layers.Embedding and not layer.lora_enabled and trained == [id(layer._embeddings)]


class EmbeddingGradients:
    """Form of a table's gradients by unit, held as indices and deltas.

    Positions of one index can cancel, like positions of a dense layer. So norms and sums are in double precision.
    It is a `Form`.

    Raises:
        NotCapturable: there are too many pairs of positions, or a row is not of one example.
    """

    kernel = "embedding"
    holds_gradients = False

    def __init__(self, layer: Layer, calls: Sequence[Call], rows: Rows) -> None:
        size = layer.embeddings.shape[0]
        given = [rows.by_position(tf.cast(call.first_input, tf.int32), axes=0) for call in calls]
        # Keras counts negative indices from the end.
        indices = [tf.where(each < 0, each + size, each) for each in given]
        deltas = [rows.by_position(tf.cast(call.delta, tf.float64)) for call in calls]
        self._indices, self._deltas = tf.concat(indices, 1), tf.concat(deltas, 1)
        if self._indices.shape[1] > MAX_POSITIONS:
            raise NotCapturable("an embedding of this many positions")
        if rows.units * self._indices.shape[1] ** 2 > MAX_PAIRS:
            raise NotCapturable("an embedding whose pairs of positions take too much memory")
        self._size = size
        self.held: Sequence[Tensor] = (self._indices, self._deltas)

    def squared_norms(self) -> Tensor:
        """Return Σ d_s·d_t over pairs of one index + a part of the squared mass."""
        same = self._indices[:, :, None] == self._indices[:, None, :]
        return gram_squares(tf.cast(same, tf.float64), gram(self._deltas))

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return Σ factors[i]·gradient[i] for the table; see `Part`."""
        indices, deltas = held
        return [tf.math.unsorted_segment_sum(_flat(rows_times(deltas, factors)), tf.reshape(indices, [-1]), self._size)]


def is_plain_normalization(layer: Layer) -> bool:
    """Return whether the layer scales and shifts a normalization, all trained."""
    kinds = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)
    return type(layer) in kinds and len(layer.trainable_variables) == len(layer.weights)


def normalization(layer: Layer, calls: Sequence[Call], rows: Rows) -> Part:
    """Return Σ over positions of δ·x̂ for the scale, and of δ for the offset; see `Form`.

    Raises:
        NotCapturable: the layer scales another axis than the last.
    """
    variables, per_call = layer.trainable_variables, list[list[Tensor]]()
    for call in calls:
        inputs, deltas = call.pair
        if call.is_spread:
            raise NotCapturable("a normalization of something that is no example's")
        axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
        if axis not in (-1, inputs.shape.rank - 1) or any(len(variable.shape) != 1 for variable in variables):
            raise NotCapturable("a normalization that scales another axis than the last")
        neutral = [(each, tf.ones_like(each) if each is layer.gamma else tf.zeros_like(each)) for each in variables]
        with keras.StatelessScope(neutral):
            normalized = layer.call(inputs)
        every, both = Rows(rows.count), (deltas * normalized, deltas)
        of_scale, of_offset = (tf.reduce_sum(every.by_position(each), axis=1) for each in both)
        per_call.append([of_scale if variable is layer.gamma else of_offset for variable in variables])
    return PerUnit("normalization", [tf.add_n(same) for same in zip(*per_call, strict=True)], rows)


Form: TypeAlias = Callable[[Layer, Sequence[Call], Rows], Part]
"""Per-unit gradients of a layer, from its calls in one forward computation, and the shape of the model's call."""
FORMS: tuple[tuple[Callable[[Layer], bool], Form], ...] = (
    (is_plain_dense, dense),
    (is_plain_einsum, Einsum),
    (is_plain_convolution, convolution),
    (is_plain_embedding, EmbeddingGradients),
    (is_plain_normalization, normalization),
)
"""Pairs of a test for a kind of layer, and the form of its per-unit gradients."""


def form_of(layer: Layer) -> Form | None:
    """Return the form for a layer, or None if it has none."""
    return next((form for is_of_kind, form in FORMS if is_of_kind(layer)), None)
