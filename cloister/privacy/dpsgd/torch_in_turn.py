"""Clipped sum of a batch of a PyTorch module, one unit after another.

It suits any module: with one unit at a time, no layer can combine two of them, and a unit is computed in the same shape
in any batch. Norms and sums are in double precision.

The gradient of a `Linear` is the outer product of the gradient of its output, the delta, and its input. For a wide
layer these two are kept for each unit, the delta scaled by the unit's factor, and multiplied for several units at once.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import Draws, places_of
from cloister.privacy.dpsgd.clipped_sums import Sums
from cloister.privacy.dpsgd.nested import Examples, Probe, mapped, take
from cloister.privacy.dpsgd.noise import AT_ONCE, DOUBLE_UNDERFLOW, ROUNDED, SLACK
from cloister.privacy.dpsgd.torch_calls import Loss, equal_results, losses_of, seedable, tensors_of, training
from cloister.utils.arrays import Network, Tensor
from cloister.utils.errors import PrivacyError

WIDE = 1 << 14
"""Least size of a weight of `Linear` whose gradient is not computed for each unit."""
KEPT = 64
"""Most units whose inputs and deltas of wide layers are kept."""


@dataclass(frozen=True)
class Wide:
    """Wide layer, and what is kept of some units.

    Attributes:
        layer: a `torch.nn.Linear`.
        weight, bias: names of its parameters; no bias: empty.
        inputs, deltas: of each unit, in double precision, the deltas scaled.
    """

    layer: Network
    weight: str
    bias: str
    inputs: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)

    def keep(self, inputs: Tensor, deltas: Tensor, totals: dict[str, Tensor]) -> None:
        """Keep one unit; if there are `KEPT`, add them to the sums."""
        self.inputs.append(inputs)
        self.deltas.append(deltas)
        if len(self.inputs) == KEPT:
            self.add_to(totals)

    def add_to(self, totals: dict[str, Tensor]) -> None:
        """Add the gradients of the kept units to the sums, and keep none of them."""
        if self.inputs:
            deltas = torch.stack(self.deltas)
            totals[self.weight].addmm_(deltas.T, torch.stack(self.inputs))
            if self.bias:
                totals[self.bias].add_(deltas.sum(dim=0))
        self.forget()

    def forget(self) -> None:
        """Keep no unit."""
        self.inputs.clear()
        self.deltas.clear()


class TorchInTurn:
    """Clipped sums of a module's units, one after another.

    Args:
        module, loss, probe, batch_size, group_cap: as in `torch_step.TorchDpSgd`.

    Attributes:
        places: largest number of units in a call.
        overstatement: η, of sums in double precision.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. Its L2 norm is at
        most the bound. This assumes that equal inputs give equal results, that the module keeps nothing outside of
        itself (`torch_calls`), and nothing about rows of a batch.
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
        self._wide = _wide_layers(module) if group_cap == 1 else []
        first, mask = np.zeros(group_cap, np.intp), np.arange(group_cap)[None] == 0
        x, y = (take(given, first) for given in probe)
        try:
            self(x, y, mask, 1.0, Draws(0).seeds(1))
        except Exception:  # a wide layer may be used in a way that has no outer product
            self._wide = []
            self(x, y, mask, 1.0, Draws(0).seeds(1))

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call, one for each unit."""
        return draws.seeds(self.places)

    def __call__(
        self,
        x: Examples,
        y: Examples,
        mask: NDArray,
        bound: NDArray | float,
        seeds: NDArray[np.int64],
        taken: NDArray[np.intp] | None = None,
    ) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over at most `places` units, in double precision.

        Args:
            x, y, mask, bound, seeds: as in `clipped_sums.Engine`.
            taken: without effect, as seeds are those of the units.
        """
        trained = {name: own for name, own in self._module.named_parameters() if own.requires_grad}
        device = next(iter(trained.values())).device
        exact = torch.device("cpu") if device.type == "mps" else device  # MPS has no double precision
        totals = {name: torch.zeros(own.shape, dtype=torch.float64, device=exact) for name, own in trained.items()}
        bounds = np.broadcast_to(np.asarray(bound, np.float64), len(mask))
        clipped = non_finite = 0
        x, y = (tensors_of(given, like, device) for given, like in zip((x, y), self._probe, strict=True))
        for wide in self._wide:
            wide.forget()
        with training(self._module) as attributes, equal_results(), seedable(self._module) as seed:
            for number, counted in enumerate(mask):
                rows = torch.from_numpy(number * self._cap + np.flatnonzero(counted)).to(device)
                unit = [mapped(lambda tensor, rows=rows: tensor[rows], given) for given in (x, y)]
                own_seed = int(seeds[number, 0]) << 31 | int(seeds[number, 1])
                seed(own_seed)
                attributes.seed(own_seed)
                try:
                    found, pairs = self._gradients(trained, *unit)
                finally:
                    attributes.restore()
                exactly = {name: own.to(exact).to(torch.float64) for name, own in found.items()}
                factors = [[part.to(exact).to(torch.float64)[0] for part in pair] for pair in pairs]
                squares = sum(_square(own) for own in exactly.values())
                for wide, (given, delta) in zip(self._wide, factors, strict=True):
                    of_input, of_delta = (_square(part) + DOUBLE_UNDERFLOW * part.numel() for part in (given, delta))
                    squares += (of_input + bool(wide.bias)) * of_delta
                norm = math.sqrt(squares * (1 + ROUNDED * self._size))
                if not math.isfinite(norm):
                    non_finite += 1
                    continue
                limit = float(bounds[number])
                factor = limit / max(norm, limit)
                clipped += norm > limit
                for name, own in exactly.items():
                    totals[name].add_(own, alpha=factor)
                for wide, (given, delta) in zip(self._wide, factors, strict=True):
                    wide.keep(given, delta * factor, totals)
        for wide in self._wide:
            wide.add_to(totals)
        return Sums([total.cpu().numpy() for total in totals.values()], clipped, non_finite)

    def _gradients(
        self, trained: dict[str, Tensor], x: Examples, y: Examples
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the gradients of the mean loss of a unit's examples, and the input and the delta of each wide layer.

        Raises:
            PrivacyError: a wide layer is not called exactly once with one row, or something else uses its weights.
        """
        values = {name: own.detach().requires_grad_() for name, own in trained.items()}
        copies = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        heard: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._wide]
        for wide, calls in zip(self._wide, heard, strict=True):
            wide.layer.forward = partial(_listening, wide.layer, calls)  # until the attributes are put back
        losses = losses_of(self._module, values | copies, self._loss, x, y)
        if any(len(calls) != 1 or calls[0][0].shape[:-1] != (1,) for calls in heard):
            raise PrivacyError("a wide layer is called otherwise than once, with one row")
        outputs = [output for ((_, output),) in heard]
        found = torch.autograd.grad(losses.mean(), [*values.values(), *outputs], allow_unused=True)
        kept = {name for wide in self._wide for name in (wide.weight, wide.bias)}
        gradients: dict[str, Tensor] = {}
        for (name, own), gradient in zip(trained.items(), found, strict=False):
            if name not in kept:
                whole = torch.zeros_like(own) if gradient is None else gradient
                gradients[name] = whole if whole.layout == torch.strided else whole.to_dense()
            elif gradient is not None:
                raise PrivacyError(f"something else than its layer uses {name!r}")
        deltas = (
            torch.zeros_like(output) if delta is None else delta
            for output, delta in zip(outputs, found[len(values) :], strict=True)
        )
        return gradients, [(calls[0][0], delta) for calls, delta in zip(heard, deltas, strict=True)]


def _square(tensor: Tensor) -> float:
    """Return the sum of squares of a tensor in double precision."""
    flat = tensor.reshape(-1)
    return float(torch.dot(flat, flat))


def _wide_layers(module: Network) -> list[Wide]:
    """Return the plain linear layers that are wide, with the names of their parameters, all of them trained."""
    names = {id(own): name for name, own in module.named_parameters()}
    found = []
    for layer in module.modules():
        own = list(layer.parameters())
        if type(layer) is torch.nn.Linear and layer.weight.numel() >= WIDE and all(each.requires_grad for each in own):
            found.append(Wide(layer, names[id(layer.weight)], "" if layer.bias is None else names[id(layer.bias)]))
    return found


def _listening(layer: Network, calls: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """Return the outputs of a linear layer, and record inputs and outputs; its weights are constants."""
    bias = None if layer.bias is None else layer.bias.detach()
    output = torch.nn.functional.linear(rows, layer.weight.detach(), bias)
    if torch.is_grad_enabled():
        calls.append((rows.detach().clone(), output.requires_grad_()))
    return output.clone()  # which the module may change in place
