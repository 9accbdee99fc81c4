"""Named arrays and the messages they travel in, without copies.

Flower serialises every array on the way into a message and parses it on the way out. Inside one process both are
waste, and a server that only reads needs no second copy of what arrived: `Array` holds an ndarray and serialises it
when somebody asks for bytes; `view` looks into the bytes that came over the network.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from numpy.typing import DTypeLike, NDArray

from cloister.core.errors import FederationError

NUMPY = "numpy.ndarray"
ALIGNMENT = 64
"""Bytes: what memory begins at a multiple of that libraries read without a copy, and always in the same way."""


class Array(FlowerArray):
    """A Flower array over an ndarray: the same bytes and object id once serialised, no copy before that.

    The class keeps Flower's name because Flower writes the name of the class on the wire.
    """

    def __init__(self, ndarray: NDArray) -> None:
        held = np.ascontiguousarray(ndarray).reshape(ndarray.shape).view()
        held.flags.writeable = False
        self.__dict__.update(dtype=str(held.dtype), shape=held.shape, stype=NUMPY, _held=held)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in NumPy's `.npy` format, made on first use."""
        if "_data" not in self.__dict__:
            buffer = io.BytesIO()
            np.save(buffer, self.__dict__["_held"], allow_pickle=False)
            self.__dict__["_data"] = buffer.getvalue()
        return self.__dict__["_data"]

    def numpy(self) -> NDArray:
        """The array itself, read-only."""
        return self.__dict__["_held"]


def view(array: FlowerArray) -> NDArray:
    """A read-only ndarray over what `array` holds; copies only what is not plain `.npy` in C order.

    Raises:
        ValueError: the bytes are not a pickle-free `.npy` file of the dtype and shape they are labelled with.
    """
    if isinstance(array, Array):
        return array.numpy()
    data, (header, dtype, size) = array.data, _npy_layout(array.dtype, tuple(array.shape))
    if len(data) == len(header) + size and data.startswith(header):
        return np.ndarray(array.shape, dtype, data, len(header))
    # NumPy would read a list of millions of files in an archive.
    if not data.startswith(np.lib.format.MAGIC_PREFIX):
        raise ValueError("the array's bytes are no .npy file")
    try:
        parsed = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a hostile header can make the parser raise anything, and must not end the round
        raise ValueError("the array's bytes are no .npy file") from error
    if not isinstance(parsed, np.ndarray) or parsed.shape != tuple(array.shape) or str(parsed.dtype) != array.dtype:
        raise ValueError("the array's bytes are not of the dtype and shape they are labelled with")
    return parsed


MAX_DTYPE, MAX_DIMENSIONS = 16, 64
"""Characters of the name of a dtype, and dimensions of an array; NumPy's own limit is 64."""


@lru_cache(maxsize=4096)
def _npy_layout(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, np.dtype, int]:
    """What `np.save` writes before the numbers of a C-ordered array, their dtype, and their size in bytes.

    Raises:
        ValueError: the dtype or the shape is none that an array of numbers can have.
    """
    # NumPy takes minutes and gigabytes for a dtype of millions of fields.
    if len(dtype) > MAX_DTYPE or len(shape) > MAX_DIMENSIONS:
        raise ValueError("the array's dtype or shape is not that of an array of numbers")
    try:
        kind = np.dtype(dtype)
    except Exception as error:  # np.dtype parses a small language of its own
        raise ValueError("the array's dtype is unknown") from error
    if kind.kind not in "fiub" or any(not 0 <= extent < 2**63 for extent in shape):
        raise ValueError("the array's dtype or shape is not that of an array of numbers")
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue(), kind, math.prod(shape) * kind.itemsize


def aligned(shape: Sequence[int], dtype: DTypeLike) -> NDArray:
    """An array whose memory begins at a multiple of `ALIGNMENT`; nothing is written to it.

    Args:
        shape: of the array.
        dtype: of its numbers.
    """
    length = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(length + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length].view(dtype).reshape(shape)


def to_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """An `ArrayRecord` over the arrays, which must not be changed afterwards."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = Array(np.asarray(array))
    return record


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """The arrays of a record by name, read-only."""
    return {name: view(array) for name, array in record.items()}


@dataclass(frozen=True)
class Layout:
    """Where each named array of a model lies in the flat vector of its p parameters.

    Attributes:
        names, shapes, dtypes: of the arrays, in the model's order.
        offsets: of length `len(names) + 1`; array i is `vector[offsets[i]:offsets[i + 1]]`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray]) -> "Layout":
        """The layout of a model's arrays.

        Raises:
            FederationError: there are none, or one does not hold floats, which cannot carry noise.
        """
        if not arrays:
            raise FederationError("the model has no arrays")
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                raise FederationError(f"array {name!r} has dtype {array.dtype}; only float arrays can be federated")
        sizes = [array.size for array in arrays.values()]
        return cls(
            tuple(arrays),
            tuple(array.shape for array in arrays.values()),
            tuple(str(array.dtype) for array in arrays.values()),
            (0, *(int(end) for end in np.cumsum(sizes))),
        )

    @property
    def size(self) -> int:
        """p, the number of parameters."""
        return self.offsets[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of parameters in each array."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def dtype(self) -> DTypeLike:
        """What arithmetic on the flat vector is done in: float32, or float64 where an array has it."""
        return np.result_type(np.float32, *self.dtypes)

    def rows(self, arrays: Mapping[str, NDArray]) -> "Row":
        """The arrays as one flat piece each, in the layout's order; views where memory allows."""
        return tuple(np.ravel(arrays[name]) for name in self.names)

    def named(self, row: "Row") -> dict[str, NDArray]:
        """The inverse of `rows`, with the model's own dtypes."""
        pieces = zip(self.names, row, self.dtypes, self.shapes, strict=True)
        return {name: piece.astype(dtype, copy=False).reshape(shape) for name, piece, dtype, shape in pieces}


Row = tuple[NDArray, ...]
"""One vector of p parameters, as one flat array per named array of the model."""
