"""The clipped sum of a microbatch's per-unit gradients, as one computation of fixed shape."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network, Tensor, Variable
from cloister.privacy.dpsgd import vectorised
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, captured_layers, is_plain_dense, record
from cloister.privacy.dpsgd.convolution import MANY_EXAMPLES, convolution
from cloister.privacy.dpsgd.dense import dense
from cloister.privacy.dpsgd.parts import Part, Rows, fingerprints
from cloister.privacy.dpsgd.rounding import SMALLEST_FACTOR
from cloister.privacy.dpsgd.row_by_row import RowByRow, row_by_row
from cloister.privacy.dpsgd.trial_calls import CallMode, shared_draws, with_random_deltas
from cloister.privacy.dpsgd.vectorised import Loss

ROOT = 1 + 2.0**-40
"""Makes up for roundings of a root, and of the sum of a few squares under it, in double precision."""

VariablesPart = tuple[tuple[Variable, ...], Part]
"""Variables and their per-unit gradients."""


class Clipped(NamedTuple):
    """What a call of a graph gives. Nothing of it is noised.

    Attributes:
        sums: for each trainable variable.
        clipped: how many units were scaled down.
        non_finite: how many had no finite gradient, and contributed zero.
        norms: of all units, shape (U,), double.
        fingerprints: of what is held of each unit, shape (U,), int32; zeros in training.
    """

    sums: list[Tensor]
    clipped: Tensor
    non_finite: Tensor
    norms: Tensor
    fingerprints: Tensor


class Gradients:
    """Per-unit gradients of a model with respect to all its trainable variables.

    Args:
        model: a built Keras model of one input and one output.
        loss: of each example by itself.
        by_layer: look at layers one by one, in one backward pass; otherwise at the model as a whole.
        by_row: compute the first layers of a network of large pictures for one example after another; with `by_layer`.
        one_at_a_time: whether one unit is computed at a time.

    Raises:
        NotCapturable: `by_layer`, and this model's layers cannot be looked at one by one.
    """

    def __init__(
        self, model: Network, loss: Loss, by_layer: bool, by_row: bool = False, one_at_a_time: bool = False
    ) -> None:
        self.model = model
        self.by_layer = by_layer
        self.one_at_a_time = one_at_a_time
        self._loss = loss
        self.layers: list[CapturedLayer] = captured_layers(model) if by_layer else []
        self._row_by_row = row_by_row(model) if by_row else None
        self.kernels: dict[str, str] = {}

    def first_layers(self, rows: Rows) -> RowByRow | None:
        """What computes the first layers of a microbatch for one example after another; None: nothing does.

        Args:
            rows: of the microbatch.
        """
        return self._row_by_row if rows.count <= MANY_EXAMPLES else None

    @property
    def by_row(self) -> bool:
        """Whether first layers are computed for one example after another."""
        return self._row_by_row is not None

    def without_rows(self) -> "Gradients":
        """The same, with all layers computed for all examples of a microbatch together."""
        return Gradients(self.model, self._loss, self.by_layer, one_at_a_time=self.one_at_a_time)

    def losses(self, x: Tensor, y: Tensor, training: bool = True) -> Tensor:
        """Shape (batch,), as in training.

        Args:
            x, y: a batch of examples.
            training: whether random layers draw.

        Raises:
            ConfigError: the loss function gives something else.
        """
        return self._of_outputs(self.model(x, training=training), y)

    def _of_outputs(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = self._loss(y, outputs)
        if losses.shape != y.shape[:1]:
            raise ConfigError(f"loss must give one number per example, shape {tuple(y.shape[:1])}; got {losses.shape}")
        return losses

    def parts(self, x: Tensor, y: Tensor, rows: Rows, loss_weights: Tensor, mode: Tensor) -> list[VariablesPart]:
        """Variables and their per-unit gradients; variables that the loss does not need are left out.

        Args:
            x: examples, those of a unit next to each other. There may be fewer than rows where `first_layers` takes
                one after another.
            y: a label in each row.
            rows: which examples are a unit.
            loss_weights: shape (rows,), double: what each example's loss is multiplied with.
            mode: a `CallMode`, scalar.

        Raises:
            NotCapturable: a layer is given something that does not have an example in each row.
            ConfigError: the loss function gives something else than a number for each example.
        """
        if self.by_layer:
            return self._parts_by_layer(x, y, rows, loss_weights, mode)
        part = vectorised.whole_model(self.model, self._loss, x, y, rows, loss_weights, mode)
        return [(tuple(self.model.trainable_variables), part)]

    def _parts_by_layer(
        self, x: Tensor, y: Tensor, rows: Rows, loss_weights: Tensor, mode: Tensor
    ) -> list[VariablesPart]:
        first = self.first_layers(rows)
        copies = first.copies(x.shape[0]) if first else []
        layers = [captured for captured in self.layers if not (first and captured.layer in first.layers)]

        def forward() -> Tensor:
            with shared_draws(self.model, mode):
                outputs = first.outputs(x, copies, rows.count) if first else self.model(x, training=True)
            losses = self._of_outputs(outputs, y)
            return losses * tf.cast(loss_weights, losses.dtype)

        calls, of_copies = record(layers, forward, copies)
        _try_random_deltas(calls, mode)
        found = [
            (captured, _part(captured, own, rows))
            for captured, own in zip(layers, map(_needed, calls), strict=True)
            if own
        ]
        self.kernels = {captured.layer.path: part.kernel for captured, part in found}
        parts: list[VariablesPart] = [(captured.variables, part) for captured, part in found]
        if first:
            self.kernels |= dict.fromkeys((layer.path for layer in first.layers if layer.variables), first.kernel)
            parts.append((first.variables, first.part(of_copies, rows)))
        return parts

    def clipped(self, x: Tensor, y: Tensor, loss_weights: Tensor, mask: Tensor, bound: Tensor, mode: Tensor) -> Clipped:
        """Σ over the units of gradient·min(1, bound/‖gradient‖), a unit's gradient being the mean of its examples'.

        Norms are overstated by what roundings may have taken from them. A unit whose gradient, or the square of its
        norm, is not finite contributes zero.

        Args:
            x, y: U·cap examples, those of a unit next to each other.
            loss_weights: shape (U·cap,), double: what each example's loss is multiplied with.
            mask: shape (U, cap), False for padding: of what stands there nothing reaches the sums. An empty unit
                counts for nothing.
            bound: above 0, double.
            mode: a `CallMode`, scalar.
        """
        rows, real = Rows(*mask.shape), tf.reduce_any(mask, axis=1)
        parts = self.parts(x, y, rows, loss_weights if rows.each == 1 else loss_weights * _shares(mask), mode)
        total = tf.add_n([part.squared_norms() for _, part in parts])
        finite = tf.math.is_finite(total)
        norms = tf.sqrt(total) * ROOT
        # Divided by the larger of the two: a norm of 0 is nothing to divide by.
        factors = tf.where(finite & real, bound / tf.maximum(norms, bound), tf.zeros_like(norms))
        factors = tf.where(factors < SMALLEST_FACTOR, tf.zeros_like(factors), factors)
        sums = self._sums(parts, factors, finite)
        clipped = tf.math.count_nonzero(finite & real & (norms > bound))
        held = [tensor for _, part in parts for tensor in part.held]
        found = tf.cond(mode == CallMode.TRAINING, lambda: tf.zeros(rows.units, tf.int32), lambda: fingerprints(held))
        return Clipped(sums, clipped, tf.math.count_nonzero(real & ~finite), norms, found)

    def weighted(self, x: Tensor, y: Tensor, factors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Squared norms of examples, shape (B,), and Σ factors[i]·gradient[i], without any bound.

        Args:
            x, y: a batch of B examples.
            factors: of each, shape (B,), double.
        """
        parts = self.parts(x, y, Rows(x.shape[0]), tf.ones_like(factors), tf.constant(CallMode.TRAINING))
        total = tf.add_n([part.squared_norms() for _, part in parts])
        return total, self._sums(parts, factors, tf.math.is_finite(total))

    def _sums(self, parts: list[VariablesPart], factors: Tensor, finite: Tensor) -> list[Tensor]:
        sums = {
            id(variable): total
            for variables, part in parts
            for variable, total in zip(variables, part.weighted_sum(factors, cleaner(finite)), strict=True)
        }
        return [
            sums[id(variable)] if id(variable) in sums else tf.zeros(variable.shape, variable.dtype)
            for variable in self.model.trainable_variables
        ]


def _try_random_deltas(calls: list[list[Call]], mode: Tensor) -> None:
    for number, call in enumerate(itertools.chain.from_iterable(calls)):
        call.deltas = [None if delta is None else with_random_deltas(delta, mode, number) for delta in call.deltas]


def _needed(calls: list[Call]) -> list[Call]:
    """Those that the loss depends on. The others have no gradient."""
    return [call for call in calls if any(delta is not None for delta in call.deltas)]


def cleaner(finite: Tensor) -> Callable[[Tensor], Tensor]:
    """What puts zeros in the place of the rows of a tensor that are not marked, shape (U,)."""
    all_finite = tf.reduce_all(finite)

    def clean(tensor: Tensor) -> Tensor:
        """Looked at only when something is not finite: it takes a pass over the memory."""
        rows = tf.reshape(finite, [-1] + [1] * (len(tensor.shape) - 1))
        return tf.cond(all_finite, lambda: tensor, lambda: tf.where(rows, tensor, tf.zeros_like(tensor)))

    return clean


def _shares(mask: Tensor) -> Tensor:
    """Shape (U·cap,), double: one part of its unit's examples for each, 0 for padding."""
    counted = tf.cast(mask, tf.float64)
    # An empty unit has no examples to divide by; its share is 0 all the same.
    return tf.reshape(counted / tf.maximum(tf.reduce_sum(counted, axis=1, keepdims=True), 1.0), [-1])


def _part(captured: CapturedLayer, calls: list[Call], rows: Rows) -> Part:
    if not captured.fast:
        return vectorised.layer(captured, calls, rows)
    return dense(captured, calls, rows) if is_plain_dense(captured.layer) else convolution(captured, calls, rows)
