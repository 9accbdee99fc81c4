"""Clipped sum of several units of a PyTorch module in computations of fixed shape.

The argument is that of `in_rows`. A call has places for units, by the lot of `clipped_sums`. It is computed in rounds
of P rows, place s in row s mod P, by one graph of one shape (`torch_uses`). `torch_isolation` proves that each row
of it depends on one unit alone. So the result held of unit x at place s is g(s mod P, x, ω). Each row of each round has
its own random numbers ω, independent and of one law.

The graph is executed one operation after another, each in the shape in which it was traced. Results of kernels may
depend on the alignment of memory. So examples are copied into memory of PyTorch first, which is aligned alike in all
calls. A unit's contribution is added to the sum of others after its factor is computed. Roundings of this sum may
depend on all units; `noise` bounds them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from cloister.privacy.dpsgd.batches import Draws, evenly, fitting, places_in_memory, places_of, resized, rounds
from cloister.privacy.dpsgd.clipped_sums import Call, Sums
from cloister.privacy.dpsgd.nested import Examples, Probe, arrays_in, mapped, take
from cloister.privacy.dpsgd.noise import ROOT, SMALLEST_FACTOR, most_at_once, overstatement
from cloister.privacy.dpsgd.torch_calls import Loss, copies, equal_results, losses_of, seedable, tensors_of
from cloister.privacy.dpsgd.torch_forms import joined, weighted
from cloister.privacy.dpsgd.torch_tracing import NotCapturable, inputs_of, losses_graph, values_of
from cloister.privacy.dpsgd.torch_uses import HeldGraph, Part, Shape
from cloister.utils.arrays import Network, Tensor

USUAL = 16
"""Units in a round if half or twice as many would not suit the cache better."""
ALIKE, UNLIKE = 1e-3, 1e-6
"""Largest difference of a parameter's gradient from that of autograd: of its own norm, and of the largest one."""


class TorchInRows:
    """Clipped sums of a module's units, a row each.

    Args:
        module, loss, probe, batch_size, group_cap: as in `torch_step.TorchDpSgd`.

    Attributes:
        kernels: form of the gradients of each parameter, by its name.
        places: number of places for units in a call.
        at_once: P, number of units in a round of a call.
        overstatement: η, of sums in single precision.

    Guarantee: what is held of the unit at a place is a function of the place, the unit, its random numbers and the
        weights. So is whether its computation raises an exception. This assumes that kernels keep rows apart in rounds
        of one shape, and nothing about what the module or its loss keep. The L2 norm of a unit's contribution is at
        most the bound.

    Raises:
        NotIsolated: an operation of the graph is not proved to keep units apart.
        NotCapturable: a parameter is used in a way that has no form, or the module's device or dtype is another one.
        Exception: of any kind, where a call with several examples cannot be traced.
    """

    method = "rows"
    in_fixed_places = True
    threads = 1  # PyTorch uses all cores for one operation

    def __init__(self, module: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> None:
        self._module, self._loss, self._probe, self._cap = module, loss, probe, group_cap
        self._inputs = inputs_of(module, probe)
        for own in module.parameters():
            if own.device.type != "cpu" or own.dtype != torch.float32:
                raise NotCapturable(
                    f"units share a call only in float32 on a processor; parameters are {own.dtype} on {own.device}"
                )
        room = places_of(batch_size)
        self.places = max(2, evenly(room, most_at_once(batch_size)))  # of two rows there is a proof
        self.at_once = min(self.places, USUAL)
        self._graph = self._traced()
        kept = sum(own.bytes for own in self._graph.parts if own.form.is_kept)
        self.places = places_in_memory(self.places, room, -(-kept // self.at_once))
        at_once = resized(self.at_once, fitting(max(self._graph.sizes()), self.at_once), self.places)
        if at_once != self.at_once:
            self.at_once = at_once
            self._graph = self._traced()
        self._refuse_unlike()
        self.kernels = {self._inputs.trained[part.number]: part.form.kernel for part in self._graph.parts}
        self.overstatement = overstatement(batch_size, self.places)

    def _traced(self) -> HeldGraph:
        shape = Shape(self.at_once, self._cap)
        rows = np.zeros(shape.units * shape.cap, np.intp)
        given = [_copied(each[rows], each) for part in self._probe for each in arrays_in(part)]
        flat = [*values_of(self._module, self._inputs), *given]
        with copies(self._module) as fresh, equal_results(), seedable(self._module):
            losses = losses_graph(fresh(), self._loss, self._probe, self._inputs, flat)
            return HeldGraph(losses, self._inputs, shape, flat)

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call: one for each round."""
        return draws.seeds(-(-self.places // self.at_once))

    def __call__(self, call: Call) -> Sums:
        """Return the clipped sum of the units in places, as `clipped_sums.Engine`."""
        x, y, mask, bound, seeds, taken = call
        taken = np.flatnonzero(mask.any(axis=1)) if taken is None else taken
        table, real = rounds(taken, self.at_once)
        used = (mask[table].any(axis=2) & real).any(axis=1)  # a round without a unit would add zero
        bounds = np.broadcast_to(np.asarray(bound, np.float64), len(mask))
        values, parts = self.values(), self._graph.parts
        totals: dict[int, Tensor] = {}
        kept: dict[int, list[tuple[list[Tensor], Tensor]]] = {part.number: [] for part in parts}
        clipped = non_finite = 0

        def add(part: Part, several: Sequence[Tensor], factors: Tensor) -> None:
            if len(factors):
                summed, number = part.form.summed(several, factors).reshape(part.shape), part.number
                totals[number] = totals[number].add_(summed) if number in totals else summed.double()

        with torch.no_grad(), torch.inference_mode(False), equal_results(fill=False):
            for places, own, seed in zip(table[used], real[used], seeds[np.flatnonzero(used)], strict=True):
                counted = mask[places] & own[:, None]
                rows = (places[:, None] * self._cap + np.arange(self._cap)).ravel()
                *held, squares = self.held(values, take(x, rows), take(y, rows), counted, seed)
                found = _clip(squares.numpy(), counted.any(axis=1), bounds[places])
                clipped, non_finite = clipped + found[1], non_finite + found[2]
                rest = iter(held)
                for part in parts:
                    mine = weighted(part.form, [next(rest) for _ in range(part.form.count)], found[0])
                    if part.form.is_kept:
                        kept[part.number].append(mine)
                    else:
                        add(part, *mine)
            for part in parts:
                if several := kept[part.number]:
                    held_of_all = zip(*(mine for mine, _ in several), strict=True)
                    add(part, [joined(each) for each in held_of_all], joined([own for _, own in several]))
        return Sums(self._in_order(totals, values), clipped, non_finite)

    def values(self) -> list[Tensor]:
        """Return the current parameters and buffers, as `held` takes them."""
        return values_of(self._module, self._inputs)

    def held(
        self, values: list[Tensor], x: Examples, y: Examples, counted: NDArray, seed: NDArray[np.int64]
    ) -> list[Tensor]:
        """Return what is held of each unit of a round, and the squared norms of their gradients, shape (U,).

        Args:
            values: of parameters and buffers.
            x, y: examples in rows, those of each unit together.
            counted: mask of examples, shape (U, cap).
            seed: of the round. Each row has uniform numbers of its own, independent and of one law.
        """
        given = [
            _copied(array, like)
            for own, probe in zip((x, y), self._probe, strict=True)
            for array, like in zip(arrays_in(own), arrays_in(probe), strict=True)
        ]
        shares = counted / np.maximum(counted.sum(axis=1, keepdims=True), 1.0)
        source = torch.Generator().manual_seed(int(seed[0]) << 31 | int(seed[1]))
        drawn = [torch.rand(shape, generator=source) for shape in self._graph.draws]
        return self._graph.module(*values, *given, *drawn, torch.from_numpy(shares.ravel()))

    @equal_results()
    def _refuse_unlike(self) -> None:
        """Refuse a module if the gradients of two random examples in rows are not those of plain autograd.

        A module's own formulas for gradients, hooks on them, and blocks without them are not part of the graph. Weights
        are random too, as the gradients of others may not be finite.

        Raises:
            NotCapturable: they differ.
        """
        rng = np.random.default_rng(0)
        units, cap, graph = self.at_once, self._cap, self._graph

        def drawn(array: NDArray) -> NDArray:
            shape = (2, *array.shape[1:])
            whole = not np.issubdtype(array.dtype, np.floating)
            return np.zeros(shape, array.dtype) if whole else rng.random(shape).astype(array.dtype)

        made = [mapped(drawn, given) for given in self._probe]
        table = np.minimum(np.arange(units * cap) // cap, 1)
        rows = [_copied(array[table], array) for given in made for array in arrays_in(given)]
        shares = torch.arange(units * cap, dtype=torch.float64) % cap == 0
        with copies(self._module) as fresh, _Kept():
            module, source = fresh(), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for own in module.parameters():
                    fan_in = own.numel() / max([*own.shape[:1], 1])
                    own.copy_(torch.randn(own.shape, generator=source) / max(fan_in, 1.0) ** 0.5)
            values = values_of(module, self._inputs)
            x, y = (mapped(lambda array: _copied(array, array), given) for given in made)
            trained = [own for own in module.parameters() if own.requires_grad]
            total = losses_of(module, self._loss, x, y).sum()
            expected = torch.autograd.grad(total, trained, allow_unused=True)
        with torch.no_grad():
            *held, _ = graph.module(*values, *rows, *map(torch.zeros, graph.draws), shares.double())
        found, rest = [torch.zeros_like(own, dtype=torch.float64) for own in trained], iter(held)
        for part in graph.parts:
            mine = [next(rest)[:2] for _ in range(part.form.count)]
            summed = part.form.summed(mine, torch.ones(2, dtype=torch.float64))
            found[part.number] += part.back(summed, trained[part.number])
        others = [torch.zeros_like(own) if one is None else one for one, own in zip(expected, trained, strict=True)]
        largest = max(float(other.norm()) for other in others)
        for one, other in zip(found, others, strict=True):
            if not float((one - other).norm()) <= ALIKE * float(other.norm()) + UNLIKE * largest:
                raise NotCapturable("gradients of several examples at once differ from those of plain autograd")

    def _in_order(self, totals: Mapping[int, Tensor], values: list[Tensor]) -> list[NDArray]:
        """Map sums over views back to their parameters; 0 where there is none."""
        sums = {
            part.number: part.back(totals[part.number], values[part.number])
            for part in self._graph.parts
            if part.number in totals
        }
        return [
            np.ascontiguousarray(sums[number].numpy()) if number in sums else np.zeros(tuple(own.shape))
            for number, own in enumerate(values[: len(self._inputs.trained)])
        ]


def _copied(array: NDArray, like: NDArray) -> Tensor:
    """Return an array in memory of PyTorch, in the dtype of another one."""
    return tensors_of(array, like, "cpu").clone()


def _clip(squares: NDArray, real: NDArray, bounds: NDArray) -> tuple[Tensor, int, int]:
    """Return the factors min(1, bound/‖gradient‖), 0 for units that do not count, and the counts of `Sums`.

    Args:
        squares: upper bounds of squared norms, shape (U,).
        real: False for an empty place.
        bounds: above 0.
    """
    finite = np.isfinite(squares)
    norms = np.sqrt(np.where(finite, squares, 0.0)) * ROOT
    factors = np.where(finite & real, bounds / np.maximum(norms, bounds), 0.0)
    factors[factors < SMALLEST_FACTOR] = 0.0
    clipped = int(np.count_nonzero(finite & real & (norms > bounds)))
    return torch.from_numpy(factors), clipped, int(np.count_nonzero(real & ~finite))


class _Kept(TorchDispatchMode):
    """Mode in which dropout keeps everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bernoulli_:
            return args[0].fill_(1.0)
        return func(*args, **(kwargs or {}))
