"""Rows of one or several arrays, and the one cast of inputs."""

import tracemalloc

import numpy as np
import pytest
from support import failures

from cloister.utils.errors import DataError
from cloister.utils.rows import as_rows, cast, each_field, fields, finite_rows, named_shapes, shapes_of

PICTURE, AGE = np.arange(24.0).reshape(4, 3, 2), np.arange(4)


def test_several_arrays_are_rows_that_can_be_taken_and_joined():
    def check(data, names):
        rows = as_rows(data)
        assert len(rows) == 4 and list(fields(rows)) == names
        assert shapes_of(rows) == dict(zip(names, [(3, 2), ()], strict=True)) == named_shapes(shapes_of(rows))
        twice = np.concatenate([rows[[2, 0]], rows[1:2]])
        for array, own in zip((PICTURE, AGE), fields(twice).values(), strict=True):
            np.testing.assert_array_equal(own, array[[2, 0, 1]])
            assert own.dtype == array.dtype

    assert not failures([({"picture": PICTURE, "age": AGE}, ["picture", "age"]), ((PICTURE, AGE), ["0", "1"])], check)


def test_one_array_is_its_own_rows():
    assert as_rows(PICTURE) is PICTURE and fields(PICTURE) == {"": PICTURE}
    assert shapes_of(PICTURE) == {"": (3, 2)} == named_shapes((3, 2))
    assert named_shapes(()) == {"": ()} and named_shapes(((3, 2), ())) == {"0": (3, 2), "1": ()}


def test_arrays_that_are_no_rows():
    def check(data, says):
        with pytest.raises(DataError, match=says):
            as_rows(data)

    assert not failures(
        [
            ({"picture": PICTURE, "age": AGE[:3]}, "one length, found .*'picture': 4, 'age': 3"),
            ({"age": [1, 2]}, "'age' must be a NumPy array of numbers.*found list"),
            ((AGE, AGE.astype(str)), "'1' must be a NumPy array of numbers.*found <U"),
            ({"age": np.float64(3)}, "'age' must be"),
            ({}, "no array"),
        ],
        check,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "int16", "uint32", "float16"])
def test_a_fraction_elsewhere_in_a_file_changes_no_other_number(dtype):
    """A file of whole numbers is one of float64 with one fraction more."""
    whole = np.array([0, 1, -3, 255, 256, 16_777_217, 2**40 + 1, -(2**52) - 1, 70_000])
    with_fraction = np.append(whole.astype(np.float64), 0.5)
    np.testing.assert_array_equal(cast(whole, dtype), cast(with_fraction, dtype)[:-1])


@pytest.mark.parametrize("source", ["float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "int8"])
def test_a_number_is_cast_by_its_value_alone(source, dtype):
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = (rng.standard_normal(67) * 10.0 ** rng.integers(0, 12, 67)).astype(source)
    alone = np.concatenate([cast(number, dtype) for number in np.split(numbers, 67)])
    np.testing.assert_array_equal(cast(numbers, dtype), alone)


def test_ids_keep_their_values():
    ids = np.array([0, 22_298_006, 2**31 - 1])  # codes beyond what float32 can hold
    for own in (ids, ids.astype(np.float64), ids.astype(np.int32)):
        np.testing.assert_array_equal(cast(own, "int32"), ids)


def test_rows_that_are_finite():
    rows = as_rows({"a": np.array([[1.0, 2.0], [np.nan, 1.0], [1.0, 1.0], [1.0, 1e39]]), "b": np.array([1, 2, 3, 4])})
    assert finite_rows(rows).tolist() == [True, False, True, False]
    assert finite_rows(rows[:0]).shape == (0,)


def test_rows_are_checked_in_blocks():
    rows = as_rows({"a": np.zeros((20_000, 32)), "b": np.zeros(20_000, np.float32)})
    rows["a"][[0, 1_024, 19_999], 3], rows["b"][5_000] = np.nan, np.inf
    tracemalloc.start()
    finite = finite_rows(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.flatnonzero(~finite).tolist() == [0, 1_024, 5_000, 19_999] and peak < rows.nbytes / 8


def test_each_field_is_changed():
    rows = each_field(lambda name, array: array + len(name), as_rows({"a": AGE, "bb": AGE}))
    assert rows["a"].tolist() == [1, 2, 3, 4] and rows["bb"].tolist() == [2, 3, 4, 5]
    assert each_field(lambda name, array: array * 2, AGE).tolist() == [0, 2, 4, 6]
