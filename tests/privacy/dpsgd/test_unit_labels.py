"""The algebra of labels says where the numbers of units are after an array's axes are moved, lost or multiplied."""

import itertools

import numpy as np
import pytest

from cloister.privacy.dpsgd.labels import Mixes, NotIsolated, Rows, Unproved, agreed, broadcast, misfit, product

UNITS = 3
SHAPES = [(6,), (3, 4), (2, 6), (2, 3, 4), (4, 1, 6), (2, 2, 6, 5)]
LABELS = [(shape, Rows(axis, inner)) for shape in SHAPES for axis in range(len(shape)) for inner in (1, 2)]
LABELS = [(shape, label) for shape, label in LABELS if not misfit(label, shape, UNITS)]


def numbered(shape, label):
    """Return the number of the unit of each entry."""
    own = np.arange(shape[label.axis]) // label.inner % UNITS
    return np.broadcast_to(own.reshape([-1 if axis == label.axis else 1 for axis in range(len(shape))]), shape)


def holds(label, found):
    return not misfit(label, found.shape, UNITS) and np.array_equal(numbered(found.shape, label), found)


@pytest.mark.parametrize("shape, label", LABELS)
def test_moved_axes_are_followed(shape, label):
    units, rank = numbered(shape, label), len(shape)
    for order in itertools.permutations(range(rank)):
        assert holds(label.permuted(order), units.transpose(order))
    for axis in range(rank + 1):
        assert holds(label.beside(axis), np.expand_dims(units, axis))
    for axes in itertools.combinations([axis for axis in range(rank) if axis != label.axis], min(2, rank - 1)):
        assert holds(label.without(axes), units.max(axis=axes))


@pytest.mark.parametrize("shape, label", LABELS)
def test_a_new_shape_has_the_label_that_holds_in_it_or_none(shape, label):
    units = numbered(shape, label)
    for new in {tuple(order) for other in SHAPES for order in itertools.permutations(other)}:
        if np.prod(new) != units.size:
            continue
        try:
            assert holds(label.reshaped(shape, new, UNITS), units.reshape(new))
        except Unproved:
            axes = [Rows(axis, inner) for axis in range(len(new)) for inner in range(1, units.size)]
            assert not any(holds(other, units.reshape(new)) for other in axes)


def test_products_of_matrices_have_units_where_their_factors_have_them():
    shapes = (2, 3, 6, 6), (3, 6, 6)
    rng, outcomes = np.random.default_rng(0), set()
    choices = [[None, *(Rows(axis) for axis in range(len(shape)) if shape[axis] % 3 == 0)] for shape in shapes]
    for turned, *labels in itertools.product([(a, b) for a in (False, True) for b in (False, True)], *choices):
        if labels == [None, None]:
            continue
        try:
            label = product(labels, (4, 3), turned)
        except NotIsolated as error:
            outcomes.add(type(error))
            continue
        outcomes.add(label.axis)

        def changed(unit, turned=turned, labels=labels):
            found = []
            for moved in (False, True):
                factors = [rng_of.random(shape) for shape, rng_of in zip(shapes, map(np.random.default_rng, (1, 2)))]
                for factor, own in zip(factors, labels, strict=True):
                    if own is not None and moved:
                        factor[numbered(factor.shape, own) == unit] = rng.random()
                one, other = (np.swapaxes(f, -1, -2) if flip else f for f, flip in zip(factors, turned, strict=True))
                found.append(one @ other)
            return found[0] != found[1]

        for unit in range(UNITS):
            moved = changed(unit)
            assert moved.any() and not moved[numbered(moved.shape, label) != unit].any()
    assert outcomes == {1, 2, 3, Mixes}


def test_labels_are_aligned_at_the_last_axes():
    assert broadcast([Rows(0), None, Rows(1)], [2, 1, 3]) == Rows(1)
    with pytest.raises(Mixes):
        broadcast([Rows(0), Rows(0)], [2, 3])


def test_inputs_beside_the_labelled_ones_must_be_independent_of_units():
    assert agreed([None, Rows(1)], [None]) == Rows(1)
    with pytest.raises(Unproved):
        agreed([Rows(1)], [Rows(1)])


def test_an_error_names_the_first_operation_it_was_raised_for():
    error = Mixes("adds up over units").at("MatMul", "inner").at("Call", "outer")
    assert str(error) == "MatMul (inner) adds up over units"
