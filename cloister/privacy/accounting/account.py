"""Composition of events to ε(δ) and δ(ε), on dp-accounting.

    events ──▶ Account ──▶ epsilon(δ), delta(ε)      by `rdp`, `pld` or `published`

**Accountants.** `rdp`: Rényi DP with the tight conversion (Canonne, Kamath, Steinke, 2020, Proposition 12). `pld`:
privacy loss distributions, tighter; events without sampling compose to one Gaussian exactly, whose curve has a closed
form (Balle, Wang, 2018, Theorem 8). `published`: Rényi DP with the classic conversion (Mironov, 2017, Proposition
3), as papers of 2017 to 2020 used it, to compare with their tables.

**Relations.** Noise multipliers are relative to adding or removing one unit. Replacing one unit moves a sum twice as
far, so every multiplier is halved for `replace-one`, which dp-accounting's Rényi accountant leaves to its caller. A
pure ε is doubled.

**Prices.** Each event returns its own price for every accountant (`events.PRICES`), so that all accountants cover all
kinds of events.

**Composition.** The smallest ε over Rényi orders, or a convolution of loss distributions, holds for releases whose
parameters are fixed beforehand. If parameters depend on earlier releases, one of
`cloister.privacy.accounting.filters` keeps the budget.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import KINDS, MAX_PURE, Event, accountants
from cloister.privacy.accounting.vocabulary import Losses, Relation, units_of
from cloister.utils import check
from cloister.utils.errors import ConfigError, PrivacyError

Accountant = Literal["rdp", "pld", "published"]

LARGE = (80, 96, 112, 128, 160, 192, 256, 512, 1024)
FINE = tuple(sorted({*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), *LARGE}))
"""Rényi orders for few different releases: dp-accounting's own, and orders for a small ε."""
COARSE = (1.5, 2.5, 3.5, *range(2, 20), *range(20, 40, 2), *range(40, 80, 5), *LARGE)
"""Rényi orders for many different releases: few and mostly integers, for speed. Fewer orders can only increase ε."""
MAX_CURVES = 32
"""Most distinct sampled releases that are accounted for separately; above this number only `rdp` applies."""
SMALL_DELTA = 1e-15
"""δ at which ε stands for the largest privacy loss."""
LOSS_STEP = 1e-4
"""Resolution of a privacy loss distribution, as dp-accounting has it by default."""
LOSS_STEPS = 10**5
"""Most steps of the largest loss. If `LOSS_STEP` needs more, steps are longer, to limit time and memory. Losses are
rounded up, so that this can only increase ε."""
LONGEST_STEP = 700.0
"""Longest step of a privacy loss distribution: dp-accounting computes its exponential, which is below 10^308."""


class Account:
    """Composition of events, under one neighbouring relation.

    Args:
        events: initial events.
        relation: neighbouring relation of datasets.
        insiders: whether clients may be adversaries, each of which can see whether a draw contains it. All of them
            together can then infer the other members of a cohort of fixed size: such draws amplify nothing against
            them.

    Events can only be added, never removed.

    Examples:
        Ten rounds of Gaussian noise with z = 4:

        >>> from cloister.privacy.accounting.events import Gaussian
        >>> rounds = Account().plus(Gaussian(4.0), 10)
        >>> round(rounds.epsilon(1e-5, "rdp"), 2), round(rounds.epsilon(1e-5, "pld"), 2)
        (3.62, 3.34)
        >>> Account([Gaussian(0.0)]).epsilon(1e-5)
        inf
    """

    def __init__(
        self, events: Iterable[Event] = (), relation: Relation = "add-or-remove", insiders: bool = False
    ) -> None:
        check.one_of(("add-or-remove", "replace-one"), relation=relation)
        self.relation = relation
        self.insiders = insiders
        self._precision = 0.0  # Σ 1/z² of the releases that are one Gaussian together; ∞ where one has no bound
        self._others: Counter[Event] = Counter()  # releases with curves of their own
        self._leakage = 0.0
        self._overflow = 0.0
        for event in events:
            self._add(event)

    def plus(self, event: Event, count: int = 1) -> "Account":
        """Return a new account with an additional event; this one stays unchanged.

        Args:
            event: to add.
            count: number of repetitions.
        """
        check.non_negative(count=count)
        # A shallow copy suffices: the only mutable state is the counts, and they are copied too.
        account = copy(self)
        account._others = self._others.copy()
        account._add(event, count)
        return account

    def _add(self, event: Event, count: int = 1) -> None:
        """Add an event; raise PrivacyError if its type is not registered."""
        # The exact type: a subclass may have other prices.
        if type(event) not in KINDS.values():
            raise PrivacyError(f"no accountant has a price for an event of type {type(event).__name__}")
        if not count:
            return
        release, times = event.parts()
        count *= times
        multiplier = release.multiplier(self.relation, self.insiders)
        if multiplier is None:
            self._others[release] += count
        else:
            self._precision += count / multiplier**2 if multiplier else math.inf
        self._leakage += count * release.leakage
        self._overflow += count * release.overflow

    def epsilon(self, delta: float, accountant: Accountant = "rdp") -> float:
        """Return the least ε shown for (ε, δ)-DP of the events; ∞ if none.

        Args:
            delta: δ, above 0 and below 1.
            accountant: to use.

        Raises:
            ConfigError: δ is not above 0 and below 1.
            PrivacyError: the accountant does not apply to these events.
        """
        if not 0 < delta < 1:
            raise ConfigError(f"delta must be above 0 and below 1, got {delta}")
        if self.is_unbounded:
            return math.inf
        if self.is_empty:
            return 0.0
        check.one_of(get_args(Accountant), accountant=accountant)
        if delta <= self._overflow:
            return math.inf
        delta -= self._overflow
        if accountant == "rdp":
            found = self._rdp_epsilon(delta)
        elif accountant == "published":  # min over α of RDP(α) + ln(1/δ)/(α - 1)
            orders, curve = self._curve()
            found = float(np.min(curve - math.log(delta) / (orders - 1)))
        elif self.is_unsampled:
            found = accountants().gaussian_epsilon(self._unsampled_multiplier(), delta)
        else:
            found = float(self._losses().get_epsilon_for_delta(delta))
        return max(0.0, found)

    def delta(self, epsilon: float, accountant: Accountant = "rdp") -> float:
        """Return the least δ shown for (ε, δ)-DP of the events; 1 if none.

        Args:
            epsilon: ε ≥ 0.
            accountant: to use.
        """
        check.non_negative(epsilon=epsilon)
        if self.is_unbounded:
            return 1.0
        if self.is_empty:
            return 0.0
        check.one_of(get_args(Accountant), accountant=accountant)
        if accountant == "rdp":
            found = accountants().rdp_delta(*self._curve(), epsilon)
        elif accountant == "published":  # min over α of exp((α - 1)(RDP(α) - ε))
            orders, curve = self._curve()
            found = math.exp(min(0.0, float(np.min((orders - 1) * (curve - epsilon)))))
        elif self.is_unsampled:
            found = accountants().gaussian_delta(self._unsampled_multiplier(), epsilon)
        else:
            found = float(self._losses().get_delta_for_epsilon(epsilon))
        return min(1.0, found + self._overflow)

    def renyi(self, order: float) -> float:
        """Return the Rényi divergence of all events together; ∞ without a bound."""
        return math.inf if self.is_unbounded else float(self._divergences((order,))[0])

    def mu_squared(self) -> float:
        """Return μ² of Gaussian DP of all events together; ∞ without a bound.

        Draws do not amplify. A release over a draw is no more distinguishable than one without, so that 1/z bounds μ of
        any Gaussian release.
        """
        others = sum(count * event.mu_squared(self.relation) for event, count in self._others.items())
        return float(self._precision * units_of(self.relation) ** 2 + others)

    @property
    def overflow(self) -> float:
        """Return Σ of the probabilities that a release violates its event (`Event.overflow`)."""
        return self._overflow

    def leakage(self) -> float:
        """Return Σ of the releases' leakages (d-privacy); ∞ without a bound."""
        return self._leakage

    @property
    def is_unbounded(self) -> bool:
        """Return whether the events contain a release without a bound."""
        return math.isinf(self._precision)

    @property
    def is_empty(self) -> bool:
        """Return whether there are no events."""
        return not (self._precision or self._others)

    @property
    def has_pld(self) -> bool:
        """Return whether `pld` applies.

        It excludes draws without replacement, very many different releases, a huge pure ε, and sampled releases whose
        losses need steps above `LONGEST_STEP`.
        """
        if self.is_unsampled:
            return True
        known = all(event.has_losses(self.relation) for event in self._others)
        return known and len(self._others) <= MAX_CURVES and self._loss_step() <= LONGEST_STEP

    @property
    def is_unsampled(self) -> bool:
        """Return whether all releases are one Gaussian, without amplification."""
        return not self._others

    def _unsampled_multiplier(self) -> float:
        """Return z of the Gaussian that composes all unsampled releases; 0: none."""
        return 1 / units_of(self.relation) / math.sqrt(self._precision) if self._precision else 0.0

    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return Rényi orders α, and the divergence at each."""
        choice = FINE if len(self._others) <= MAX_CURVES else COARSE
        return np.array(choice, np.float64), self._divergences(choice)

    def _divergences(self, choice: tuple[float, ...]) -> NDArray[np.float64]:
        """Return the Rényi divergence at each order."""
        orders = np.array(choice, np.float64)
        multiplier = self._unsampled_multiplier()
        # All releases without a draw are one Gaussian, whose divergence has a closed form.
        curve = orders / (2 * multiplier**2) if multiplier else np.zeros_like(orders)
        for event, count in self._grouped().items():
            curve = curve + count * event.renyi(choice, self.relation)
        return curve

    def _grouped(self) -> Counter[Event]:
        """Return the releases with curves, grouped by similar cost if there are many."""
        if len(self._others) <= MAX_CURVES:
            return self._others
        groups: Counter[Event] = Counter()
        for event, count in self._others.items():
            groups[event.rounded()] += count
        return groups

    def _rdp_epsilon(self, delta: float) -> float:
        return accountants().rdp_epsilon(*self._curve(), delta)

    def _losses(self) -> Losses:
        """Return the privacy loss distribution of the events."""
        if not self.has_pld:
            raise PrivacyError(
                "pld covers neither draws without replacement, nor very many different sampled releases, nor a pure ε "
                f"above {MAX_PURE:g}, nor sampled releases with an ε above {LONGEST_STEP * LOSS_STEPS:g}"
            )
        step = self._loss_step()
        unsampled = 1 / math.sqrt(self._precision) if self._precision else 0.0
        return accountants().composed_losses(unsampled, self._others, self.relation, step)

    def _loss_step(self) -> float:
        """Return the length of a step of the privacy loss distribution."""
        return max(LOSS_STEP, self._rdp_epsilon(SMALL_DELTA) / LOSS_STEPS)


def composed(events: Mapping[Event, int], relation: Relation, insiders: bool) -> Account:
    """Return the account of several kinds of events.

    Args:
        events: number of repetitions of each.
        relation, insiders: as in `Account`.
    """
    account = Account((), relation, insiders)
    for event, count in events.items():
        account = account.plus(event, count)
    return account


def best_epsilon(account: Account, delta: float) -> tuple[float, Accountant]:
    """Return ε by the fast sound accountant for these events, and its name.

    Gaussian events without sampling have a closed form (`pld`); other events use `rdp`, which is additive. For events
    with sampling, `by_accountant` may show a smaller ε.

    Args:
        account: of the events.
        delta: δ, above 0 and below 1.
    """
    accountant: Accountant = "pld" if account.is_unsampled else "rdp"
    return account.epsilon(delta, accountant), accountant


def by_accountant(account: Account, delta: float) -> dict[str, float]:
    """Return ε at δ by each applicable sound accountant.

    Args:
        account: of the events.
        delta: δ, above 0 and below 1.
    """
    names: tuple[Accountant, ...] = ("rdp", "pld") if account.has_pld else ("rdp",)
    return {name: account.epsilon(delta, name) for name in names}
