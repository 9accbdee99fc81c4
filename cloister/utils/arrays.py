"""Named arrays of models, their conversion to and from Flower's messages, and variables of Keras models.

Flower serializes every array on the way into a message and parses it on the way out. Within one process neither is
needed, and a server that only reads needs no second copy of a reply. `Array` holds an ndarray and serializes it on the
first access to its bytes. `view` reads the bytes that arrived over the network in place.

Keras and TensorFlow declare no types. `Tensor`, `Variable` and the like are `Any` for a type checker, and document the
code only. Importing this module imports neither library.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from numpy.typing import DTypeLike, NDArray

from cloister.utils.errors import FederationError

NUMPY = "numpy.ndarray"
ALIGNMENT = 64
"""Bytes. Libraries read memory aligned to this without a copy, and always in the same order."""


class Array(FlowerArray):
    """A Flower array over an ndarray: equal bytes and object id once serialized, and no copy before.

    The class keeps Flower's name because Flower writes the name of the class on the wire.
    """

    def __init__(self, ndarray: NDArray) -> None:
        held = np.ascontiguousarray(ndarray).reshape(ndarray.shape).view()
        held.flags.writeable = False
        self.__dict__.update(dtype=_dtype_name(held.dtype), shape=held.shape, stype=NUMPY, _held=held)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Return the array in NumPy's `.npy` format, made on first use."""
        if "_data" not in self.__dict__:
            buffer = io.BytesIO()
            np.save(buffer, self.__dict__["_held"], allow_pickle=False)
            self.__dict__["_data"] = buffer.getvalue()
        return self.__dict__["_data"]

    def numpy(self) -> NDArray:
        """Return the array itself, read-only."""
        return self.__dict__["_held"]


def view(array: FlowerArray) -> NDArray:
    """Return a read-only ndarray over the data of `array`.

    Plain `.npy` data in C order is not copied.

    Raises:
        ValueError: the bytes are not a pickle-free `.npy` file of the labelled dtype and shape.
    """
    if isinstance(array, Array):
        return array.numpy()
    data, (header, dtype, size) = array.data, _npy_layout(array.dtype, tuple(array.shape))
    if len(data) == len(header) + size and data.startswith(header):
        return np.ndarray(array.shape, dtype, data, len(header))
    # An archive could make NumPy read a list of millions of files.
    if not data.startswith(np.lib.format.MAGIC_PREFIX):
        raise ValueError("the array's bytes are no .npy file")
    try:
        parsed = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a hostile header can raise any exception, which must not end the round
        raise ValueError("the array's bytes are no .npy file") from error
    if not isinstance(parsed, np.ndarray) or parsed.shape != tuple(array.shape) or str(parsed.dtype) != array.dtype:
        raise ValueError("the array's bytes are not of the dtype and shape they are labelled with")
    return parsed


MAX_DTYPE, MAX_DIMENSIONS = 16, 64
"""Most characters of a dtype's name, and most dimensions of an array; NumPy's own limit is 64."""


_dtype_name = lru_cache(maxsize=64)(str)
"""Return the name of a dtype. NumPy composes it anew on each call."""


@lru_cache(maxsize=4096)
def _npy_layout(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, np.dtype, int]:
    """Return the `.npy` header of a C-ordered array, its dtype, and its data size in bytes.

    Raises:
        ValueError: the dtype or the shape is not that of an array of numbers.
    """
    # NumPy takes minutes and gigabytes for a dtype of millions of fields.
    if len(dtype) > MAX_DTYPE or len(shape) > MAX_DIMENSIONS:
        raise ValueError("the array's dtype or shape is not that of an array of numbers")
    try:
        kind = np.dtype(dtype)
    except Exception as error:  # np.dtype parses expressions, and raises several types
        raise ValueError("the array's dtype is unknown") from error
    if kind.kind not in "fiub" or any(not 0 <= extent < 2**63 for extent in shape):
        raise ValueError("the array's dtype or shape is not that of an array of numbers")
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue(), kind, math.prod(shape) * kind.itemsize


def aligned(shape: Sequence[int], dtype: DTypeLike) -> NDArray:
    """Allocate an uninitialized array in memory aligned to `ALIGNMENT`.

    Args:
        shape: of the array.
        dtype: of its numbers.
    """
    length = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(length + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length].view(dtype).reshape(shape)


def to_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """Return an `ArrayRecord` over the arrays, which must not be changed afterwards."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = Array(np.asarray(array))
    return record


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """Return the arrays of a record by name, read-only."""
    return {name: view(array) for name, array in record.items()}


@dataclass(frozen=True)
class Layout:
    """Positions of the named arrays of a model in the flat vector of its p parameters.

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
        """Return the layout of a model's arrays.

        Raises:
            FederationError: there are none, or one does not hold floats, which cannot carry noise.
        """
        if not arrays:
            raise FederationError("the model has no arrays")
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                raise FederationError(f"array {name!r} has dtype {array.dtype}; only float arrays can be federated")
        return cls(
            tuple(arrays),
            tuple(array.shape for array in arrays.values()),
            tuple(_dtype_name(array.dtype) for array in arrays.values()),
            tuple(accumulate((array.size for array in arrays.values()), initial=0)),
        )

    @property
    def size(self) -> int:
        """Return the number p of parameters."""
        return self.offsets[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of parameters in each array."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def dtype(self) -> DTypeLike:
        """Return the dtype of arithmetic on the flat vector: float32, or float64 if an array has it."""
        return np.result_type(np.float32, *self.dtypes)

    def rows(self, arrays: Mapping[str, NDArray]) -> "Row":
        """Return each array as a flat piece, in the layout's order; views if memory allows."""
        return tuple(np.ravel(arrays[name]) for name in self.names)

    def named(self, row: "Row") -> dict[str, NDArray]:
        """Return the arrays of a row by name, in shape and dtype: the inverse of `rows`."""
        pieces = zip(self.names, row, self.dtypes, self.shapes, strict=True)
        return {name: piece.astype(dtype, copy=False).reshape(shape) for name, piece, dtype, shape in pieces}


Row = tuple[NDArray, ...]
"""A vector of p parameters, as one flat array per named array of the model."""


def stacked(models: Sequence[Mapping[str, NDArray]]) -> dict[str, NDArray]:
    """Return the arrays of several models in one mapping, by hypothesis and name."""
    return {f"{number}/{name}": array for number, model in enumerate(models) for name, array in model.items()}


def unstacked(arrays: Mapping[str, NDArray]) -> list[dict[str, NDArray]]:
    """Return the models in a record: the inverse of `stacked`.

    Raises:
        FederationError: the names are not those of hypotheses 0 to k - 1, all with the same arrays.
    """
    models: dict[str, dict[str, NDArray]] = {}
    for path, array in arrays.items():
        number, _, name = path.partition("/")
        models.setdefault(number, {})[name] = array
    hypotheses = [models.get(str(number), {}) for number in range(len(models))]
    if not hypotheses or any(set(model) != set(hypotheses[0]) or not model for model in hypotheses):
        raise FederationError("the record does not hold hypotheses 0 to k - 1 with the same arrays each")
    return hypotheses


State = Mapping[str, NDArray]
"""Arrays by name; numbers are arrays without dimensions."""
HOOKS = ("state_dict", "load_state_dict")
OURS = __name__.partition(".")[0]


@runtime_checkable
class Stateful(Protocol):
    """An object with state between rounds and between processes."""

    def state_dict(self) -> State:
        """Return the state that the next round needs beyond the run configuration."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""


def declares_state(value: object, hooks: tuple[str, str] = HOOKS) -> bool:
    """Return True if the class of a value declares its own state.

    Inherited hooks cover only the state of the class that defines them. Subclasses within Cloister rely on that. In
    another package each resumable class needs hooks of its own.

    Args:
        value: a strategy, or another kind of plugin.
        hooks: the names of the two methods.
    """
    for kind in type(value).__mro__:
        if vars(kind).keys() >= set(hooks):
            return True
        if kind.__module__.partition(".")[0] != OURS:
            return False
    return False


def joined(parts: Mapping[str, State]) -> dict[str, NDArray]:
    """Return several states in one: array `name` of a part is named `part/name`."""
    return {f"{name}/{key}": array for name, state in parts.items() for key, array in state.items()}


def part(state: State, name: str) -> dict[str, NDArray]:
    """Return one of the states given to `joined`; empty if it was empty.

    Args:
        state: result of `joined`.
        name: of the part.
    """
    prefix = f"{name}/"
    return {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}


Tensor = Any
"""A `tf.Tensor` of any shape and dtype, or a NumPy array that TensorFlow accepts in its place."""
Variable = Any
"""A `keras.Variable`: weights of a model, or the state of a random layer or an optimizer."""
Layer = Any
"""A `keras.Layer` that is built; a model is one too."""
Network = Any
"""A `keras.Model` that is built."""
Optimizer = Any
"""A `keras.optimizers.Optimizer`."""
Compiled = Any
"""A function compiled by `tf.function`, from tensors to tensors."""


def is_seed(variable: Variable) -> bool:
    """Return True if a variable is the integer state of a random generator."""
    return variable.path.endswith("seed_generator_state") and "int" in str(variable.dtype)
