"""Values of a claim about the privacy of a run, without their words."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cloister.privacy.accounting.account import Account, by_accountant
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import GROUP, word_for
from cloister.privacy.claims.premises import Premise
from cloister.privacy.mechanisms.distributed.shares import COLLUDING
from cloister.utils.errors import PrivacyError

Status = Literal["none", "sound", "conditional", "heuristic"]
CLIENT_BUDGET = "privacy.client-max-epsilon"
"""The parameter that holds the budget which a run gives its clients, where it gives one."""
EVERYBODY = "everybody but the client itself: the server, the other clients, and any party that sees the models"
"""Adversary of a claim about a client that adds noise by itself."""


@dataclass(frozen=True)
class Figure:
    """One number of a claim: how much an adversary can learn at most, and about whom. None: it does not apply.

    Attributes:
        unit: whose data it is about.
        relation: which datasets count as neighbours.
        neighbours: the same for this unit, in words.
        adversary: against whom it holds.
        scope: of which releases it is.
        epsilon, delta: what is claimed; δ = 0 is pure differential privacy.
        accountant: that shows ε: the tightest of those that apply.
        by_accountant: ε by each of them.
        premises: that it rests on beside those of its claim.
        counts: what it counts beside what was released.
        budget: whether ε is that of a budget, which `filter` keeps and of which the share `spent` is spent.
        noise_multiplier: of each release, as it is counted.
        steps, releases: how many were counted.
        holders: clients that hold data of one unit, at most; the releases of all of them are counted together. None:
            that is not known, and the releases of one client are counted.
        sampling: how units were drawn, in words.
        guarantee: where it is not (ε, δ): d-privacy, with its leakage within a radius.
        status, reasons, formula: of a figure that is no guarantee.
    """

    unit: str
    relation: str | None = None
    neighbours: str | None = None
    adversary: str | None = None
    scope: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    accountant: str | None = None
    by_accountant: Mapping[str, float] | None = None
    premises: tuple[Premise, ...] = ()
    counts: str | None = None
    budget: bool | None = None
    filter: str | None = None
    spent: float | None = None
    noise_multiplier: float | None = None
    steps: int | None = None
    releases: int | None = None
    holders: int | None = None
    sampling: str | None = None
    guarantee: str | None = None
    radius: float | None = None
    leakage: float | None = None
    status: Status | None = None
    reasons: tuple[str, ...] | None = None
    formula: str | None = None

    @property
    def bound(self) -> float:
        """ε; infinity where there is none, of a figure that is about (ε, δ): no number bounds what can be learnt."""
        return math.inf if self.epsilon is None else self.epsilon

    @property
    def is_shared(self) -> bool:
        """Return whether several clients hold data of one unit."""
        return self.holders is not None and self.holders > 1

    def counted(self, account: Account, delta: float) -> "Figure":
        """This figure with ε at δ by the tightest accountant, and by every other that applies.

        Args:
            account: of the releases that it is about.
            delta: at which ε is computed.
        """
        found = by_accountant(account, delta)
        tightest = min(found, key=lambda name: found[name])
        return replace(self, epsilon=found[tightest], delta=delta, accountant=tightest, by_accountant=found)


@dataclass(frozen=True)
class Claim:
    """The guarantee of one mechanism, or why there is none.

    Attributes:
        mechanism: its name, as in `privacy.server` or `privacy.client`.
        reasons: why the claim is only heuristic; empty if it is sound.
        unit: whose data the claim is about.
        relation: which cohorts count as neighbours.
        unprotected: what leaves without noise.
        not_covered: clients that the claim is not about; empty: it is about all that took part.
        premises: that each figure of the claim rests on: at least one beside standing assumptions. What a run has not
            shown, or not yet, is `assumed`.
        parameters: of the mechanism, by their configuration keys.
        seeded: whether the noise can be repeated by any party that knows its seed.
        figures: what is claimed in numbers, once it is known; none where nothing is sound.
        by_provisioner: members of a secure aggregation whose signing keys the provisioner made; None: not known yet.
    """

    mechanism: str
    reasons: tuple[str, ...] = ()
    unit: str = "client"
    relation: str = "add-or-remove"
    unprotected: tuple[str, ...] = ()
    parameters: dict[str, float | str | bool] = field(default_factory=dict)
    seeded: bool = False
    figures: tuple[Figure, ...] = ()
    not_covered: str = ""
    premises: tuple[Premise, ...] = ()
    by_provisioner: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.mechanism != "none" and all(premise.standing for premise in self.premises):
            raise PrivacyError(f"the claim about {self.mechanism} has no premise beside standing assumptions")

    def word_for(self, unit: str) -> str:
        """Return the word for a unit in a text: for a group, the name of the run's column."""
        return word_for(unit, self.parameters.get(GROUP))

    @property
    def word(self) -> str:
        """Return the word for the claim's own unit."""
        return self.word_for(self.unit)

    @property
    def status(self) -> Status:
        """`none`; `heuristic` where a reason speaks against it; `conditional` on an open premise; else `sound`."""
        if self.mechanism == "none":
            return "none"
        if self.reasons:
            return "heuristic"
        return "conditional" if any(premise.is_open for premise in self.premises) else "sound"

    @property
    def is_guaranteed(self) -> bool:
        """Return whether the claim is a theorem about this run, with or without a condition."""
        return self.status in ("sound", "conditional")

    @property
    def is_against_server(self) -> bool:
        """Return whether the claim holds against the server: it learns a sum, and no single update."""
        return COLLUDING in self.parameters

    @property
    def counts_one_share(self) -> bool:
        """Return whether the provisioner made more keys than members may collude: then one share of noise counts."""
        return self.is_against_server and len(self.by_provisioner or ()) > int(self.parameters[COLLUDING])

    @property
    def epsilon(self) -> float | None:
        """The largest ε that is claimed; None without one."""
        return max((figure.epsilon for figure in self.figures if figure.epsilon is not None), default=None)


@dataclass(frozen=True)
class LocalClaim(Claim):
    """The guarantee of a client that noises its own update.

    Attributes:
        adversary: against whom it holds.
        leakage_of_a_release: within its neighbourhood, under Laplace noise; None under other noise, or without any.
    """

    adversary: str = ""
    leakage_of_a_release: float | None = None

    def without_guarantee(self, reasons: Iterable[str]) -> "LocalClaim":
        """The claim where there are these reasons against it too."""
        found = tuple(reasons)
        return replace(self, reasons=(*self.reasons, *found), figures=()) if found else self

    def counting(self, counts: str) -> "LocalClaim":
        """The claim, whose figures count this beside what was released."""
        return replace(self, figures=tuple(replace(figure, counts=counts) for figure in self.figures))


@dataclass(frozen=True)
class OfSize:
    """What DP-SGD is worth on a client of one size.

    Attributes:
        size: of the client, in units.
        rounds: in which it trained.
        figures: that are claimed.
        heuristic: figures that are no guarantee, each with its reasons.
    """

    size: int
    rounds: int
    figures: tuple[Figure, ...] = ()
    heuristic: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class DpSgdClaim(Claim):
    """The guarantee of clients that train with DP-SGD.

    Attributes:
        sizes: of clients that figures are given for: what a client has really spent, its own ledger knows.
        known: whether these are sizes that clients of the run have; else they are examples of sizes.
    """

    sizes: tuple[OfSize, ...] = ()
    known: bool = False

    @property
    def nobody_trained(self) -> bool:
        """Return whether the figures are of no round at all."""
        return bool(self.sizes) and not any(size.rounds for size in self.sizes)

    @property
    def by_size(self) -> dict[int, Figure]:
        """The figure about one unit with the largest ε, by the size of the client, in the order of sizes."""
        found = [
            (size.size, figure)
            for size in self.sizes
            for figure in size.figures
            if figure.unit == self.unit and figure.epsilon is not None
        ]
        return dict(sorted(found, key=lambda each: (each[0], each[1].epsilon)))

    def without_guarantee(self, reasons: Iterable[str]) -> "DpSgdClaim":
        """The claim where there are these reasons against it too."""
        found = tuple(reasons)
        sizes = tuple(replace(size, figures=()) for size in self.sizes)
        return replace(self, reasons=(*self.reasons, *found), sizes=sizes) if found else self

    def counting(self, counts: str) -> "DpSgdClaim":
        """The claim, whose figures count this beside what was released."""
        sizes = (
            replace(size, figures=tuple(replace(figure, counts=counts) for figure in size.figures))
            for size in self.sizes
        )
        return replace(self, sizes=tuple(sizes))


ClientClaim = LocalClaim | DpSgdClaim


@dataclass(frozen=True)
class LedgerState:
    """What of a ledger belongs to a claim.

    Attributes:
        file: its name.
        head: the hash of its last line.
        releases_of_this_run: how many lines are of the run.
        holds_releases_without_a_guarantee: about the same unit, of any run.
        lasting: whether other runs on the data are in it too; it is in the directory of the run alone elsewhere.
        others: names under which data at the same place has ledgers of its own, which nothing here counts; None: there
            are none.
    """

    file: str
    head: str
    releases_of_this_run: int
    holds_releases_without_a_guarantee: bool
    lasting: bool = True
    others: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Statement:
    """Everything that may be said about a run that has ended.

    Attributes:
        claim: about the mechanism on the server, with its figures.
        rounds: how many there were.
        sampling: how their cohorts were drawn, in words.
        ledger: as the run left it.
        clients: about the mechanism on the clients; None without one.
        planned: events that count beside those in the ledger, each with how often: they were planned, and the run was
            ended before by a person who sees its models, or by a rule about them.
        simulated: whether one process played the clients: the claim is about the protocol, and not about people.
    """

    claim: Claim
    rounds: int
    sampling: str
    ledger: LedgerState
    clients: ClientClaim | None = None
    planned: tuple[tuple[Event, int], ...] = ()
    simulated: bool = False

    @property
    def released_nothing(self) -> bool:
        """Return whether the run ended before the server's mechanism had released anything, or could have."""
        releases = self.rounds or self.ledger.releases_of_this_run or self.planned
        return self.claim.is_guaranteed and not releases
