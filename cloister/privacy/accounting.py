"""From events to ε(δ) and δ(ε), on dp-accounting.

    events ──▶ Account ──▶ epsilon(δ), delta(ε)      by `rdp`, by `pld`, or `published`
    (ε, δ, rounds) ──▶ noise_multiplier ; (z, ε, δ) ──▶ rounds

**Accountants.** `rdp`: Rényi DP with today's conversion (Canonne, Kamath, Steinke, 2020, Proposition 12). `pld`:
privacy loss distributions, tighter; events without sampling compose to one Gaussian exactly, whose curve is known
in closed form (Balle, Wang, 2018, Theorem 8). `published`: Rényi DP with the classic conversion (Mironov, 2017,
Proposition 3), as papers of 2017 to 2020 used it, to compare with their tables.

**Relations.** Noise multipliers are relative to adding or removing one unit. Replacing one unit moves a sum twice as
far, so every multiplier is halved for `replace-one`; dp-accounting's Rényi accountant does not do that by itself.

**Composition.** A sum of Rényi curves, or a convolution of loss distributions, holds for multipliers fixed beforehand.
Where a mechanism chooses its multiplier from earlier releases, what is recorded is the least it can be.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.events import UNSAMPLED, Event, Gaussian, Relation, Repeated, Sampling

Accountant = Literal["rdp", "pld", "published"]

LARGE = (80, 96, 112, 128, 160, 192, 256, 512, 1024)
FINE = tuple(sorted({*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), *LARGE}))
"""Rényi orders for few different releases: dp-accounting's own, and those that a small ε needs."""
COARSE = (1.5, 2.5, 3.5, *range(2, 20), *range(20, 40, 2), *range(40, 80, 5), *LARGE)
"""Rényi orders for many: few, and mostly whole ones, which cost less. Fewer orders can only make ε larger."""
MOST_CURVES = 32
"""Distinct sampled releases up to which each is accounted for by itself; above, only `rdp` answers."""
SMALL_DELTA = 1e-15
"""ε at this δ stands for the largest loss there is."""
LOSS_STEP = 1e-4
"""Resolution of a privacy loss distribution, as dp-accounting has it by default."""
LOSS_STEPS = 10**5
"""Steps that the largest loss may take. Where `LOSS_STEP` would need more, time and memory would run out, and steps are
longer: losses are rounded up, so that this can only make ε larger."""
GRID = 128
"""Steps per doubling to which the multipliers of more sampled releases than that are rounded down, so that rounds that
differ a little share their cost: ε comes out a little too large, never too small."""


class Account:
    """The composition of events, under one neighbouring relation.

    Args:
        events: to start with.
        relation: which datasets are neighbours.
        insiders: whether the adversary may be clients who know of each draw whether they were in it. All of them
            together then know who else was in a cohort of a fixed size: such draws amplify nothing against them.

    An account never forgets: there is no way to remove an event.
    """

    def __init__(
        self, events: Iterable[Event] = (), relation: Relation = "add-or-remove", insiders: bool = False
    ) -> None:
        check.one_of(("add-or-remove", "replace-one"), relation=relation)
        self.relation = relation
        self.insiders = insiders
        self._precision = 0.0  # Σ 1/z² of the releases without sampling: together they are one Gaussian
        self._sampled: Counter[Gaussian] = Counter()
        self._unbounded = False
        for event in events:
            self._add(event)

    def plus(self, event: Event, count: int = 1) -> "Account":
        """A new account with an event more, `count` times; this one stays as it is."""
        check.non_negative(count=count)
        account = copy(self)
        account._sampled = self._sampled.copy()
        account._add(event, count)
        return account

    def _add(self, event: Event, count: int = 1) -> None:
        if count == 0:
            return
        if isinstance(event, Repeated):
            self._add(event.event, event.count * count)
        elif not isinstance(event, Gaussian) or event.noise_multiplier == 0:
            # Also a Laplace release: against all other vectors, however far, it promises nothing.
            self._unbounded = True
        elif event.sampling.kind == "without-replacement" and self.relation == "add-or-remove":
            # With one unit more in the population, a draw may hold it instead of another: a replacement, unamplified.
            self._precision += count / (event.noise_multiplier / 2) ** 2
        elif (
            event.sampling.kind == "none"
            or _share(event.sampling) == 1
            or (self.insiders and event.sampling.kind == "without-replacement")
        ):
            self._precision += count / event.noise_multiplier**2
        else:
            self._sampled[event] += count

    def epsilon(self, delta: float, accountant: Accountant = "rdp") -> float:
        """The least ε for which the events are (ε, δ)-DP, as far as this accountant can show; ∞ if it can show none.

        Raises:
            ConfigError: δ is not above 0 and below 1.
            PrivacyError: the accountant does not apply to these events.
        """
        if not 0 < delta < 1:
            raise ConfigError(f"delta must be above 0 and below 1, got {delta}")
        if self._unbounded:
            return math.inf
        if not self._precision and not self._sampled:
            return 0.0
        by: dict[str, Callable[[float], float]] = {
            "rdp": self._rdp_epsilon,
            "pld": self._pld_epsilon,
            "published": self._published_epsilon,
        }
        check.one_of(by, accountant=accountant)
        return max(0.0, float(by[accountant](delta)))

    def delta(self, epsilon: float, accountant: Accountant = "rdp") -> float:
        """The least δ for which the events are (ε, δ)-DP, as far as this accountant can show; 1 if it can show none."""
        check.non_negative(epsilon=epsilon)
        if self._unbounded:
            return 1.0
        if not self._precision and not self._sampled:
            return 0.0
        by: dict[str, Callable[[float], float]] = {
            "rdp": self._rdp_delta,
            "pld": self._pld_delta,
            "published": self._published_delta,
        }
        check.one_of(by, accountant=accountant)
        return min(1.0, float(by[accountant](epsilon)))

    @property
    def has_pld(self) -> bool:
        """Whether `pld` applies: not to draws without replacement, nor to very many different sampled releases."""
        kinds = {event.sampling.kind for event in self._sampled}
        return "without-replacement" not in kinds and len(self._sampled) <= MOST_CURVES

    @property
    def is_unsampled(self) -> bool:
        """Whether no release claims anything from sampling; then all of them together are one Gaussian."""
        return not self._sampled

    def _unsampled_multiplier(self) -> float:
        """z of the one Gaussian that all releases without sampling amount to; 0 if there are none."""
        halving = 1.0 if self.relation == "add-or-remove" else 0.5
        return halving / math.sqrt(self._precision) if self._precision else 0.0

    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rényi orders α, and the divergence at each."""
        choice = FINE if len(self._sampled) <= MOST_CURVES else COARSE
        orders = np.array(choice, np.float64)
        multiplier = self._unsampled_multiplier()
        curve = orders / (2 * multiplier**2) if multiplier else np.zeros_like(orders)
        for event, count in self._grouped().items():
            curve = curve + count * _accountants().sampled_curve(event, self.relation, choice)
        return orders, curve

    def _grouped(self) -> Counter[Gaussian]:
        """The sampled releases; where they are many, those with nearly the same multiplier together."""
        if len(self._sampled) <= MOST_CURVES:
            return self._sampled
        groups: Counter[Gaussian] = Counter()
        for event, count in self._sampled.items():
            groups[Gaussian(_rounded_down(event.noise_multiplier), event.sampling)] += count
        return groups

    def _rdp_epsilon(self, delta: float) -> float:
        return _accountants().rdp_epsilon(*self._curve(), delta)

    def _rdp_delta(self, epsilon: float) -> float:
        return _accountants().rdp_delta(*self._curve(), epsilon)

    def _published_epsilon(self, delta: float) -> float:
        """min over α of RDP(α) + ln(1/δ)/(α - 1)."""
        orders, curve = self._curve()
        return float(np.min(curve - math.log(delta) / (orders - 1)))

    def _published_delta(self, epsilon: float) -> float:
        """min over α of exp((α - 1)(RDP(α) - ε))."""
        orders, curve = self._curve()
        return math.exp(min(0.0, float(np.min((orders - 1) * (curve - epsilon)))))

    def _pld_epsilon(self, delta: float) -> float:
        if not self._sampled:
            return _accountants().gaussian_epsilon(self._unsampled_multiplier(), delta)
        return float(self._losses().get_epsilon(delta))

    def _pld_delta(self, epsilon: float) -> float:
        if not self._sampled:
            return _accountants().gaussian_delta(self._unsampled_multiplier(), epsilon)
        return float(self._losses().get_delta(epsilon))

    def _losses(self) -> Any:
        """The privacy loss distribution of the events."""
        if not self.has_pld:
            raise PrivacyError("pld covers neither draws without replacement nor very many different sampled releases")
        step = max(LOSS_STEP, self._rdp_epsilon(SMALL_DELTA) / LOSS_STEPS)
        unsampled = 1 / math.sqrt(self._precision) if self._precision else 0.0
        return _accountants().losses(unsampled, self._sampled, self.relation, step)


def _accountants() -> Any:
    """dp-accounting, when ε is asked for: it takes SciPy along, and whoever only records needs neither."""
    from cloister.privacy import accountants

    return accountants


def _share(sampling: Sampling) -> float:
    """The share of units that take part in a release on average."""
    if sampling.kind == "without-replacement":
        return sampling.cohort / sampling.population
    return sampling.probability


def _rounded_down(multiplier: float) -> float:
    return float(2 ** (math.floor(GRID * math.log2(multiplier)) / GRID))


def noise_multiplier_for(
    epsilon: float, delta: float, rounds: int, sampling: Sampling = UNSAMPLED, relation: Relation = "add-or-remove"
) -> float:
    """The least z, to one part in a thousand, with which `rounds` releases are (ε, δ)-DP.

    Raises:
        ConfigError: ε, δ or the rounds are out of range, or no z up to 10⁶ will do.
    """
    check.positive(epsilon=epsilon, rounds=rounds)

    def spent(multiplier: float) -> float:
        return best_epsilon(Account(relation=relation).plus(Gaussian(multiplier, sampling), rounds), delta)[0]

    return least_multiplier(spent, epsilon)


def least_multiplier(spent: Callable[[float], float], epsilon: float) -> float:
    """The least z, to one part in a thousand, for which the falling function `spent` gives at most ε.

    Raises:
        ConfigError: no z up to 10⁶ does.
    """
    low, high = 1e-3, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise ConfigError(f"no noise multiplier up to 1e6 stays within ε = {epsilon:g}")
    while high - low > 1e-3 * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


def rounds_for(
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    sampling: Sampling = UNSAMPLED,
    relation: Relation = "add-or-remove",
) -> int:
    """How many releases with z stay within (ε, δ)."""
    check.positive(epsilon=epsilon, noise_multiplier=noise_multiplier)
    event = Gaussian(noise_multiplier, sampling)

    def fits(rounds: int) -> bool:
        return rounds == 0 or best_epsilon(Account(relation=relation).plus(event, rounds), delta)[0] <= epsilon

    high = 1
    while fits(high) and high < 2**40:
        high *= 2
    low = 0 if high == 1 else high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def best_epsilon(account: Account, delta: float) -> tuple[float, Accountant]:
    """The smallest ε that a sound accountant shows for these events quickly, and which one it was.

    Events without sampling have a closed form (`pld`); for sampled ones it is `rdp`, which is additive.
    """
    accountant: Accountant = "pld" if account.is_unsampled else "rdp"
    return account.epsilon(delta, accountant), accountant
