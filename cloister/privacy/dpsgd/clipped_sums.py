"""The clipped sum of a batch of any size.

A model whose graph is proved to keep units apart, and whose units come out alike at every place, is computed in rows
(`in_rows`): many units in a call of fixed shape. Any other model is computed in turn (`in_turn`): one unit after
another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network
from cloister.privacy.dpsgd.batches import Members, pieces
from cloister.privacy.dpsgd.checks import checked
from cloister.privacy.dpsgd.draws import Seeds
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.in_rows import InRows
from cloister.privacy.dpsgd.in_turn import InTurn
from cloister.privacy.dpsgd.losses import Loss, LossWeights
from cloister.privacy.dpsgd.parts import Sums
from cloister.privacy.dpsgd.precision import refuse_coarse_precision
from cloister.privacy.dpsgd.probe import Probe
from cloister.privacy.dpsgd.refusals import refusing_what_cannot_be_computed
from cloister.privacy.dpsgd.rounding import Batching, check_clipping_norm, examples_at_once
from cloister.privacy.dpsgd.running_sum import RunningSum
from cloister.privacy.dpsgd.strides import stride


@dataclass(frozen=True)
class ClippedSum:
    """Un-noised, and so not for release.

    Attributes:
        sums: a float array for each trainable variable, in the model's order.
        examples: how many units took part: examples, or groups of them.
        clipped: how many were scaled down to the bound.
        non_finite: how many had no finite gradient, or none at all, and contributed zero.
    """

    sums: tuple[NDArray, ...]
    examples: int
    clipped: int
    non_finite: int


class ClippedSums:
    """Clipped sums of batches of a model's examples.

    Args:
        model: built, of one input and one output.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of a few made-up examples.
        batching: B, the units of a call, and the most examples of a unit.
        loss_weights: as in `InRows`.

    Attributes:
        engine: what computes the units.
        seeds: of random layers.

    Guarantee: one unit's joining or leaving a batch moves the sum by at most S in L2, for any weights and inputs, as
        `rounding` proves. In rows, that takes what `InRows` says: for models that draw random numbers, it holds given
        the numbers that each unit draws.

    Raises:
        UnsupportedModel: the model cannot be trained with DP-SGD, with the reason and the replacement.
        ConfigError: `loss_weights` give something else than a number for each label, or one for all.
    """

    def __init__(
        self, model: Network, loss: Loss, probe: Probe, batching: Batching, loss_weights: LossWeights | None = None
    ) -> None:
        if loss_weights is not None:
            _check_loss_weights(loss_weights, probe[1])
        self._model, self._batching, self._cap = model, batching, batching.group_cap
        self.seeds = Seeds()
        with refusing_what_cannot_be_computed():
            self.engine = _engine(model, loss, probe, batching, loss_weights)

    def of(self, x: NDArray, y: NDArray, clipping_norm: float, groups: NDArray | None = None) -> ClippedSum:
        """Σ gradient·min(1, S/‖gradient‖) over the units of a batch, with S/(1 + η) in the place of S.

        Args:
            x, y: n examples.
            clipping_norm: S.
            groups: shape (n,): examples with the same value are one unit. None: each is one.

        Raises:
            ConfigError: S is out of range, lengths differ, groups are missing, or products became coarser than float32.
        """
        check_clipping_norm(clipping_norm)
        refuse_coarse_precision()
        units = self._units(x, y, groups)
        total = RunningSum()
        clipped, non_finite, bound = 0, 0, clipping_norm / (1 + self.engine.overstatement)
        for piece in pieces(len(units), self._units_at_once(len(units))):
            for found in self._computed(x, y, *units.table(piece, self._cap), bound):
                total.add(found.arrays, before=piece.start)
                clipped, non_finite = clipped + found.clipped, non_finite + found.non_finite
        return ClippedSum(total.value() or tuple(self._nothing()), len(units), clipped, non_finite)

    def _nothing(self) -> list[NDArray]:
        variables = self._model.trainable_variables
        return [np.zeros(variable.shape, variable.dtype) for variable in variables]

    def _units(self, x: NDArray, y: NDArray, groups: NDArray | None) -> Members:
        if len(x) != len(y) or (groups is not None and len(groups) != len(x)):
            raise ConfigError(f"x, y and groups must have one length, got {len(x)} and {len(y)}")
        if groups is None and self._cap > 1:
            raise ConfigError(f"groups must be given where group_cap is {self._cap}")
        return Members(np.arange(len(x)) if groups is None else groups)

    def _units_at_once(self, count: int) -> int:
        if isinstance(self.engine, InTurn):
            return self.engine.places
        return examples_at_once(count, self._batching.batch_size, self._batching.at_once)

    def _computed(self, x: NDArray, y: NDArray, table: NDArray, mask: NDArray, bound: float) -> Iterator[Sums]:
        """Sums and counts. Where a unit's computation raises an exception, the others contribute all the same."""
        try:
            yield self.engine(_taken(x, table), _taken(y, table), mask, bound, self.seeds)
        except Exception:  # whatever it is, it must not tell the others' sum that it happened
            if len(table) == 1:
                yield Sums(self._nothing(), 0, 1)
                return
            for half in pieces(len(table), -(-len(table) // 2)):
                yield from self._computed(x, y, table[half], mask[half], bound)


def _engine(
    model: Network, loss: Loss, probe: Probe, batching: Batching, loss_weights: LossWeights | None
) -> InRows | InTurn:
    """In rows, if that is proved to keep units apart and trials find every place alike; in turn otherwise."""
    gradients = checked(model, loss, probe)
    ways: list[Gradients] = []
    if gradients and batching.at_once > 1 and stride() > 1:
        ways = [gradients, gradients.without_rows()] if gradients.by_row else [gradients]
    for own in ways:
        try:
            rows = InRows(own, probe, batching, loss_weights)
        except Exception:  # not isolated, not captured, or not traced in rows for another reason: one unit is
            continue
        if rows.same_at_every_place:
            return rows
    return InTurn(model, loss, probe, batching, loss_weights)


def _check_loss_weights(loss_weights: LossWeights, labels: NDArray) -> None:
    """Raises ConfigError unless they give a number for each label, or one for all.

    Later an exception would be taken for a unit's own, and the unit would contribute zero.
    """
    found = tuple(tf.convert_to_tensor(loss_weights(tf.constant(labels))).shape)
    if found not in ((), (len(labels),)):
        raise ConfigError(f"loss_weights must give one number per example, shape {(len(labels),)}, or one; got {found}")


def _taken(rows: NDArray, table: NDArray) -> NDArray:
    """The rows of a table's numbers, without a copy if they follow each other."""
    numbers = table.ravel()
    if np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
        return rows[numbers[0] : numbers[0] + len(numbers)]
    return rows[numbers]
