"""Examples in the rows of one array: several inputs or outputs of an example are the fields of a structured array.

So a dataset has one `x` and one `y` of n rows, however many inputs and outputs a model has. Rows are counted, taken,
joined and split in the same way for all.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.utils.errors import DataError

ROWS_AT_ONCE = 1024
"""Number of rows that are checked at once."""
Shape = tuple[int, ...]
Shapes = Shape | tuple[Shape, ...] | Mapping[str, Shape]
"""Shape of one example: of its array, or of each of its arrays, in order or by name."""


def as_rows(data: NDArray | Mapping[str, NDArray] | Sequence[NDArray]) -> NDArray:
    """Return one array with a row for each example.

    Args:
        data: an array of n rows, or a mapping or tuple of such arrays. In a tuple arrays are named "0", "1", ...

    Returns:
        The array itself; of several arrays a structured one of shape (n,), with a field for each.

    Raises:
        DataError: this is no array of numbers, or lengths differ.
    """
    if isinstance(data, np.ndarray):
        return data
    named = data if isinstance(data, Mapping) else {str(place): array for place, array in enumerate(data)}
    for name, array in named.items():
        if not isinstance(array, np.ndarray) or not array.ndim or array.dtype.kind not in "fiub":
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(f"array {name!r} must be a NumPy array of numbers, a row for each example; found {found}")
    lengths = {name: len(array) for name, array in named.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"arrays must have one length, found {lengths or 'no array'}")
    rows = np.empty(next(iter(lengths.values())), [(name, own.dtype, own.shape[1:]) for name, own in named.items()])
    for name, array in named.items():
        rows[name] = array
    return rows


def fields(rows: NDArray) -> dict[str, NDArray]:
    """Return the arrays of some rows by name; the name of a single array is empty."""
    return {"": rows} if rows.dtype.names is None else {name: rows[name] for name in rows.dtype.names}


def from_fields(arrays: Mapping[str, NDArray]) -> NDArray:
    """Return the rows of some arrays, the reverse of `fields`."""
    return arrays[""] if set(arrays) == {""} else as_rows(arrays)


def each_field(change: Callable[[str, NDArray], NDArray], rows: NDArray) -> NDArray:
    """Return rows whose arrays are changed one by one.

    Args:
        change: maps the name and the array of n rows to another one of n rows.
        rows: n of them.
    """
    return from_fields({name: change(name, array) for name, array in fields(rows).items()})


def shapes_of(rows: NDArray) -> dict[str, Shape]:
    """Return the shape of one example, for each array by name."""
    return {name: array.shape[1:] for name, array in fields(rows).items()}


def named_shapes(shapes: Shapes) -> dict[str, Shape]:
    """Return stated shapes by the names that the arrays have in `fields`."""
    if isinstance(shapes, Mapping):
        return dict(shapes)
    if shapes and all(isinstance(shape, tuple) for shape in shapes):
        return {str(place): shape for place, shape in enumerate(shapes) if isinstance(shape, tuple)}
    return {"": tuple(size for size in shapes if not isinstance(size, tuple))}


def cast(rows: NDArray, dtype: DTypeLike) -> NDArray:
    """Return the rows in a dtype; cut floats to the range of narrow integers.

    NaN becomes 0 in these types: integers of fewer than 4 bytes, and uint32. Overflow of a float gives infinity.

    Guarantee: each number depends on its own value alone, and not on its position or on the dtype that other rows give
        a file. NumPy's own cast of such numbers depends on their position. One fraction in a file makes all its whole
        numbers float64, so whole numbers pass through float64 here too.
    """
    rows, target = np.asarray(rows), np.dtype(dtype)
    if rows.dtype == target and (rows.dtype.kind not in "iu" or rows.dtype.itemsize < 8):
        return rows
    if rows.dtype.kind in "iu" and (target.kind in "iu" or rows.dtype.itemsize == 8):
        rows = rows.astype(np.float64)
    if rows.dtype.kind == "f" and target.kind in "iu" and (target.itemsize < 4 or target == np.uint32):
        limits = np.iinfo(target)
        rows = np.clip(np.nan_to_num(rows.astype(np.float64)), limits.min, limits.max)
    with np.errstate(over="ignore", invalid="ignore"):
        return rows.astype(target)


def finite_rows(rows: NDArray) -> NDArray[np.bool_]:
    """Return a mask of the rows whose numbers are all finite as float32, shape (n,).

    Rows are read in blocks, as arrays may be memory-mapped.
    """
    finite = np.ones(len(rows), np.bool_)
    for array in fields(rows).values():
        for start in range(0, len(array), ROWS_AT_ONCE):
            block = slice(start, start + ROWS_AT_ONCE)
            finite[block] &= np.isfinite(cast(array[block], np.float32)).all(axis=tuple(range(1, array.ndim)))
    return finite
