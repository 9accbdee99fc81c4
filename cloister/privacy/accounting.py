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

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import gaussian_mechanism, pld
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.events import UNSAMPLED, Event, Gaussian, Relation, Repeated, Sampling

Accountant = Literal["rdp", "pld", "published"]

LARGE = (80, 96, 112, 128, 160, 192, 256, 512, 1024)
FINE = tuple(sorted({*rdp_privacy_accountant.DEFAULT_RDP_ORDERS, *LARGE}))
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
            curve = curve + count * sampled_curve(event, self.relation, choice)
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
        return float(rdp_privacy_accountant.compute_epsilon(*self._curve(), delta)[0])

    def _rdp_delta(self, epsilon: float) -> float:
        return float(rdp_privacy_accountant.compute_delta(*self._curve(), epsilon)[0])

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
            return float(gaussian_mechanism.get_epsilon_gaussian(self._unsampled_multiplier(), delta))
        return float(self._losses().get_epsilon(delta))

    def _pld_delta(self, epsilon: float) -> float:
        if not self._sampled:
            # dp-accounting has no public form of the curve that its `get_epsilon_gaussian` inverts.
            return math.exp(gaussian_mechanism._get_log_delta(self._unsampled_multiplier(), epsilon))
        return float(self._losses().get_delta(epsilon))

    def _losses(self) -> pld.PLDAccountant:
        """The privacy loss distribution of the events."""
        if not self.has_pld:
            raise PrivacyError("pld covers neither draws without replacement nor very many different sampled releases")
        replace = self.relation == "replace-one"
        accountant = pld.PLDAccountant(
            NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE,
            max(LOSS_STEP, self._rdp_epsilon(SMALL_DELTA) / LOSS_STEPS),
        )
        if self._precision:
            # dp-accounting's loss distributions double the shift under replace-one themselves.
            accountant.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(self._precision)))
        for event, count in self._sampled.items():
            accountant.compose(_as_dp_event(event), count)
        return accountant


@functools.lru_cache(maxsize=4096)
def sampled_curve(event: Gaussian, relation: Relation, orders: tuple[float, ...] = FINE) -> NDArray[np.float64]:
    """Rényi divergence of one sampled release at each order.

    A draw never tells more than a release without one: divergences are quasi-convex. That holds where dp-accounting
    finds no number, or one above it (draws without replacement of a large share), and for Poisson draws under
    replace-one, for which no curve is known here.
    """
    # dp-accounting's Rényi accountant takes the multiplier as it is under either relation: halve it here.
    halved = event.noise_multiplier / (1 if relation == "add-or-remove" else 2)
    unsampled = np.array(orders) / (2 * halved**2)
    if relation == "replace-one" and event.sampling.kind == "poisson":
        return unsampled
    rule = NeighboringRelation.ADD_OR_REMOVE_ONE if relation == "add-or-remove" else NeighboringRelation.REPLACE_ONE
    accountant = rdp_privacy_accountant.RdpAccountant(orders, rule)
    sampled = _as_dp_event(Gaussian(halved, event.sampling))
    with _absl_silenced():
        accountant.compose(sampled)
    # The curve has no public accessor; this project pins the version it is read from.
    curve: NDArray[np.float64] = np.minimum(accountant._rdp, unsampled)
    return curve


def _as_dp_event(event: Gaussian) -> dp_accounting.DpEvent:
    inner, sampling = dp_accounting.GaussianDpEvent(event.noise_multiplier), event.sampling
    if sampling.kind == "poisson":
        return dp_accounting.PoissonSampledDpEvent(sampling.probability, inner)
    return dp_accounting.SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, inner)


@contextmanager
def _absl_silenced() -> Iterator[None]:
    """Without the warnings about fractional orders that do not converge: those orders are left out, as they should."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
