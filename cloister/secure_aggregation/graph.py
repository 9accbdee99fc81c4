"""Who shares secrets and masks with whom, and what is guaranteed for it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import Item

COMPLETE_UP_TO = 100
"""Members for whom everybody shares with everybody."""
MAX_FAILURE = 2.0**-40
"""Largest probability, for each cohort that a member is told, that a graph drawn at random does not protect."""


@dataclass(frozen=True)
class Graph(ABC):
    """What a choice of peers needs and guarantees.

    Args:
        threshold: t. Without t survivors who sign, nothing is unmasked.
        colluding: c. The server together with up to c members learns nothing but the sum.
    """

    threshold: int
    colluding: int

    def require(self, members: int) -> None:
        """Refuse a cohort for which nothing is guaranteed.

        Two lists of survivors with t signatures each have 2t − n signers in common. More than c of them mean an honest
        one, who signs once. So 2t > n + c leaves room for one list only.

        Args:
            members: n, everybody in the cohort.

        Raises:
            ProtocolError: the threshold is larger than n, or 2t ≤ n + c.
        """
        if self.threshold > members or 2 * self.threshold <= members + self.colluding:
            raise ProtocolError(
                f"a cohort must have {self.threshold} to {2 * self.threshold - self.colluding - 1} members, for a"
                f" threshold of {self.threshold} with {self.colluding} colluding members; found {members}"
            )

    @property
    @abstractmethod
    def needed(self) -> int:
        """How many shares give a member's secret back."""

    @abstractmethod
    def degree(self, members: int) -> int:
        """How many peers each member of a cohort chooses."""

    @abstractmethod
    def honest(self, members: int) -> int:
        """The number of honest inputs, at least, in whatever sum the server can learn: h.

        Args:
            members: n, everybody in the cohort that this member was told: the server chooses it.
        """

    @abstractmethod
    def failure(self, members: int) -> float:
        """The probability that the guarantee does not hold, to be added to δ for every cohort that a member is told.

        Args:
            members: n, everybody in the cohort. A server may tell members different cohorts in one attempt.
        """

    @abstractmethod
    def items(self) -> tuple[Item, ...]:
        """What stands in the terms that members sign."""

    def choose(self, name: str, cohort: Collection[str]) -> frozenset[str]:
        """Draw a member's peers by the operating system's entropy: neither the server nor another member decides them.

        Args:
            name: of the member who chooses.
            cohort: all names, this one included.
        """
        others = sorted(set(cohort) - {name})
        return frozenset(SystemRandom().sample(others, self.degree(len(cohort))))


@dataclass(frozen=True)
class Complete(Graph):
    """Everybody shares with everybody: h = t − c, for certain."""

    @property
    def needed(self) -> int:
        """How many shares give a member's secret back: t."""
        return self.threshold

    def degree(self, members: int) -> int:
        """How many peers each member has: everybody else."""
        return members - 1

    def honest(self, members: int) -> int:
        """The number of honest inputs, at least: of t survivors at most c collude."""
        return self.threshold - self.colluding

    def failure(self, members: int) -> float:
        """The probability that the guarantee does not hold: 0."""
        return 0.0

    def items(self) -> tuple[Item, ...]:
        """What stands in the terms: the kind, t and c."""
        return "complete", self.threshold, self.colluding


@dataclass(frozen=True)
class Sparse(Graph):
    """Each member shares with some peers that it draws by itself, as in Bell et al. (2020).

    A member has its masks in common with the peers that it chose and with those that chose it; its secrets it shares
    with those that it chose. As in the complete graph all members agree on one list of survivors.

    Args:
        peers: k, how many peers each member chooses.
        shares: how many shares give a secret back; the member has one itself.

    Guarantee:
        Up to a probability of `failure`, the server learns one sum only, with more than half of the honest members.
        `docs/secure_aggregation.md` has the proof.
    """

    peers: int
    shares: int

    def require(self, members: int) -> None:
        """Refuse a cohort for which nothing, or too little, is guaranteed.

        Raises:
            ProtocolError: 2t ≤ n + c, or the graph fails too often.
        """
        super().require(members)
        if not (1 < self.shares <= self.peers + 1 <= members and self.failure(members) <= MAX_FAILURE):
            raise ProtocolError(
                f"{self.peers} peers and {self.shares} shares do not protect {members} members of whom"
                f" {self.colluding} collude"
            )

    @property
    def needed(self) -> int:
        """How many shares give a member's secret back, as configured."""
        return self.shares

    def degree(self, members: int) -> int:
        """How many peers each member chooses, as configured."""
        return self.peers

    def honest(self, members: int) -> int:
        """The number of honest inputs, at least: more than half of the honest members."""
        return (members - self.colluding) // 2 + 1

    def failure(self, members: int) -> float:
        """A bound on the probability that some small group of honest members could be summed by itself."""
        return float(_failures(members, self.colluding, self.peers)[self.shares])

    def items(self) -> tuple[Item, ...]:
        """What stands in the terms: the kind, t, c, k and the number of shares."""
        return "sparse", self.threshold, self.colluding, self.peers, self.shares

    def loss(self, members: int, answering: int) -> float:
        """A bound on the probability that an honest round cannot be unmasked.

        Args:
            members: n.
            answering: members who answer the last message; the others are assumed to fail at random.
        """
        from scipy.stats import hypergeom

        short = hypergeom.cdf(self.shares - 1, members - 1, answering - 1, self.peers)
        return min(1.0, members * float(short))


def graph_for(members: int, threshold: int, colluding: int, answering: int, loss: float = 1e-3) -> Graph:
    """The graph for a cohort: the complete one up to 100 members, above that the sparsest that protects and works.

    Args:
        members: n.
        threshold: t.
        colluding: c.
        answering: how many members are expected to answer the last message, at least t.
        loss: largest probability that a round with so many answers cannot be unmasked.

    Raises:
        ProtocolError: 2t ≤ n + c.
    """
    complete = Complete(threshold, colluding)
    complete.require(members)
    if members <= COMPLETE_UP_TO:
        return complete
    for peers in range(2, members - 1):
        safe = np.flatnonzero(_failures(members, colluding, peers) <= MAX_FAILURE)
        if safe.size and safe[0] > 1:
            graph = Sparse(threshold, colluding, peers, int(safe[0]))
            if graph.loss(members, answering) <= loss:
                return graph
    return complete


@lru_cache(maxsize=256)
def _failures(members: int, colluding: int, peers: int) -> NDArray:
    """For each number of shares, 0 to `peers` + 1: the failure probability of the graph.

    It fails if some s honest members, at most half of them, could recover the secrets of all s with the c who collude
    and nobody else: each of the s has drawn shares − 1 peers or more among the s − 1 others and the c. The draws are
    independent, each hypergeometric. The bound adds up over all sets of every size.
    """
    from scipy.special import gammaln, logsumexp
    from scipy.stats import hypergeom

    honest = members - colluding
    size = np.arange(1, honest // 2 + 1)[:, None]
    drawn = np.arange(peers + 1)[None, :]
    density = hypergeom.logpmf(drawn, members - 1, size - 1 + colluding, peers)
    tail = np.logaddexp.accumulate(density[:, ::-1], axis=1)[:, ::-1]
    sets = gammaln(honest + 1) - gammaln(size + 1) - gammaln(honest - size + 1)
    total = logsumexp(sets + size * np.minimum(tail, 0.0), axis=0)
    # Shares - 1 peers are needed: the member has the first share itself.
    return np.exp(np.minimum(0.0, np.concatenate([[math.inf], total])))
