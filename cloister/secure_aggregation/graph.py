"""Graphs of members that share secrets and masks, with their guarantees."""

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
"""Largest cohort with a complete graph."""
MAX_FAILURE = 2.0**-40
"""Largest failure probability of a random graph, for each cohort that a member receives."""


@dataclass(frozen=True)
class Graph(ABC):
    """A rule for choosing peers, with its requirements and guarantees.

    Args:
        threshold: t. The sum is unmasked only if t survivors sign.
        colluding: c. The server together with up to c members learns only the sum.
    """

    threshold: int
    colluding: int

    def require(self, members: int) -> None:
        """Refuse a cohort without a guarantee.

        Two lists of survivors with t signatures each have at least 2t − n signers in common. If these are more than c,
        one of them is honest, and it signs once. So 2t > n + c permits one list only.

        Args:
            members: n, size of the cohort.

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
        """Number of shares that recover a member's secret."""

    @abstractmethod
    def degree(self, members: int) -> int:
        """Return the number of peers that each member of a cohort chooses."""

    @abstractmethod
    def honest(self, members: int) -> int:
        """Return h, a lower bound on the honest inputs in every sum that the server can learn.

        Args:
            members: n, size of the cohort that this member received: the server chooses it.
        """

    @abstractmethod
    def failure(self, members: int) -> float:
        """Return the probability that the guarantee fails.

        δ grows by it for every cohort that a member receives.

        Args:
            members: n, size of the cohort. A server may send members different cohorts in one attempt.
        """

    @abstractmethod
    def items(self) -> tuple[Item, ...]:
        """Return the items for the terms that members sign."""

    def choose(self, name: str, cohort: Collection[str]) -> frozenset[str]:
        """Draw a member's peers from the operating system's entropy.

        Neither the server nor another member controls the choice.

        Args:
            name: of the member that chooses.
            cohort: all names, including this one.
        """
        others = sorted(set(cohort) - {name})
        return frozenset(SystemRandom().sample(others, self.degree(len(cohort))))


@dataclass(frozen=True)
class Complete(Graph):
    """The complete graph: every member shares with every other one. h = t − c, with certainty."""

    @property
    def needed(self) -> int:
        """Number of shares that recover a member's secret: t."""
        return self.threshold

    def degree(self, members: int) -> int:
        """Return the number of peers of each member, n − 1."""
        return members - 1

    def honest(self, members: int) -> int:
        """Return the least number of honest inputs: of t survivors at most c collude."""
        return self.threshold - self.colluding

    def failure(self, members: int) -> float:
        """Return the probability that the guarantee fails: 0."""
        return 0.0

    def items(self) -> tuple[Item, ...]:
        """Return the items for the terms: the kind, t and c."""
        return "complete", self.threshold, self.colluding


@dataclass(frozen=True)
class Sparse(Graph):
    """A sparse graph: each member shares with some peers that it draws itself, as in Bell et al. (2020).

    A member has masks in common with the peers that it chose and with the members that chose it. It shares its secrets
    with the peers that it chose. As in the complete graph, all members agree on one list of survivors.

    Args:
        peers: k, number of peers that each member chooses.
        shares: number of shares that recover a secret; the member itself holds one.

    Guarantee:
        Up to a probability of `failure`, the server learns one sum only, with more than half of the honest members, if
        the c colluding members are fixed before the draw.

    Proof:
        All members agree on one list of survivors, as in the complete graph (`require`), and all honest survivors
        received one list of sharers, with all survivors in it. So a survivor has the masks of all survivors that it
        drew. Honest peers show one kind of share of each member: the mask key of a survivor is not recovered, nor the
        own mask of any other member. The sum of the vectors of a set S of honest survivors is exposed only if the own
        masks of all of S are recovered, and S has no mask in common with an honest survivor outside S. So no member of
        S drew such a survivor as a peer. An own mask takes `shares` shares, and only survivors, colluding members and
        the member itself show any. So each member of S drew `shares` - 1 peers or more among S and the colluding ones.
        For one set of s members the draws are independent, each hypergeometric; the bound adds up the probability over
        all sets with s ≤ (n - c)/2. Up to this probability every exposed sum has more than half of the honest members,
        and there is one only, for two would overlap. The same event covers colluding members who hold enough shares of
        one secret. In Bell et al. neighbourhoods agree on survivors, not the cohort; their h is αn.

        Each attempt is a new draw, and its probability counts. Within an attempt a server can send members different
        cohorts, one to each, and continue with one whose draws suit it. So an attempt counts at most as often as there
        are members on the roster. The server chooses n too, among all that `require` accepts. h falls with n, and
        before the cohort is known it is at least ⌊(t - c)/2⌋ + 1.
    """

    peers: int
    shares: int

    def require(self, members: int) -> None:
        """Refuse a cohort without a guarantee, or with too large a failure probability.

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
        """Number of shares that recover a member's secret, as configured."""
        return self.shares

    def degree(self, members: int) -> int:
        """Return the number of peers that each member chooses, as configured."""
        return self.peers

    def honest(self, members: int) -> int:
        """Return the least number of honest inputs: more than half of the honest members."""
        return (members - self.colluding) // 2 + 1

    def failure(self, members: int) -> float:
        """Bound the probability that a small group of honest members can be summed alone."""
        return float(_failures(members, self.colluding, self.peers)[self.shares])

    def items(self) -> tuple[Item, ...]:
        """Return the items for the terms: the kind, t, c, k and the number of shares."""
        return "sparse", self.threshold, self.colluding, self.peers, self.shares

    def loss(self, members: int, answering: int) -> float:
        """Return a bound on the probability that an honest round cannot be unmasked.

        Args:
            members: n.
            answering: members that answer the last message; the others are assumed to fail at random.
        """
        from scipy.stats import hypergeom

        short = hypergeom.cdf(self.shares - 1, members - 1, answering - 1, self.peers)
        return min(1.0, members * float(short))


def graph_for(members: int, threshold: int, colluding: int, answering: int, loss: float = 1e-3) -> Graph:
    """Return the graph for a cohort.

    Up to 100 members it is the complete graph, otherwise the sparsest graph that is safe and reliable. Without such a
    graph, it is the complete one.

    Args:
        members: n.
        threshold: t.
        colluding: c.
        answering: expected number of members that answer the last message, at least t.
        loss: largest probability that a round with this number of answers cannot be unmasked.

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
    """Return the failure probability for each number of shares, 0 to `peers` + 1.

    The graph fails if some s honest members, at most half of them, and the c colluding ones can alone recover the
    secrets of all s. Then each of the s has drawn at least shares − 1 peers among the s − 1 others and the c. The draws
    are independent, each hypergeometric. The bound sums over all sets of every size.
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
    # Shares - 1 peers are needed: the member itself holds the first share.
    return np.exp(np.minimum(0.0, np.concatenate([[math.inf], total])))
