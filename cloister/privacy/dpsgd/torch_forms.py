"""Representations of the gradients of units with respect to one PyTorch parameter, as in `forms`.

A parameter multiplies inputs a at T positions of a unit, and d are the gradients of what it makes: then the unit's
gradient is Σ_t a_t d_tᵀ. It is never made where it is larger than its factors:

    outer      T = 1: its norm is ‖a‖·‖d‖
    gram       few positions: its squared norm is Σ_{s,t} (a_s·a_t)(d_s·d_t)
    embedding  the parameter is a table, a stands for one of its rows: a_s·a_t is 1 where two indices are equal
    whole      it is made, for this and every other kind of parameter

Squares are summed in double precision. Held numbers are of float32, so that their products are exact in it. None is a
denormal, which some threads may take for 0 and others not, by the flag of `torch.set_flush_denormal` of each: then the
norm could leave out what the product has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloister.privacy.dpsgd.noise import MASS_PER_NORM, MAX_POSITIONS, ROUNDED
from cloister.utils.arrays import Tensor

SMALLEST_NORMAL = 2.0**-126
"""Least number of float32 that has all bits."""
GRAM_COST = 3
"""Cost of a multiplication of the Gram form, in double precision, relative to one of the ordinary form."""


@dataclass(frozen=True)
class Form:
    """Form of the gradients of units with respect to a parameter.

    Attributes:
        kernel: `outer`, `gram`, `embedding` or `whole`.
        turned: whether the parameter is Σ d_t a_tᵀ, its outputs along the first axis.
        size: rows of a table.
    """

    kernel: str
    turned: bool = False
    size: int = 0

    @property
    def count(self) -> int:
        """Return the number of held tensors."""
        return 1 if self.kernel == "whole" else 2

    @property
    def is_kept(self) -> bool:
        """Return whether a product of all rounds is cheaper than one of each."""
        return self.kernel == "outer"

    def summed(self, held: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Return Σ factors[i]·gradient[i], in single precision, of `gram` and `embedding` in double.

        Args:
            held: of n units, all of them finite.
            factors: shape (n,), double, above 0.
        """
        if self.kernel == "whole":
            (gradients,) = held
            return (factors.to(gradients.dtype) @ _flat(gradients)).view(gradients.shape[1:])
        inputs, deltas = held
        scaled = deltas * factors.to(deltas.dtype)[:, None, None]
        if scaled.dtype == torch.float32:  # rounded up to a denormal, a delta of a large input would exceed the bound
            scaled = without_denormals(scaled)
        if self.size:
            table = scaled.new_zeros(self.size, scaled.shape[2])
            return table.index_add_(0, inputs.flatten(), scaled.flatten(0, 1))
        one, other = (scaled, inputs) if self.turned else (inputs, scaled)
        return one.flatten(0, 1).T @ other.flatten(0, 1)


def of_positions(inputs: Tensor, deltas: Tensor, turned: bool, size: int = 0) -> tuple[Form, list[Tensor], Tensor]:
    """Return the cheapest form, its held tensors, and the units' squared norms.

    Args:
        inputs, deltas: shapes (U, T, numbers in) and (U, T, numbers out).
        turned, size: as in `Form`.

    Raises:
        ValueError: there are too many positions of a table for the bound, or numbers have too few bits.
    """
    if size:
        if inputs.shape[1] > MAX_POSITIONS:
            raise ValueError(f"an embedding of more than {MAX_POSITIONS} positions has no form")
        deltas = without_denormals(deltas).double()
        same = (inputs == inputs.transpose(1, 2)).double()
        return Form("embedding", size=size), [inputs, deltas], gram_squares(same, deltas @ deltas.transpose(1, 2))
    positions, fan_in, fan_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if positions == 1:
        inputs, deltas = without_denormals(inputs), without_denormals(deltas)
        return Form("outer", turned), [inputs, deltas], squares(inputs) * squares(deltas)
    if positions <= MAX_POSITIONS and GRAM_COST * positions * (fan_in + fan_out) < fan_in * fan_out:
        inputs, deltas = without_denormals(inputs).double(), without_denormals(deltas).double()
        products = [each @ each.transpose(1, 2) for each in (inputs, deltas)]
        return Form("gram", turned), [inputs, deltas], gram_squares(*products)
    one, other = (deltas, inputs) if turned else (inputs, deltas)
    return of_whole(one.transpose(1, 2) @ other)


def of_whole(gradients: Tensor) -> tuple[Form, list[Tensor], Tensor]:
    """Return the form of gradients, shape (U, *parameter.shape), the held tensor, and the units' squared norms."""
    gradients = without_denormals(gradients)
    return Form("whole"), [gradients], squares(gradients)


def without_denormals(tensor: Tensor) -> Tensor:
    """Replace numbers of magnitude up to `SMALLEST_NORMAL` by 0.

    So no number is a denormal of float32, whether the processor takes these for 0 or not.

    Raises:
        ValueError: numbers have too few bits.
    """
    refuse_coarse(tensor)
    return torch.nn.functional.hardshrink(tensor, SMALLEST_NORMAL)


def refuse_coarse(tensor: Tensor) -> None:
    """Raise ValueError if numbers have fewer bits than the bounds on roundings assume."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"gradients are {tensor.dtype}, whose sums are too coarse to bound")


def squares(tensor: Tensor) -> Tensor:
    """Return upper bounds of the sums of squares of the entries of each unit, shape (U,), double.

    The margin covers the roundings of the squares, of their sum in any order, of its root, and of the root's square.
    """
    flat = _flat(tensor)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return norms.square() * (1 + ROUNDED * (flat.shape[1] + 2))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def gram_squares(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return upper bounds of the squared norms of Σ_t a_t d_tᵀ, by the argument of `forms.gram_squares`.

    Positions can cancel each other. So the total norm of the positions, by `MASS_PER_NORM`, is added to the norm.

    Args:
        inputs, deltas: products of all pairs of positions of a and of d, shape (U, T, T), double.
    """
    total = (inputs * deltas).sum((1, 2))
    mass = (inputs.diagonal(dim1=1, dim2=2) * deltas.diagonal(dim1=1, dim2=2)).sqrt().sum(1)
    return total.clamp(min=0.0) + (mass / MASS_PER_NORM).square()


def joined(several: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return tensors along an axis, one tensor without a copy."""
    return torch.cat(list(several), axis) if len(several) > 1 else several[0]


def weighted(form: Form, held: Sequence[Tensor], factors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return held tensors and factors without units of factor 0, whose gradients may not be finite.

    Raises:
        ValueError: a held tensor has too few bits.
    """
    for each in held:
        refuse_coarse(each)
    chosen = torch.nonzero(factors)[:, 0]
    if len(chosen) == len(factors):
        return list(held), factors
    return [each.index_select(0, chosen) for each in held], factors[chosen]
