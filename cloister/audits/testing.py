"""Tests of mechanisms: sensitivity, an empirical lower bound on ε of a round, and conformance.

Sensitivity. An aggregation is run twice without noise, with and without one client's reply. The strategy's further
processing of a release is post-processing, so the releases are compared. For a wrapper in placement `update` or
`rule`, the release is the input of the wrapped strategy. For any other strategy, it is the returned model. The test
must find nothing in Cloister's wrappers. It must find too little noise in wrappers that noise the output of a
stateful strategy.

Source: the recording and replaying of Cebere et al. (2026), arXiv:2602.17454, reduced to one round.

Lower bound. One round is run many times with a client, the canary, and many times without it. Each release gives a
score. A threshold is chosen on half of the runs and tested on the other half. The rates at which it is reached with
and without the canary bound ε from below, with Clopper-Pearson intervals. The bound holds for every distribution of
the scores.

A claim below the bound is false, with the confidence stated. A bound below the claim proves nothing: another score,
canary or cohort might show more. From n runs of each kind, the bound is at most about
ln(n / (2·ln(2/(1 - confidence)))).

Sources: Jagielski, Ullman, Oprea (2020), arXiv:2006.07709, Algorithm 1; Nasr et al. (2021), arXiv:2101.04535, for the
adversary that chooses the cohort and reads the released model; Clopper, Pearson (1934), Biometrika 26(4).

Conformance. The checks: the mechanism is a value whose cost per round is constant. Every accountant can price its
events. It releases a model for every set of replies. Every parameter has noise. An attacker that repeats a round with
and without one client learns no more than claimed. Passing proves nothing. Failing proves that a claim is false.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from scipy import stats

from cloister.flower.messages import assume_run
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import from_wire, to_wire, undrawn
from cloister.privacy.accounting.events import from_json, to_json
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism, Released
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.private_strategy import PrivateStrategy
from cloister.utils import check
from cloister.utils.arrays import Layout, Row, from_record, to_record
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, FederationError, PrivacyError
from cloister.utils.registry import MEAN, Aggregated, Capabilities, Messages
from cloister.utils.wire import ARRAYS, EXAMPLES, METRICS

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Movement:
    """L2 distance that removing one client moves the release, and the distance that the noise is calibrated for.

    Rounding the released weights to their dtype is post-processing, but visible without noise. `rounding` is the L2
    norm of one unit in the last place of every weight.
    """

    moved: float
    calibrated: float
    rounding: float

    @property
    def sound(self) -> bool:
        """Return True if the noise covers the movement."""
        return self.moved <= self.calibrated + self.rounding


def leave_one_out(
    make: Callable[[], Strategy],
    sent: Arrays,
    models: Sequence[Arrays],
    examples: Sequence[float],
    absent: int,
    calibrated: float | None = None,
) -> Movement:
    """Aggregate a cohort with and without the client `absent`.

    Args:
        make: returns a new strategy with its noise switched off.
        sent: the global model of the round.
        models: reply of each client.
        examples: the example count each client reports.
        absent: index of the client that does not reply the second time.
        calibrated: calibrated sensitivity of a third-party strategy; Cloister's strategies measure it themselves.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from cloister.server.private_strategy import GlobalDP
        >>> sent, models = {"w": np.zeros(2)}, [{"w": np.array([0.3, 0.4])}, {"w": np.array([3.0, 4.0])}]
        >>> def silent():
        ...     return GlobalDP(FedAvg(), noise_multiplier=0.0, clipping_norm=1.0)
        >>> found = leave_one_out(silent, sent, models, examples=[10, 10], absent=1)
        >>> round(found.moved, 3), found.calibrated, found.sound
        (0.5, 0.5, True)
    """
    strategy = make()
    everyone = release_of(strategy, sent, models, examples, absent=None)
    others = release_of(make(), sent, models, examples, absent)
    if calibrated is None:
        measured = cast(PrivateStrategy, strategy).measured
        calibrated = measured.sensitivity if measured and measured.sensitivity is not None else 0.0
    rounding = np.linalg.norm(np.spacing(np.abs(everyone).astype(Layout.of(sent).dtype)))
    return Movement(float(np.linalg.norm(everyone - others)), calibrated, float(rounding))


def release_of(
    strategy: Strategy, sent: Arrays, models: Sequence[Arrays], examples: Sequence[float], absent: int | None
) -> np.ndarray:
    """Return a strategy's release in its first round, as one vector in float64."""
    rehearsal = Rehearsal(sent, models, examples)
    if not isinstance(strategy, PrivateStrategy) or strategy.mechanism.noises_output:
        return rehearsal.flat(rehearsal.run(strategy, absent))
    tap = _Tap(strategy.inner)
    strategy.inner = cast(Strategy, tap)
    rehearsal.run(strategy, absent)
    return rehearsal.flat(tap.seen)


class Rehearsal:
    """A first training round with given replies, which can be run repeatedly.

    Args:
        sent: the global model of the round.
        models: reply of each client; client i is node i + 1.
        examples: the example count each client reports.
    """

    def __init__(self, sent: Arrays, models: Sequence[Arrays], examples: Sequence[float]) -> None:
        assume_run()
        self._sent = to_record(sent)
        self._layout = Layout.of(sent)
        self._roster = cast(Grid, _Roster(len(models)))
        self._models = [to_record(model) for model in models]
        self._metrics = [MetricRecord({EXAMPLES: count}) for count in examples]

    def run(self, strategy: Strategy, absent: int | None = None) -> ArrayRecord | None:
        """Return the strategy's aggregate of the replies of the clients it asks.

        The client `absent` does not reply.
        """
        asked = list(strategy.configure_train(1, self._sent, ConfigRecord(), self._roster))
        replies = []
        for message in asked:
            client = message.metadata.dst_node_id - 1
            if client != absent:
                # Records are shared, content is not: Flower's wrappers overwrite replies with clipped models.
                content = RecordDict({ARRAYS: self._models[client], METRICS: self._metrics[client]})
                replies.append(Message(content, reply_to=message))
        return strategy.aggregate_train(1, replies)[0]

    def flat(self, released: ArrayRecord | None) -> np.ndarray:
        """Return a released model as one vector in float64."""
        if released is None:
            raise FederationError("the strategy released nothing")
        return np.concatenate(self._layout.rows(from_record(released)), dtype=np.float64)


class _Roster:
    """A grid with node ids only, which a strategy reads to choose nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._nodes + 1)


class _Tap:
    """A wrapper between a decorator and its strategy that stores the decorator's output."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.seen: ArrayRecord | None = None

    def __getattr__(self, name: str) -> object:
        # Python calls this only for attributes that _Tap does not define.
        return getattr(self.inner, name)

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        (reply,) = list(replies)
        # A separate record over the same arrays: Flower's rules remove arrays from the reply as they read them.
        self.seen = ArrayRecord(dict(reply.content.array_records[ARRAYS]))
        return self.inner.aggregate_train(server_round, [reply])


Rates = NDArray[np.float64]
Strength = Callable[[Rates, Rates], Rates]
"""Bound from a lower bound on the rate of hits and an upper bound on the rate of false alarms."""
Score = Callable[[Strategy, Rates], float]
"""Evidence that the canary took part, from a strategy after its round and the update that it released."""


@dataclass(frozen=True)
class Trials:
    """Scores of the same round with the canary and without it, each run independently.

    Attributes:
        present: with the canary; it should score higher.
        absent: without.
    """

    present: Rates
    absent: Rates

    def epsilon(self, delta: float, confidence: float = 0.99) -> float:
        """Return a lower bound on the ε(δ) of the round.

        Guarantee: if the round is (ε, δ)-DP for adding or removing the canary, this is above ε with probability at
            most 1 - `confidence`.

        Source: Jagielski et al. (2020), Algorithm 1, over both directions: ln((P(S) - δ)/Q(S)) for the event S that
            speaks for the canary and for the one that speaks against it.

        Raises:
            ConfigError: δ or the confidence is out of range.
        """
        if not 0 <= delta < 1:
            raise ConfigError(f"delta must be at least 0 and below 1, got {delta}")

        def strength(hits: Rates, alarms: Rates) -> Rates:
            return np.log(np.maximum(hits - delta, 0.0) / alarms)

        return self._shown(strength, confidence)

    def shift(self, confidence: float = 0.99) -> float:
        """Return a lower bound on μ of the round.

        The round is at least as distinguishable as N(μ, 1) and N(0, 1).

        Guarantee: if the round is a Gaussian mechanism of noise multiplier z, this is above 1/z with probability at
            most 1 - `confidence`. It is much closer to 1/z than `epsilon` is to ε. It has no meaning for a round that
            is not Gaussian, such as one over a Poisson cohort.

        Source: Dong, Roth, Su (2022), arXiv:1905.02383, §2.3; as an audit Nasr et al. (2023), arXiv:2302.07956, §4.
        """
        return self._shown(lambda hits, alarms: stats.norm.ppf(hits) - stats.norm.ppf(alarms), confidence)

    def _shown(self, strength: Strength, confidence: float) -> float:
        """Return the bound of a threshold and direction on the second half.

        They are the best ones on the first half.
        """
        if not 0 < confidence < 1:
            raise ConfigError(f"confidence must be above 0 and below 1, got {confidence}")
        error = (1 - confidence) / 2  # half of the error each for hits and for false alarms
        options = []
        for high, low in ((self.present, self.absent), (-self.absent, -self.present)):
            thresholds = np.unique(np.concatenate([high[::2], low[::2]]))
            shown = _at(thresholds, high[::2], low[::2], strength, error)
            options.append((shown.max(), thresholds[shown.argmax()], high, low))
        _, threshold, high, low = max(options, key=lambda option: option[0])
        return max(0.0, float(_at(np.array([threshold]), high[1::2], low[1::2], strength, error)[0]))


def _at(thresholds: Rates, high: Rates, low: Rates, strength: Strength, error: float) -> Rates:
    """Compute the bound of each threshold.

    Hits are scores of `high` that reach it, false alarms are scores of `low` that reach it.
    """
    with np.errstate(divide="ignore"):
        return strength(
            minimum_rate(_reaching(high, thresholds), len(high), error),
            maximum_rate(_reaching(low, thresholds), len(low), error),
        )


def _reaching(scores: Rates, thresholds: Rates) -> NDArray[np.intp]:
    """Count the scores that are at least as large as each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), thresholds)


def minimum_rate(count: NDArray[np.intp], runs: int, error: float) -> Rates:
    """Return a lower confidence bound on a rate, seen `count` times in `runs`.

    It is wrong with probability at most `error`.

    Source: Clopper, Pearson (1934).
    """
    return np.where(count > 0, stats.beta.ppf(error, np.maximum(count, 1), runs - count + 1), 0.0)


def maximum_rate(count: NDArray[np.intp], runs: int, error: float) -> Rates:
    """Return an upper confidence bound on a rate, with the same error as `minimum_rate`."""
    return 1 - minimum_rate(runs - count, runs, error)


def try_to_tell(
    make: Callable[[], Strategy],
    sent: Arrays,
    models: list[Arrays],
    examples: list[float],
    *,
    canary: int = 0,
    runs: int = 1000,
    score: Score | None = None,
) -> Trials:
    """Run a round with and without the canary, and score its releases.

    The cohort is the adversary's choice: a canary of norm C in a direction of its own loses nothing, and a single
    coordinate survives any optimizer that treats coordinates apart.

    Args:
        make: returns a new strategy as in a run, with its noise. The noise must not restart from one seed each time.
        sent: the global model of the round.
        models: reply of each client.
        examples: the example count each client reports.
        canary: index of the client that replies or is absent.
        runs: of each kind.
        score: by default the released update along the canary's own.

    Raises:
        ConfigError: there are too few runs to choose and test a threshold, or the canary does not move the model.
    """
    check.positive(runs=runs // 2)
    rehearsal = Rehearsal(sent, models, examples)
    origin = flat(sent)
    evidence = along(flat(models[canary]) - origin) if score is None else score

    def trial(absent: int | None) -> float:
        strategy = make()
        return evidence(strategy, rehearsal.flat(rehearsal.run(strategy, absent)) - origin)

    return Trials(np.array([trial(None) for _ in range(runs)]), np.array([trial(canary) for _ in range(runs)]))


def along(direction: Rates) -> Score:
    """Return the score of an update by its component along a direction.

    Raises:
        ConfigError: the direction is zero: a canary that does not move the model shows nothing.
    """
    check.positive(norm_of_the_canary=float(np.linalg.norm(direction)))
    unit = direction / np.linalg.norm(direction)
    return lambda strategy, update: float(update @ unit)


def flat(model: Mapping[str, NDArray]) -> Rates:
    """Return all parameters of a model as one vector in double precision.

    Args:
        model: arrays by name.
    """
    return np.concatenate([array.ravel() for array in model.values()], dtype=np.float64)


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
    # An event unknown to an accountant, a filter, the ledger or the wire raises by itself.
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
