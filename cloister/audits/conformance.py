"""Conformance checks of mechanisms, built-in ones and those of other packages.

The checks: the mechanism is a value whose cost per round is constant. Every accountant can price its events. It
releases a model for every set of replies. Every parameter has noise. An attacker that repeats a round with and without
one client learns no more than claimed. Passing proves nothing. Failing proves that a claim is false.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloister.audits.epsilon import Trials
from cloister.core.arrays import Layout, Row
from cloister.core.capabilities import MEAN, Capabilities
from cloister.core.cohort import Cohort
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import from_json, to_json
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.accounting.promises import from_wire, to_wire, undrawn
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism, Released
from cloister.privacy.mechanisms.noise import GaussianNoise

Model = dict[str, NDArray]
SENT: Model = {"kernel": np.zeros(2), "bias": np.zeros(1)}
LAYOUT = Layout.of(SENT)
DRAWN = Sampling("poisson", probability=0.1)
DELTA = 1e-5
AUDIT_DELTA = 0.1
"""δ of the attacks. At a large δ the claimed ε is small enough for a few runs to contradict it."""
FALSE_ALARM = 1e-5
"""Largest probability that a correct mechanism fails one attack."""
LONG = 1e3
"""Norm of the attacker's updates in units of the clipping norm."""
HEAVY = 1e9
"""Example count that the canary reports; all other clients report 1."""
ASKED = 4


def check_mechanism(mechanism: Mechanism, *, capabilities: Capabilities = MEAN, runs: int = 2000) -> None:
    """Check a mechanism, and raise if a check refutes it.

    Args:
        mechanism: with its noise as in a run; its claim must be sound (no caveats).
        capabilities: of a strategy that it suits.
        runs: rounds with the attacked client, and rounds without it. n of each can show an ε of up to about ln(n/50).

    Raises:
        PrivacyError: names the failed check. A correct mechanism fails with probability at most 1 in 4,000.
    """
    mechanism = mechanism.suited_to(capabilities, "the strategy")
    made = vars(type(mechanism)).get("__dataclass_params__")  # of its own class: a subclass may add mutable state
    _require(made is not None and made.frozen, mechanism, "its class must be a frozen dataclass")
    _require(not mechanism.caveats(), mechanism, f"it claims nothing: {'; '.join(mechanism.caveats())}")
    _require(not mechanism.skips_empty_rounds, mechanism, "it claims something, and skips rounds without replies")
    _check_price(mechanism)
    described = mechanism.parameters()
    scalars = all(isinstance(value, str | int | float | bool) for value in described.values())
    _require(bool(described) and scalars, mechanism, "its parameters must be named, and plain values")
    for models in ([], [SENT], [SENT] * ASKED):
        shown = _only_release(mechanism, _released(mechanism, models))
        _require(shown.shape == (LAYOUT.size,), mechanism, f"{len(models)} replies must make one release")
        _require(bool(np.isfinite(shown).all()), mechanism, f"the release of {len(models)} replies is not finite")
    several = np.array([_only_release(mechanism, _released(mechanism, [SENT] * ASKED)) for _ in range(3)])
    _require(bool((several.std(axis=0) > 0).all()), mechanism, "a parameter is released without noise")
    for _, models in _attacks(mechanism):
        following = _released(mechanism, models).following or mechanism
        same = following.events(LAYOUT, UNSAMPLED) == mechanism.events(LAYOUT, UNSAMPLED)
        _require(same and not following.caveats(), mechanism, "the next round has another price than this one")
    _check_attacks(mechanism, runs)


def _require(holds: bool, mechanism: Mechanism, what: str) -> None:
    if not holds:
        raise PrivacyError(f"mechanism {mechanism.name!r}: {what}")


def _check_price(mechanism: Mechanism) -> None:
    """Check the price of the mechanism's events.

    An event unknown to an accountant, a filter, the ledger or the wire raises by itself.
    """
    events = mechanism.events(LAYOUT, UNSAMPLED)
    _require(len(events) > 0, mechanism, "a round without events would cost nothing")
    epsilon = Account(events).epsilon(DELTA)
    _require(math.isfinite(epsilon), mechanism, "the Rényi accountant knows no ε of its events")
    for kept in (filter_for("gaussian", 1.0, DELTA), filter_for("renyi", 1.0, DELTA)):
        _require(all(cost(kept, event) < math.inf for event in events), mechanism, f"{kept} cannot keep its budget")
    stored = tuple(from_json(json.loads(json.dumps(to_json(event)))) for event in events)
    _require(stored == tuple(events), mechanism, "its events change when a ledger stores them")
    told = Account(from_wire(to_wire(events))).epsilon(DELTA)
    _require(told >= epsilon, mechanism, f"nodes are promised ε = {told:.4g} a round, and it costs {epsilon:.4g}")
    drawn = mechanism.events(LAYOUT, DRAWN if mechanism.amplified else UNSAMPLED)
    counted = sum(undrawn(event) != event for event in drawn)
    _require(counted < 2, mechanism, "it counts one draw for several releases, and they share it")


def _attacks(mechanism: Mechanism) -> Iterator[tuple[NDArray, list[Model]]]:
    """Yield directions of the canary, the first client, with the cohorts that include it.

    The canary is alone, along each parameter and along all together. Then it is beside its opposite, and at a position
    where it decides a rank.
    """
    long = LONG * (mechanism.clipping_norm or 1.0)
    axes = [*np.eye(LAYOUT.size), np.full(LAYOUT.size, LAYOUT.size**-0.5)]
    for axis in axes:
        yield axis, [_model(long * axis)]
    up, down = _model(long * axes[0]), _model(-long * axes[0])
    yield axes[0], [up, down, SENT]
    yield axes[0], [up, up, down, down]


def _model(flat: NDArray) -> Model:
    return {"kernel": flat[:2], "bias": flat[2:]}


def _check_attacks(mechanism: Mechanism, runs: int) -> None:
    """Check all outputs of attacked rounds against the claim.

    The first is the released model along the canary.
    """
    claimed = Account(mechanism.events(LAYOUT, UNSAMPLED)).epsilon(AUDIT_DELTA, "pld")

    def seen(axis: NDArray, cohort: list[Model], heavy: bool) -> NDArray:
        found = []
        for _ in range(runs):
            released = _released(mechanism, cohort, heavy)
            following = released.following or mechanism
            told = (
                released.noise_std,
                released.sensitivity,
                released.noise_multiplier,
                released.clipping_norm,
                released.released_distance,
                following.clipping_norm,
                *(value for value in following.parameters().values() if not isinstance(value, str)),
            )
            found.append((float(_only_release(mechanism, released) @ axis), *(float(value or 0.0) for value in told)))
        return np.array(found).T

    for axis, models in _attacks(mechanism):
        for present, absent in zip(seen(axis, models, True), seen(axis, models[1:], False), strict=True):
            shown = Trials(present, absent).epsilon(AUDIT_DELTA, 1 - FALSE_ALARM)
            told = f"ε = {claimed:.4g} at δ = {AUDIT_DELTA} is claimed for a round, and an attack shows {shown:.4g}"
            _require(shown <= claimed, mechanism, told)


def _released(mechanism: Mechanism, models: Sequence[Model], heavy: bool = False) -> Released:
    """Run a round with these replies, with noise from the operating system's entropy.

    As in a run, a mechanism that sums replies as they come receives only the sum.
    """
    rows: tuple[Row, ...] = tuple(LAYOUT.rows(model) for model in models)
    cohort = Cohort.of(LAYOUT, LAYOUT.rows(SENT), rows)
    examples = tuple(HEAVY if heavy and not number else 1.0 for number in range(len(rows)))
    given = Contributions(cohort, examples, ASKED, float(ASKED), GaussianNoise(), server_round=1)
    intake = mechanism.intake(LAYOUT, cohort.sent, ASKED)
    if intake is not None:
        for few in np.array_split(np.arange(len(cohort)), 2):
            intake.take(cohort.take(few), tuple(examples[one] for one in few))
        given = replace(given, cohort=replace(cohort, rows=()), taken=intake)
    return mechanism.release(given)


def _only_release(mechanism: Mechanism, released: Released) -> NDArray:
    shown = released.models
    _require(len(shown) == 1, mechanism, f"the wrapped strategy is shown {len(shown)} models instead of one release")
    return np.concatenate(shown[0])
