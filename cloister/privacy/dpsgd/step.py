"""DP-SGD on Keras models: the choice of an engine, and the optimizer."""

import math
from collections.abc import Sequence
from contextlib import suppress

import keras
import tensorflow as tf
from numpy.typing import NDArray

from cloister.privacy.dpsgd.checks import (
    as_unsupported_model,
    refuse,
    refuse_coarse_precision,
    use_single_precision,
    why_in_turn,
)
from cloister.privacy.dpsgd.clipped_sums import ClippedSums
from cloister.privacy.dpsgd.descent import Descent
from cloister.privacy.dpsgd.in_rows import InRows
from cloister.privacy.dpsgd.in_turn import InTurn, suits_xla
from cloister.privacy.dpsgd.nested import Probe
from cloister.privacy.dpsgd.tracing import Loss, made_up
from cloister.utils.arrays import Compiled, Network, Optimizer, Tensor, Variable
from cloister.utils.errors import ConfigError

WORTH_COMPILING = 1 << 18
"""Least number of parameters for a compiled optimizer: below it, compiling (0.3 s) saves under 0.3 ms a step."""


class DpSgd(Descent):
    """DP-SGD on a Keras model, which is trained in place.

    Args:
        model: built; its state other than weights must not come from data.
        batch_size: B > 0, public: the divisor of a noised sum, and the expected number of units in a batch.
        noise_multiplier: σ ≥ 0.
        clipping_norm: S, from `noise.MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`; the default of each step.
        optimizer: any Keras optimizer; it receives the noised mean alone, so its update is post-processing.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of three dummy examples, for their structure, shapes and types. A model of several inputs or
            outputs takes tuples or dicts of arrays. Required if the loss is not a classifier's.
        group_cap: largest number of examples of a unit, > 0. At 1 a unit is an example. Above, it is a group of
            examples: its gradient is the mean of their gradients, and is clipped to S.

    Guarantee: take a step on a batch from `batches.poisson`, of at most B units on average. It costs as much as a
        Poisson-sampled Gaussian mechanism of noise multiplier σ, for add-or-remove of a unit, with δ larger by
        `vocabulary.OVERFLOW`. It rests on the guarantee of `ClippedSums` and on `noise`. Other batches cost as much as
        a Gaussian mechanism without sampling, if at most `batches.places_of(B)` units take part.

    Raises:
        UnsupportedModel: as in `checks.refuse`.
        ConfigError: a number is out of range, a probe is needed, or the processor is set to coarser products.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the configured batch size as the divisor.
    """

    def __init__(
        self,
        model: Network,
        *,
        batch_size: int,
        noise_multiplier: float,
        clipping_norm: float,
        optimizer: Optimizer,
        loss: Loss = keras.losses.sparse_categorical_crossentropy,
        probe: Probe | None = None,
        group_cap: int = 1,
    ) -> None:
        super().__init__(
            [(variable.shape, variable.dtype) for variable in model.trainable_variables],
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            clipping_norm=clipping_norm,
            group_cap=group_cap,
        )
        if probe is None and loss is not keras.losses.sparse_categorical_crossentropy:
            raise ConfigError("probe must be given with a loss of your own: x and y of three made-up examples")
        use_single_precision()
        self.model = model
        optimizer.build(model.trainable_variables)
        self.probe = made_up(model) if probe is None else probe
        engine, self.why_in_turn = engine_of(model, loss, self.probe, batch_size, group_cap)
        self._clipped_sums = ClippedSums(engine, self._like, self.probe, batch_size, group_cap)
        self._descend = _descent(optimizer, model.trainable_variables)

    def _apply(self, means: Sequence[NDArray]) -> None:
        self._descend(*[_shared(mean) for mean in means])

    def _refuse_coarse_precision(self) -> None:
        refuse_coarse_precision()


def engine_of(model: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> tuple[InRows | InTurn, str]:
    """Return the engine of a model, and the reason for which units are not computed in rows; empty if they are."""
    with as_unsupported_model(model):
        graph, unproved = refuse(model, loss, probe)
        why: Exception | None = unproved  # the gradients of losses that are not proved seldom are
        if why is None:
            try:
                return InRows(model, loss, probe, batch_size, group_cap), ""
            except Exception as error:  # not isolated, not captured, or not traceable in rows: one unit is traceable
                why = error
        return InTurn(model, loss, probe, batch_size, group_cap, suits_xla(graph)), why_in_turn(why, model)


def _shared(array: NDArray) -> Tensor:
    """Return a tensor over an array's own memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _descent(optimizer: Optimizer, variables: Sequence[Variable]) -> Compiled:
    """Return the function that applies the optimizer to the mean gradients.

    TensorFlow runs an optimizer as a dozen operations, each a pass over all parameters; for large models XLA fuses
    them to one. It is post-processing, so the guarantee does not depend on its computation.
    """

    def apply(*means: Tensor) -> None:
        optimizer.apply(list(means), variables)

    signature = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
    if sum(math.prod(variable.shape) for variable in variables) >= WORTH_COMPILING:
        fused = tf.function(apply, autograph=False, jit_compile=True)
        with suppress(Exception):  # XLA and TensorFlow raise exceptions of many kinds for missing support
            fused.experimental_get_compiler_ir(*signature)()
            return fused.get_concrete_function(*signature)
    # A concrete function is called without a look-up by the types of its arguments.
    return tf.function(apply, autograph=False).get_concrete_function(*signature)
