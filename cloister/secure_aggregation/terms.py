"""Terms of the attempt at a round: one text on which all parties agree before any input is unmasked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from cloister.core import check
from cloister.secure_aggregation.canonical import text
from cloister.secure_aggregation.graph import Complete
from cloister.secure_aggregation.messages import Cohort
from cloister.secure_aggregation.ring import RINGS
from cloister.secure_aggregation.roster import Roster

HASH = 32
"""Bytes of a hash, by SHA-256."""


@dataclass(frozen=True)
class Terms:
    """Parameters of the one attempt at a round, fixed before it begins.

    Each party takes the terms from its own configuration. Members with different terms refuse each other's keys.

    Args:
        run: id of the run.
        round: number of the round.
        graph: the complete graph, with threshold and collusion.
        length: p, numbers in a vector.
        bits: of the ring, 32 or 64. The caller ensures that every sum fits.
        roster: digest of the roster. Each party sets that of its own roster, by `under`.
    """

    run: str
    round: int
    graph: Complete
    length: int
    bits: int = 32
    roster: bytes = b""

    def __post_init__(self) -> None:
        check.positive(length=self.length)
        check.one_of({"32", "64"}, bits=str(self.bits))

    def under(self, roster: Roster) -> Self:
        """Return these terms bound to the digest of `roster`.

        Another roster gives another text to sign.
        """
        return replace(self, roster=roster.digest)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a number in the ring."""
        return RINGS[self.bits]

    @cached_property
    def encoded(self) -> bytes:
        """Encode the terms as bytes."""
        graph = self.graph.items()
        return text("terms", self.run, self.round, graph, self.length, self.bits, self.roster)

    def advertisement(self, name: str, mask_key: bytes, seal_key: bytes) -> bytes:
        """Return the text that a member signs with its keys for this attempt.

        Args:
            name: of the member.
            mask_key: its public key for masks.
            seal_key: its public key for sealed shares.
        """
        return text("advertisement", self.encoded, name, mask_key, seal_key)

    def binding(self, cohort: Cohort) -> bytes:
        """Return the hash, 32 bytes, of the terms and all members' keys.

        Every derived key depends on it.
        """
        return hashlib.sha256(text("binding", self.encoded, cohort.encode())).digest()

    def sharers(self, binding: bytes, noise: bytes, names: Sequence[str]) -> bytes:
        """Return the text that a member signs with its masked input.

        It contains the terms of the input's noise and the list of sharers.

        Args:
            binding: of the cohort.
            noise: terms of the noise.
            names: of the members that sent shares, as the server lists them.
        """
        return text("sharers", binding, noise, tuple(names))

    def survivors(self, binding: bytes, noise: bytes, names: Sequence[str]) -> bytes:
        """Return the text that survivors sign.

        It contains terms, keys, guarantee, noise and the list of survivors.

        Args:
            binding: of the cohort.
            noise: terms of the noise; opaque bytes that must be equal for all.
            names: of the survivors.
        """
        return text("survivors", self.encoded, binding, self.graph.honest, noise, tuple(names))
