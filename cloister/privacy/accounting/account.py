"""From events to ε(δ) and δ(ε), on dp-accounting.

    events ──▶ Account ──▶ epsilon(δ), delta(ε)      by `rdp`, `pld`, `gdp`, or `published`

**Accountants.** `rdp`: Rényi DP with today's conversion (Canonne, Kamath, Steinke, 2020, Proposition 12). `pld`:
privacy loss distributions, tighter; events without sampling compose to one Gaussian exactly, whose curve is known
in closed form (Balle, Wang, 2018, Theorem 8). `gdp`: Gaussian DP, in which everything is one Gaussian of μ² = Σ μᵢ²,
whatever was drawn (Dong, Roth, Su, 2022). `published`: Rényi DP with the classic conversion (Mironov, 2017,
Proposition 3), as papers of 2017 to 2020 used it, to compare with their tables.

**Relations.** Noise multipliers are relative to adding or removing one unit. Replacing one unit moves a sum twice as
far, so every multiplier is halved for `replace-one`; dp-accounting's Rényi accountant does not do that by itself. A
pure ε is doubled.

**Composition.** The smallest ε over Rényi orders, or a convolution of loss distributions, holds for releases whose
parameters were fixed beforehand. Where somebody chooses them by what earlier releases showed, a budget is kept by one
of `cloister.privacy.accounting.filters`.
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
from cloister.privacy.accounting.events import Event, Gaussian, Laplace, Pure, Relation, Repeated, Sampling, Unaccounted

Accountant = Literal["rdp", "pld", "gdp", "published"]

LARGE = (80, 96, 112, 128, 160, 192, 256, 512, 1024)
FINE = tuple(sorted({*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), *LARGE}))
"""Rényi orders for few different releases: dp-accounting's own, and those that a small ε needs."""
COARSE = (1.5, 2.5, 3.5, *range(2, 20), *range(20, 40, 2), *range(40, 80, 5), *LARGE)
"""Rényi orders for many: few, and mostly whole ones, which cost less. Fewer orders can only make ε larger."""
MAX_CURVES = 32
"""Distinct sampled releases up to which each is accounted for by itself; above, only `rdp` answers."""
SMALL_DELTA = 1e-15
"""ε at this δ stands for the largest loss there is."""
LOSS_STEP = 1e-4
"""Resolution of a privacy loss distribution, as dp-accounting has it by default."""
LOSS_STEPS = 10**5
"""Steps that the largest loss may take. Where `LOSS_STEP` would need more, time and memory would run out, and steps are
longer: losses are rounded up, so that this can only make ε larger."""
MAX_PURE = 500.0
"""The largest pure ε of which dp-accounting makes a loss distribution: its e^ε overflows soon after."""
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
        self._pure: Counter[float] = Counter()  # by what ε is under this relation
        self._unbounded = False
        for event in events:
            self._add(event)

    def plus(self, event: Event, count: int = 1) -> "Account":
        """A new account with an event more, `count` times; this one stays as it is."""
        check.non_negative(count=count)
        account = copy(self)
        account._sampled, account._pure = self._sampled.copy(), self._pure.copy()
        account._add(event, count)
        return account

    def _add(self, event: Event, count: int = 1) -> None:
        """Raises PrivacyError if no accountant has a price for such an event."""
        if type(event) not in PRICED:
            raise PrivacyError(f"no accountant has a price for an event of type {type(event).__name__}")
        if count:
            PRICED[type(event)](self, event, count)

    def _add_repeated(self, event: Repeated, count: int) -> None:
        self._add(event.event, event.count * count)

    def _add_pure(self, event: Pure, count: int) -> None:
        self._pure[event.epsilon * (1 if self.relation == "add-or-remove" else 2)] += count

    def _add_unbounded(self, event: Event, count: int) -> None:
        self._unbounded = True

    def _add_gaussian(self, event: Gaussian, count: int) -> None:
        kind = event.sampling.kind
        if event.noise_multiplier == 0:
            self._unbounded = True
        elif kind == "without-replacement" and self.relation == "add-or-remove":
            # With one unit more in the population, a draw may hold it instead of another: a replacement, unamplified.
            self._precision += count / (event.noise_multiplier / 2) ** 2
        elif kind == "none" or _share(event.sampling) == 1 or (self.insiders and kind == "without-replacement"):
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
        if self.is_empty:
            return 0.0
        by: dict[str, Callable[[float], float]] = {
            "rdp": self._rdp_epsilon,
            "pld": self._pld_epsilon,
            "gdp": self._gdp_epsilon,
            "published": self._published_epsilon,
        }
        check.one_of(by, accountant=accountant)
        return max(0.0, float(by[accountant](delta)))

    def delta(self, epsilon: float, accountant: Accountant = "rdp") -> float:
        """The least δ for which the events are (ε, δ)-DP, as far as this accountant can show; 1 if it can show none."""
        check.non_negative(epsilon=epsilon)
        if self._unbounded:
            return 1.0
        if self.is_empty:
            return 0.0
        by: dict[str, Callable[[float], float]] = {
            "rdp": self._rdp_delta,
            "pld": self._pld_delta,
            "gdp": self._gdp_delta,
            "published": self._published_delta,
        }
        check.one_of(by, accountant=accountant)
        return min(1.0, float(by[accountant](epsilon)))

    def renyi(self, order: float) -> float:
        """Rényi divergence of this order of everything together; ∞ where there is no bound."""
        if self._unbounded:
            return math.inf
        return float(self._divergences((order,))[0])

    def mu_squared(self) -> float:
        """μ² of Gaussian DP of everything together, draws counting for nothing; ∞ where there is no bound.

        A draw never tells more than a release without one, so that 1/z bounds μ of any Gaussian release.
        """
        if self._unbounded:
            return math.inf
        sampled = sum(count / event.noise_multiplier**2 for event, count in self._sampled.items())
        pure = sum(count * _accountants().pure_parameter(epsilon) ** 2 for epsilon, count in self._pure.items())
        return float((self._precision + sampled) * (1 if self.relation == "add-or-remove" else 4) + pure)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was released."""
        return not (self._precision or self._sampled or self._pure or self._unbounded)

    @property
    def has_pld(self) -> bool:
        """Whether `pld` applies: not to draws without replacement, very many different releases, or a huge pure ε."""
        kinds = {event.sampling.kind for event in self._sampled}
        few = len(self._sampled) + len(self._pure) <= MAX_CURVES
        return "without-replacement" not in kinds and few and max(self._pure, default=0.0) <= MAX_PURE

    @property
    def is_unsampled(self) -> bool:
        """Whether every release is a Gaussian that claims nothing from a draw; then they are one Gaussian together."""
        return not self._sampled and not self._pure

    def _unsampled_multiplier(self) -> float:
        """z of the one Gaussian that all releases without sampling amount to; 0 if there are none."""
        halving = 1.0 if self.relation == "add-or-remove" else 0.5
        return halving / math.sqrt(self._precision) if self._precision else 0.0

    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rényi orders α, and the divergence at each."""
        choice = FINE if len(self._sampled) <= MAX_CURVES else COARSE
        return np.array(choice, np.float64), self._divergences(choice)

    def _divergences(self, choice: tuple[float, ...]) -> NDArray[np.float64]:
        """The Rényi divergence at each order."""
        orders = np.array(choice, np.float64)
        multiplier = self._unsampled_multiplier()
        curve = orders / (2 * multiplier**2) if multiplier else np.zeros_like(orders)
        for event, count in self._grouped().items():
            curve = curve + count * _accountants().sampled_curve(event, self.relation, choice)
        for epsilon, count in self._pure.items():
            curve = curve + count * _accountants().pure_curve(epsilon, choice)
        return curve

    def _grouped(self) -> Counter[Gaussian]:
        """The sampled releases; where they are many, those with nearly the same multiplier together."""
        if len(self._sampled) <= MAX_CURVES:
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

    def _gdp_epsilon(self, delta: float) -> float:
        return _accountants().gaussian_epsilon(1 / math.sqrt(self.mu_squared()), delta)

    def _gdp_delta(self, epsilon: float) -> float:
        return _accountants().gaussian_delta(1 / math.sqrt(self.mu_squared()), epsilon)

    def _pld_epsilon(self, delta: float) -> float:
        if self.is_unsampled:
            return _accountants().gaussian_epsilon(self._unsampled_multiplier(), delta)
        return float(self._losses().get_epsilon_for_delta(delta))

    def _pld_delta(self, epsilon: float) -> float:
        if self.is_unsampled:
            return _accountants().gaussian_delta(self._unsampled_multiplier(), epsilon)
        return float(self._losses().get_delta_for_epsilon(epsilon))

    def _losses(self) -> Any:
        """The privacy loss distribution of the events."""
        if not self.has_pld:
            raise PrivacyError(
                "pld covers neither draws without replacement, nor very many different sampled releases, nor a pure ε "
                f"above {MAX_PURE:g}"
            )
        step = max(LOSS_STEP, self._rdp_epsilon(SMALL_DELTA) / LOSS_STEPS)
        unsampled = 1 / math.sqrt(self._precision) if self._precision else 0.0
        return _accountants().losses(unsampled, self._sampled, self._pure, self.relation, step)


PRICED: dict[type, Callable[[Account, Any, int], None]] = {
    Gaussian: Account._add_gaussian,
    Repeated: Account._add_repeated,
    Pure: Account._add_pure,
    # Against all other vectors, however far, noise of density exp(-ε‖x‖) promises nothing.
    Laplace: Account._add_unbounded,
    Unaccounted: Account._add_unbounded,
}
"""How each kind of event enters an account, from which every accountant and every filter takes its price."""


def _accountants() -> Any:
    """dp-accounting, when ε is asked for: it takes SciPy along, and whoever only records needs neither."""
    from cloister.privacy.accounting import accountants

    return accountants


def _share(sampling: Sampling) -> float:
    """The share of units that take part in a release on average."""
    if sampling.kind == "without-replacement":
        return sampling.cohort / sampling.population
    return sampling.probability


def _rounded_down(multiplier: float) -> float:
    return float(2 ** (math.floor(GRID * math.log2(multiplier)) / GRID))


def best_epsilon(account: Account, delta: float) -> tuple[float, Accountant]:
    """The smallest ε that a sound accountant shows for these events quickly, and which one it was.

    Gaussian events without sampling have a closed form (`pld`); for others it is `rdp`, which is additive.
    """
    accountant: Accountant = "pld" if account.is_unsampled else "rdp"
    return account.epsilon(delta, accountant), accountant


def by_accountant(account: Account, delta: float) -> dict[str, float]:
    """ε at δ by each sound accountant for parameters fixed beforehand, where it applies."""
    names: tuple[Accountant, ...] = ("rdp", "pld") if account.has_pld else ("rdp",)
    return {name: account.epsilon(delta, name) for name in names}
