"""Whether a mechanism is what it says: checks for built-in mechanisms and for those of other packages.

What can be checked is checked: that the mechanism is a value, that every accountant knows what its events cost, that
something is released whoever replies, that noise is on every parameter, and that an attacker who runs a round many
times with and without one client cannot tell more than is claimed. Passing proves nothing. Failing proves that a claim
is false.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from cloister.audits.epsilon import Trials
from cloister.core.arrays import Layout, Row
from cloister.core.capabilities import MEAN, Capabilities
from cloister.core.cohort import Cohort
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import UNSAMPLED, from_json, to_json
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.accounting.promises import from_wire, to_wire
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise

SENT = {"kernel": np.zeros((2, 2)), "bias": np.zeros(1)}
LAYOUT = Layout.of(SENT)
DELTA = 1e-5
AUDIT_DELTA = 0.1
"""At a large δ the ε of a claim is small enough for a few runs to contradict it."""
FALSE_ALARM = 1e-4
"""Chance that a right mechanism fails one attack."""
LONG = 1e3
"""Length of the updates that an attacker sends, in units of the bound."""
ASKED = 4


def check_mechanism(mechanism: Mechanism, *, capabilities: Capabilities = MEAN, runs: int = 2000) -> None:
    """Try to find a mechanism in the wrong.

    Args:
        mechanism: with the noise that it would run with; what it claims must be sound (no caveats).
        capabilities: of a strategy that it suits.
        runs: rounds with, and rounds without the client that the attack is about. n of them show an ε of up to about
            ln(n/40).

    Raises:
        PrivacyError: naming what is wrong. A right mechanism fails with a chance of about 1 in 3,000.
    """
    mechanism = mechanism.suited_to(capabilities, "the strategy")
    for examine in (_is_a_value, _is_priced, _is_described, _always_releases, _noises_everything):
        examine(mechanism)
    for models in _attacks(mechanism):
        _tells_no_more_than_claimed(mechanism, models, runs)


def _require(holds: bool, mechanism: Mechanism, what: str) -> None:
    if not holds:
        raise PrivacyError(f"mechanism {mechanism.name!r}: {what}")


def _is_a_value(mechanism: Mechanism) -> None:
    frozen = dataclasses.is_dataclass(mechanism) and getattr(mechanism, "__dataclass_params__").frozen  # noqa: B009
    _require(frozen, mechanism, "its class must be a frozen dataclass")
    _require(not mechanism.caveats(), mechanism, f"it claims nothing: {'; '.join(mechanism.caveats())}")


def _is_priced(mechanism: Mechanism) -> None:
    """An event that an accountant, a filter, the ledger or the wire does not know raises by itself."""
    events = mechanism.events(LAYOUT, UNSAMPLED)
    _require(len(events) > 0, mechanism, "a round without events would cost nothing")
    _require(math.isfinite(Account(events).epsilon(DELTA)), mechanism, "the Rényi accountant knows no ε of its events")
    for kept in (filter_for("gaussian", 1.0, DELTA), filter_for("renyi", 1.0, DELTA)):
        _require(all(cost(kept, event) < math.inf for event in events), mechanism, f"{kept} cannot keep its budget")
    _require(all(from_json(json.loads(json.dumps(to_json(event)))) == event for event in events), mechanism, "ledger")
    from_wire(to_wire(events))


def _is_described(mechanism: Mechanism) -> None:
    described = mechanism.parameters()
    scalars = all(isinstance(value, str | int | float | bool) for value in described.values())
    _require(bool(described) and scalars, mechanism, "its parameters must be named, and plain values")


def _always_releases(mechanism: Mechanism) -> None:
    for models in ([], [SENT], [SENT] * ASKED):
        shown = _released(mechanism, models)
        _require(shown.shape == (LAYOUT.size,), mechanism, f"{len(models)} replies must make one release")
        _require(bool(np.isfinite(shown).all()), mechanism, f"the release of {len(models)} replies is not finite")


def _noises_everything(mechanism: Mechanism) -> None:
    several = np.array([_released(mechanism, [SENT] * ASKED) for _ in range(3)])
    _require(bool((several.std(axis=0) > 0).all()), mechanism, "a parameter is released without noise")


def _attacks(mechanism: Mechanism) -> Sequence[list[dict[str, np.ndarray]]]:
    """Cohorts whose first client is the canary: against nobody, against its opposite, and where it decides a rank."""
    long = LONG * (mechanism.clipping_norm or 1.0)
    up, down = ({"kernel": np.array([[side, 0], [0, 0]]), "bias": np.zeros(1)} for side in (long, -long))
    return [up], [up, down, SENT], [up, up, down, down]


def _tells_no_more_than_claimed(mechanism: Mechanism, models: list[dict[str, np.ndarray]], runs: int) -> None:
    claimed = Account(mechanism.events(LAYOUT, UNSAMPLED)).epsilon(AUDIT_DELTA, "pld")
    seen = [np.array([_released(mechanism, sent)[0] for _ in range(runs)]) for sent in (models, models[1:])]
    shown = Trials(*seen).epsilon(AUDIT_DELTA, 1 - FALSE_ALARM)
    told = f"ε = {claimed:.4g} at δ = {AUDIT_DELTA} is claimed for a round, and an attack shows {shown:.4g}"
    _require(shown <= claimed, mechanism, told)


def _released(mechanism: Mechanism, models: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """The one model that is released about these replies, flat, with noise from the operating system's entropy."""
    rows: tuple[Row, ...] = tuple(LAYOUT.rows(model) for model in models)
    cohort = Cohort.of(LAYOUT, LAYOUT.rows(SENT), rows)
    given = Contributions(cohort, (1.0,) * len(rows), ASKED, float(ASKED), GaussianNoise(), server_round=1)
    shown = mechanism.release(given).models
    _require(len(shown) == 1, mechanism, f"the wrapped strategy is shown {len(shown)} models instead of one release")
    return np.concatenate(shown[0])
