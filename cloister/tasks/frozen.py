"""Digest of the weights that are neither trained nor sent: server and nodes compare it before training."""

import hashlib
from dataclasses import dataclass

import numpy as np

from cloister.core.wire import FROZEN
from cloister.tasks.base import Model


def frozen_digest(model: Model) -> str:
    """Return the SHA-256 of a model's frozen weights; empty without any.

    It is equal for equal names, shapes, dtypes and bits, in any order.
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
    """Return the message fields for the frozen weights: their digest, if any."""
    digest = frozen_digest(model)
    return {FROZEN: digest} if digest else {}


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model.

    Attributes:
        sent: number of parameters that are sent, with noise if a mechanism adds some.
        frozen: number of parameters that every site builds for itself.
        digest: SHA-256 of the frozen weights; empty: there are none.
    """

    sent: int
    frozen: int
    digest: str

    @classmethod
    def of(cls, model: Model) -> "Parameters":
        """Count the parameters of a model."""
        sent, frozen = (sum(array.size for array in arrays.values()) for arrays in (model.arrays(), model.frozen()))
        return cls(sent, frozen, frozen_digest(model))

    def __str__(self) -> str:
        if not self.frozen:
            return f"{self.sent:,} parameters"
        return f"{self.sent:,} parameters trained and sent, {self.frozen:,} frozen (SHA-256 {self.digest[:12]}…)"
