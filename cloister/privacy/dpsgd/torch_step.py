"""DP-SGD on PyTorch modules."""

from collections.abc import Sequence

import torch
from numpy.typing import NDArray

from cloister.privacy.dpsgd.clipped_sums import ClippedSums
from cloister.privacy.dpsgd.descent import Descent
from cloister.privacy.dpsgd.nested import Probe
from cloister.privacy.dpsgd.torch_calls import Loss
from cloister.privacy.dpsgd.torch_checks import (
    as_unsupported_module,
    refuse,
    refuse_coarse_precision,
    trained,
    use_single_precision,
    why_in_turn,
)
from cloister.privacy.dpsgd.torch_in_rows import TorchInRows
from cloister.privacy.dpsgd.torch_in_turn import TorchInTurn
from cloister.utils.arrays import Network, Optimizer

NUMPY = {torch.float32: "float32", torch.float64: "float64"}


class TorchDpSgd(Descent):
    """DP-SGD on a PyTorch module, which is trained in place.

    Args:
        module: with shapes; its parameters with `requires_grad` are trained. It is called with a tensor, with the
            tensors of a tuple in order, or with those of a dict by name. Parts
            of it in evaluation mode stay so while the whole is in training mode; else all of it is trained.
        batch_size, noise_multiplier, clipping_norm, group_cap: as in `step.DpSgd`.
        optimizer: of `torch.optim`, over the module's parameters; it receives the noised mean alone.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of three dummy examples, for their structure, shapes and types.

    Attributes:
        module: as given.
        optimizer: as given; another one may take its place between steps.

    Guarantee: that of `step.DpSgd`, if module and loss keep nothing outside of the module (`torch_calls`).

    Raises:
        UnsupportedModel: as in `torch_checks.refuse`.
        ConfigError: a number is out of range, or the processor is set to coarser products.
    """

    def __init__(
        self,
        module: Network,
        *,
        batch_size: int,
        noise_multiplier: float,
        clipping_norm: float,
        optimizer: Optimizer,
        loss: Loss,
        probe: Probe,
        group_cap: int = 1,
    ) -> None:
        self._trained = trained(module)
        super().__init__(
            [(own.shape, NUMPY[own.dtype]) for own in self._trained],
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            clipping_norm=clipping_norm,
            group_cap=group_cap,
        )
        use_single_precision()
        self.module, self.optimizer, self.probe = module, optimizer, probe
        refuse(module, loss, probe)
        with as_unsupported_module(module):
            engine, self.why_in_turn = engine_of(module, loss, probe, batch_size, group_cap)
        self._clipped_sums = ClippedSums(engine, self._like, probe, batch_size, group_cap)

    def _apply(self, means: Sequence[NDArray]) -> None:
        for own, mean in zip(self._trained, means, strict=True):
            own.grad = torch.from_numpy(mean).to(own.device)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _refuse_coarse_precision(self) -> None:
        refuse_coarse_precision()


def engine_of(
    module: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int
) -> tuple[TorchInRows | TorchInTurn, str]:
    """Return the engine of a module, and the reason for which units are not computed in rows; empty if they are."""
    turn = TorchInTurn(module, loss, probe, batch_size, group_cap)  # raises for a module that fails with one unit
    try:
        return TorchInRows(module, loss, probe, batch_size, group_cap), ""
    except Exception as error:  # not isolated, not captured, or not traceable with several units: one is computed
        return turn, why_in_turn(error, module)
