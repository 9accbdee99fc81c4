"""The terms of one attempt: one text that all parties have before anything is unmasked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from cloister.core import check
from cloister.secure_aggregation.canonical import text
from cloister.secure_aggregation.graph import Graph
from cloister.secure_aggregation.messages import Cohort
from cloister.secure_aggregation.ring import RINGS
from cloister.secure_aggregation.roster import Roster

HASH = 32
"""Bytes of a hash, by SHA-256."""
EARLY, ORDINARY = 1, 2
"""The attempts at a round: one that begins while the round before goes on, and one that begins by itself after it."""


@dataclass(frozen=True)
class Terms:
    """What is fixed before an attempt at a round begins.

    Each party has its own terms from its own configuration. Members with different terms do not accept each other's
    keys.

    Args:
        run: of which run.
        round: number of the round.
        attempt: which one at it: `EARLY` or `ORDINARY`. None is made twice, and one of the two at most has vectors.
        graph: who shares with whom; threshold and collusion.
        length: p, numbers in a vector.
        bits: of the ring, 32 or 64. No sum may leave it: the caller sees to that.
        roster: digest of the roster. Each party puts in that of its own, by `under`.
    """

    run: str
    round: int
    attempt: int
    graph: Graph
    length: int
    bits: int = 32
    roster: bytes = b""

    def __post_init__(self) -> None:
        check.positive(length=self.length)
        check.one_of({"32", "64"}, bits=str(self.bits))

    def under(self, roster: Roster) -> Self:
        """The same terms for those who know this roster: whoever has another one signs something else."""
        return replace(self, roster=roster.digest)

    @property
    def dtype(self) -> np.dtype:
        """How a number in the ring is kept."""
        return RINGS[self.bits]

    @cached_property
    def encoded(self) -> bytes:
        """The terms as bytes."""
        graph = self.graph.items()
        return text("terms", self.run, self.round, self.attempt, graph, self.length, self.bits, self.roster)

    def advertisement(self, name: str, mask_key: bytes, seal_key: bytes) -> bytes:
        """The text that a member signs with its keys for this attempt.

        Args:
            name: of the member.
            mask_key: its public key for masks.
            seal_key: its public key for sealed shares.
        """
        return text("advertisement", self.encoded, name, mask_key, seal_key)

    def binding(self, cohort: Cohort) -> bytes:
        """The hash, 32 bytes, of the terms and everybody's keys: every key that is derived depends on it."""
        return hashlib.sha256(text("binding", self.encoded, cohort.encode())).digest()

    def sharers(self, binding: bytes, noise: bytes, names: Sequence[str]) -> bytes:
        """The text that a member signs with its masked input: what noise is in it, and with whom it may share masks.

        Args:
            binding: of the cohort.
            noise: terms of the noise.
            names: of those who have sent shares, as the server tells them.
        """
        return text("sharers", binding, noise, tuple(names))

    def survivors(self, binding: bytes, members: int, noise: bytes, names: Sequence[str]) -> bytes:
        """The text that survivors sign: terms, keys, what is guaranteed, the noise, and the list of survivors.

        Args:
            binding: of the cohort.
            members: in the cohort.
            noise: terms of the noise, which mean nothing here but must be the same for all.
            names: of the survivors.
        """
        return text("survivors", self.encoded, binding, self.graph.honest(members), noise, tuple(names))
