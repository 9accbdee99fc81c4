"""Privacy filters: limits that keep a budget (ε, δ) for adaptively chosen releases.

    (ε, δ) ──▶ filter, fixed beforehand ──▶ limit;   event ──▶ cost;   released only while Σ costs ≤ limit

The parameters of a release may depend on earlier releases: an operator inspects a model before the next run, or a
server picks the noise and steps of a message from replies. Then neither the smallest ε over Rényi orders afterwards nor
a loss distribution of such parameters is a guarantee. Under one of these filters, all releases together are (ε, δ)-DP,
for any adaptive choice and any stopping time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from cloister.privacy.accounting.account import FINE, Account
from cloister.privacy.accounting.events import Event, accountants
from cloister.privacy.accounting.vocabulary import MAX_MULTIPLIER, OVERFLOW, Relation
from cloister.utils import check
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.files import Json
from cloister.utils.text import at_least

FilterKind = Literal["gaussian", "renyi"]
ROUNDING = 1e-12
"""Relative tolerance of a sum of leakages at its limit: ten releases of 0.4 are 4."""
RESERVE = 2.0**-10
"""Share of δ that is reserved for draws without a claim (`Sampling.overflow`)."""
EXACT = 1e-9
"""Share of a limit that calibration leaves unspent: a ledger adds costs one by one, and rounds each time."""


class Filter(ABC):
    """Privacy filter: the limit of a budget, and the spending of an account relative to it."""

    @abstractmethod
    def limit(self, epsilon: float, delta: float) -> float:
        """Return the largest spending under a budget.

        Args:
            epsilon: ε of the budget.
            delta: δ of the budget.
        """

    @abstractmethod
    def spent(self, account: Account) -> float:
        """Return the spending of an account; ∞ without a bound."""

    def refusal(self, before: float, after: float, epsilon: float, delta: float, owner: str) -> str:
        """Return the message for a release that would exceed a budget.

        Args:
            before: spending without the release.
            after: spending with the release.
            epsilon: ε of the budget.
            delta: δ of the budget.
            owner: of the account.
        """
        if math.isinf(after):
            return (
                f"{owner} holds, or would hold, releases for which nothing can be claimed: no ε up to {epsilon:g} "
                "covers them. Runs without this budget go on, and their own claims hold. If this is other data, or "
                "those runs were simulations whose results are neither published nor used, give the data another "
                "name: privacy.data-identity of a run, data-identity of a node"
            )
        shares = [100 * share(spent, self.limit(epsilon, delta)) for spent in (before, after)]
        rise, left = "from {:.4g} % to {:.4g} %".format(*shares), at_least(max(0.0, 100 - shares[0]))
        return (
            f"the next release would bring what is spent {rise}, past the budget of {epsilon:g} at δ = {delta:g} "
            f"(by {self}); {left} % of it is left: the release needs more noise, or a larger budget"
        )


@dataclass(frozen=True)
class GaussianFilter(Filter):
    """Filter for fully adaptive composition of Gaussian DP: Σ μᵢ² ≤ μ(ε, δ)², without amplification by draws.

    Guarantee: releases that are each μᵢ-GDP given the earlier ones, with Σ μᵢ² ≤ μ² for all outcomes, are together
        μ-GDP, and so (ε, δ)-DP for the largest μ whose exact curve gives at most δ at ε. This is as tight as for
        parameters fixed beforehand.

    Source: Smith, Thakurta (2022), arXiv:2210.17520; Koskela, Tobaben, Honkela (2023), arXiv:2209.15596.
    """

    def limit(self, epsilon: float, delta: float) -> float:
        """Return the largest spending under a budget: μ².

        Args: as `Filter.limit`.
        """
        return accountants().gaussian_parameter(epsilon, (1 - RESERVE) * delta) ** 2

    def spent(self, account: Account) -> float:
        """Return the spending of an account: Σ μᵢ²; ∞ without a bound."""
        return account.mu_squared()

    def __str__(self) -> str:
        return "Gaussian DP"


@dataclass(frozen=True)
class RenyiFilter(Filter):
    """Filter for Rényi DP at one order α: Σ RDPᵢ(α) ≤ B(α).

    Attributes:
        order: α > 1. It must not depend on releases.

    Guarantee: releases that are each (α, ρᵢ)-RDP given the earlier ones, with Σ ρᵢ ≤ B for all outcomes, are together
        (α, B)-RDP, and so (ε, δ)-DP for B = ε - ln(1 - 1/α) + (ln δ + ln α)/(α - 1).

    Source: Feldman, Zrnic (2021), arXiv:2008.11193; Lécuyer (2021), arXiv:2103.01379; the conversion is that of
        Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
    """

    order: float

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int | float) or not 1 < self.order < math.inf:
            raise PrivacyError(f"the order of a Rényi filter must be a number above 1, got {self.order!r}")

    def limit(self, epsilon: float, delta: float) -> float:
        """Return the largest spending under a budget: B(α), or 0 if that is negative.

        Args: as `Filter.limit`.
        """
        return max(0.0, _capacity(self.order, epsilon, (1 - RESERVE) * delta))

    def spent(self, account: Account) -> float:
        """Return the spending of an account: Σ RDPᵢ(α); ∞ without a bound."""
        return account.renyi(self.order)

    def __str__(self) -> str:
        return f"Rényi DP of order {self.order:g}"


@dataclass(frozen=True)
class LeakageFilter(Filter):
    """Filter for d-privacy: Σ ε·radius ≤ a limit of leakage, for adaptive releases too.

    Source: Galli et al. (2023), Theorem 4.2.
    """

    def limit(self, epsilon: float, delta: float) -> float:
        """Return the limit of leakage, with a tolerance for rounding.

        Args: as `Filter.limit`.
        """
        return epsilon * (1 + ROUNDING)

    def spent(self, account: Account) -> float:
        """Return the leakage of an account."""
        return account.leakage()

    def refusal(self, before: float, after: float, epsilon: float, delta: float, owner: str) -> str:
        """Return a message without numbers: a client's spending is private.

        Args: as `Filter.refusal`.
        """
        return "this client's limit of leakage would be passed"

    def __str__(self) -> str:
        return "a sum of leakages"


@dataclass(frozen=True)
class OverflowFilter(Filter):
    """Filter for draws without a claim: Σ of their probabilities ≤ the reserved part of δ.

    Guarantee: releases that another filter keeps at (1 - `RESERVE`)·δ are (ε, δ)-DP together, these draws included:
        except with probability Σ at most, they satisfy their events.
    """

    def limit(self, epsilon: float, delta: float) -> float:
        """Return `RESERVE` of δ.

        Args: as `Filter.limit`.
        """
        return RESERVE * delta

    def spent(self, account: Account) -> float:
        """Return the sum of the probabilities of an account."""
        return account.overflow

    def refusal(self, before: float, after: float, epsilon: float, delta: float, owner: str) -> str:
        """Return a message with the number of steps that fit in δ.

        More noise does not increase this number.

        Args: as `Filter.refusal`.
        """
        room = int(RESERVE * delta / OVERFLOW)
        return (
            f"δ = {delta:g} has room for {room} steps of DP-SGD, and {owner} would hold {round(after / OVERFLOW)}: use "
            "fewer steps, or a larger δ (privacy.target-delta of a run, target-delta of a node)"
        )

    def __str__(self) -> str:
        return "draws that fill all places"


RECORDED: Mapping[str, Callable[..., Filter]] = {"gaussian": GaussianFilter, "renyi": RenyiFilter}
"""Filters that a ledger may contain, by kind."""


def largest_share(chosen: Filter, spent: Callable[[Filter], float], epsilon: float, delta: float) -> float:
    """Return the larger spent share, of the filter or of draws without a claim.

    Args:
        chosen: the filter of the budget.
        spent: returns the spending under a filter.
        epsilon: ε of the budget.
        delta: δ of the budget.
    """
    kept = (chosen,) if isinstance(chosen, LeakageFilter) else (chosen, OverflowFilter())
    return max(share(spent(each), each.limit(epsilon, delta)) for each in kept)


def share(spent: float, limit: float) -> float:
    """Return the spent share of a limit; 1: all of it.

    Args:
        spent: under a filter.
        limit: of the filter; 0: any spending exceeds it.
    """
    return spent / limit if limit else math.inf if spent else 0.0


def filter_for(kind: FilterKind, epsilon: float, delta: float) -> Filter:
    """Return the filter of a kind for a budget, from (ε, δ) alone.

    The Rényi order is that of `FINE` with the largest B(α)/α at δ: it allows nearly the most Gaussian releases.

    Args:
        kind: of the filter.
        epsilon: ε of the budget.
        delta: δ of the budget.
    """
    check.one_of(get_args(FilterKind), filter=kind)
    if kind == "gaussian":
        return GaussianFilter()
    return RenyiFilter(float(max(FINE, key=lambda order: _capacity(order, epsilon, delta) / order)))


def _capacity(order: float, epsilon: float, delta: float) -> float:
    """Return B(α), the largest Rényi divergence that converts to (ε, δ)."""
    return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)


@lru_cache(maxsize=65536)
def cost(chosen: Filter, event: Event, relation: Relation = "add-or-remove") -> float:
    """Return the cost of one release under a filter; ∞ without a bound.

    It holds against clients that can see their own draws.

    Args:
        chosen: the filter.
        event: the release.
        relation: neighbouring relation of datasets.
    """
    return chosen.spent(Account([event], relation, insiders=True))


def to_json(chosen: Filter) -> dict[str, object]:
    """Return a filter as a JSON object."""
    (kind,) = (name for name, cls in RECORDED.items() if type(chosen) is cls)
    return {"kind": kind, **vars(chosen)}


def from_json(content: Json) -> Filter:
    """Return the filter of a JSON object, the inverse of `to_json`.

    Raises:
        PrivacyError: the kind or a field is unknown.
    """
    fields = dict(content) if isinstance(content, Mapping) else {}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in RECORDED:
        raise PrivacyError(f"unknown kind of filter {kind!r}; known: {', '.join(RECORDED)}")
    try:
        return RECORDED[kind](**fields)
    except TypeError as error:
        raise PrivacyError(f"a {kind!r} filter does not have these fields: {error}") from None


# --- plans for a budget ---


def minimum_multiplier(spent: Callable[[float], float], limit: float, budget: str) -> float:
    """Return the smallest z for which the falling `spent` is within the limit.

    It is exact to one part in a thousand.

    Args:
        spent: returns the spending with z.
        limit: of the filter.
        budget: description of the budget, for the message.

    Raises:
        ConfigError: no z up to `MAX_MULTIPLIER` suffices.
    """
    limit *= 1 - EXACT
    low, high = 1e-3, 1.0
    while spent(high) > limit:
        if high == MAX_MULTIPLIER:
            raise ConfigError(f"no noise multiplier up to {MAX_MULTIPLIER:g} stays within {budget}")
        low, high = high, min(2 * high, MAX_MULTIPLIER)
    while high - low > 1e-3 * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= limit else (middle, high)
    return high
