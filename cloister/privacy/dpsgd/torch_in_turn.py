"""Clipped sum of a batch of a PyTorch module, one unit after another.

It suits any module: with one unit at a time, no layer can combine two of them, and a unit is computed in the same shape
in any batch. Each unit has a copy of the module (`torch_calls`). Norms and sums are in double precision.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import Draws, places_of
from cloister.privacy.dpsgd.clipped_sums import Call, Sums
from cloister.privacy.dpsgd.nested import Examples, Probe, mapped, take
from cloister.privacy.dpsgd.noise import AT_ONCE, ROUNDED, SLACK
from cloister.privacy.dpsgd.torch_calls import Loss, copies, equal_results, losses_of, seedable, tensors_of
from cloister.utils.arrays import Network, Tensor


class TorchInTurn:
    """Clipped sums of a module's units, one after another.

    Args:
        module, loss, probe, batch_size, group_cap: as in `torch_step.TorchDpSgd`.

    Attributes:
        places: largest number of units in a call.
        overstatement: η, of sums in double precision.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. Its L2 norm is at
        most the bound: it is the norm of what is added, over all parameters, each of them once. This assumes that equal
        inputs give equal results, that module and loss keep nothing outside of the module (`torch_calls`), and
        nothing about rows of a batch.
    """

    method = "in turn"
    in_fixed_places = False
    threads = 1  # PyTorch uses all cores for one operation

    def __init__(self, module: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> None:
        self.kernels: dict[str, str] = {}
        self._module, self._loss, self._probe, self._cap = module, loss, probe, group_cap
        self.places = min(places_of(batch_size), AT_ONCE)
        self.overstatement = SLACK
        self._size = sum(own.numel() for own in module.parameters() if own.requires_grad)
        first, mask = np.zeros(group_cap, np.intp), np.arange(group_cap)[None] == 0
        x, y = (take(given, first) for given in probe)
        self(Call(x, y, mask, 1.0, Draws(0).seeds(1)))

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call, one for each unit."""
        return draws.seeds(self.places)

    def __call__(self, call: Call) -> Sums:
        """Return the clipped sum of at most `places` units, in double precision, as `clipped_sums.Engine`."""
        x, y, mask, bound, seeds, _ = call
        trained = [own for own in self._module.parameters() if own.requires_grad]
        device = trained[0].device
        exact = torch.device("cpu") if device.type == "mps" else device  # MPS has no double precision
        total, flat = (torch.zeros(self._size, dtype=torch.float64, device=exact) for _ in range(2))
        sizes = [own.numel() for own in trained]
        views = [part.view(own.shape) for part, own in zip(flat.split(sizes), trained, strict=True)]
        bounds = np.broadcast_to(np.asarray(bound, np.float64), len(mask))
        clipped = non_finite = 0
        x, y = (tensors_of(given, like, device) for given, like in zip((x, y), self._probe, strict=True))
        with copies(self._module) as fresh, equal_results(), seedable(self._module) as seed:
            for number, counted in enumerate(mask):
                rows = torch.from_numpy(number * self._cap + np.flatnonzero(counted)).to(device)
                unit = [mapped(lambda tensor, rows=rows: tensor[rows], given) for given in (x, y)]
                seed(int(seeds[number, 0]) << 31 | int(seeds[number, 1]))
                for view, own in zip(views, self._gradients(fresh(), *unit), strict=True):
                    view.copy_(own)  # also if a call has given a parameter another shape
                norm = math.sqrt(float(torch.dot(flat, flat)) * (1 + ROUNDED * self._size))
                if not math.isfinite(norm):
                    non_finite += 1
                    continue
                limit = float(bounds[number])
                factor = limit / max(norm, limit)
                clipped += norm > limit
                total.add_(flat, alpha=factor)
        sums = [part.view(own.shape).cpu().numpy() for part, own in zip(total.split(sizes), trained, strict=True)]
        return Sums(sums, clipped, non_finite)

    def _gradients(self, module: Network, x: Examples, y: Examples) -> Iterator[Tensor]:
        """Yield the gradients of the mean loss of a unit's examples, in a copy of the module that is for them alone."""
        trained = [own for own in module.parameters() if own.requires_grad]
        losses = losses_of(module, self._loss, x, y)
        for own, gradient in zip(trained, torch.autograd.grad(losses.mean(), trained, allow_unused=True), strict=True):
            whole = torch.zeros_like(own) if gradient is None else gradient
            yield whole if whole.layout == torch.strided else whole.to_dense()
