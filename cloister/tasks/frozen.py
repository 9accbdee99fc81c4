"""The part of a model that is neither trained nor sent: what server and nodes compare before they train around it."""

import hashlib
from dataclasses import dataclass

import numpy as np

from cloister.core.wire import FROZEN
from cloister.tasks.base import Model


def frozen_digest(model: Model) -> str:
    """SHA-256 of the frozen weights of a model; empty where it has none.

    It is equal for equal names, shapes, dtypes and bits, in whatever order.
    """
    arrays = model.frozen()
    if not arrays:
        return ""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(repr((name, array.shape, array.dtype.str)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def told_of(model: Model) -> dict[str, str]:
    """What the messages of a run say of the frozen weights; nothing where the model has none."""
    digest = frozen_digest(model)
    return {FROZEN: digest} if digest else {}


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model has.

    Attributes:
        sent: of weights that are sent, and noised where there is noise.
        frozen: of weights that every site has for itself.
        digest: SHA-256 of the latter; empty: there are none.
    """

    sent: int
    frozen: int
    digest: str

    @classmethod
    def of(cls, model: Model) -> "Parameters":
        """Those of a model."""
        sent, frozen = (sum(array.size for array in arrays.values()) for arrays in (model.arrays(), model.frozen()))
        return cls(sent, frozen, frozen_digest(model))

    def __str__(self) -> str:
        if not self.frozen:
            return f"{self.sent:,} parameters"
        return f"{self.sent:,} parameters trained and sent, {self.frozen:,} frozen (SHA-256 {self.digest[:12]}…)"
