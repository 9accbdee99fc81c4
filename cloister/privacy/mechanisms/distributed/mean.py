"""Mean of updates under secure aggregation: each client clips its own update and adds its share of the noise.

| edge case | result |
|---|---|
| a client's training fails, or it has no examples | its update is 0, with its share of the noise |
| an update with NaN, infinity, or squares that overflow | it counts as 0, with its share of the noise |
| fewer survivors than the threshold | there is no sum; the model, the clip and the distance stay unchanged |
| a server that holds single updates | refused: this mechanism adds no noise to them |
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.premises import BUNDLE, COLLUSION, CRYPTOGRAPHY, KEY_AGREEMENT, KEYS, ROSTER
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.distributed.plan import Plan, encode_client_input
from cloister.privacy.mechanisms.distributed.shared import SharedRelease, SharedSum
from cloister.privacy.mechanisms.distributed.shares import Beside, Bits, Parties, Squares
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.mechanism import Contributions, Parameter, Released
from cloister.privacy.mechanisms.metric import DistanceScaled
from cloister.utils import check
from cloister.utils.arrays import Layout, Row, State
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.state import Coordinates
from cloister.utils.wire import CLIPPING_NORM, DISTANCE

ANY_MODEL = Layout.of({"any": np.zeros(1)})
"""Layout of any model: the limits of a distance that is derived from sums depend on C alone."""


@dataclass(frozen=True, kw_only=True)
class DistributedMean(SharedRelease, GaussianMechanism):
    """Mean of the survivors' clipped updates, with noise of standard deviation z·C on their sum.

    Attributes:
        parties: the largest cohort, the threshold of survivors, and the number of clients that may collude.
        distance: d that scales the noise, if any: 1 in the first round, then the value derived from the last sum. It
            is always held between the limits of `scale`.

    Guarantee: each round costs `events`, for zeroing one client's update, against the server together with as many
        clients as may collude. That holds for any dropouts, and for any distance that the server sends to a client.
        It depends on a sum that holds at least `parties.honest` honest inputs, which the protocol has to ensure.

    Raises:
        ConfigError: the distance that scales the noise is not derived from sums, or is used without noise; or the clip
            that limits it is not fixed.

    Source: Kairouz, Liu, Steinke (2021), arXiv:2102.06387.
    """

    parties: Parties
    distance: float = 1.0

    placement = "update"
    premises = (BUNDLE, ROSTER, KEYS, CRYPTOGRAPHY, KEY_AGREEMENT, COLLUSION)
    seen = "the sum of the clients' updates"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(distance=self.distance)
        if isinstance(self.scale, DistanceScaled):
            found = self.scale.distance, self.scale.release
            if found != ("rms", "private") or isinstance(self.clip, AdaptiveClip):
                raise ConfigError(
                    "of sums alone only privacy.distance = 'rms' follows, with privacy.distance-release = 'private' "
                    f"and privacy.clipping = 'fixed'; found {found[0]!r}, {found[1]!r}, {self.clip}"
                )

    def plan(self, parameters: int, server_round: int = 1) -> Plan:
        """Return the plan, which follows from the configuration, C and the distance alone."""
        return self._at(self.factor, parameters)

    @property
    def factor(self) -> float:
        """Return the factor of z in this round: 1, unless a distance scales it."""
        return self.scale.at(self.distance, self.clip.bound, ANY_MODEL)

    def _at(self, factor: float, parameters: int) -> Plan:
        """Return the plan of a round with a factor. The ring is that of the largest factor.

        The charged noise is that of the smallest factor. Scales of shares are rounded up to whole steps: a barely
        larger factor could get less noise. So the variance of the smallest factor is a minimum for all.
        """
        given = self.parties, parameters, tuple(one for one in (self.bits, self.squares) if one)
        low, high = (self.multiplier * one for one in self.scale.factors(self.clip.bound, ANY_MODEL))
        ring = _planned(self.clip.bound, high, *given).bits
        charged = _planned(self.clip.bound, low, *given, ring)
        if self.multiplier * factor <= low:
            return charged
        return _planned(self.clip.bound, self.multiplier * factor, *given, ring, charged.shares.variance)

    @property
    def bits(self) -> Bits | None:
        """Return the bits that an adaptive clip follows; None for a fixed clip."""
        return Bits.of(self.clip, self.parties) if isinstance(self.clip, AdaptiveClip) else None

    @property
    def squares(self) -> Squares | None:
        """Return the squares that set the next round's distance; None if unused."""
        if not isinstance(self.scale, DistanceScaled):
            return None
        return Squares.of(self.scale.distance_multiplier, self.parties)

    def bound_in(self, server_round: int) -> float:
        """Return C in force."""
        return self.clip.bound

    def encode(self, made: Row, sent: Row, layout: Layout, plan: Plan) -> NDArray[np.int64]:
        """Return a client's clipped update and its auxiliary numbers; see `SharedRelease.encode`."""
        coordinates = Coordinates.of(layout, sent, plan.bound)
        return encode_client_input(Cohort.of(layout, coordinates.origin, (coordinates.bounded(made),)), plan)

    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return the releases of a round, for any survivors.

        They are the auxiliary numbers and the sum of updates. They do not depend on C, which an adaptive clip moves:
        updates and noise are in steps of it. If a distance scales the noise, the sum is charged with the least noise
        of any distance.

        Args:
            layout, sampling, by_provisioner: as in `SharedRelease.events`.
        """
        plan = self._at(self.scale.factors(self.clip.bound, ANY_MODEL)[0], layout.size)
        return plan.events(single=by_provisioner > self.parties.colluding)

    def unit_events(self, layout: Layout, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return `events` for replacing one example or group: it may turn a client's update into any other one."""
        return tuple(event.replaced() for event in self.events(layout, by_provisioner=by_provisioner))

    def released(self, summed: SharedSum, sent: Row, layout: Layout, server_round: int) -> Released:
        """Return the model sent plus the mean of the sum; see `SharedRelease.released`."""
        total, survivors = summed.total, summed.survivors
        plan = self.plan(layout.size)
        step, sensitivity = plan.bound / plan.steps / survivors, plan.bound / survivors
        pieces = (total[start:end] for start, end in pairwise(layout.offsets))
        model = tuple((base + piece * step).astype(base.dtype) for base, piece in zip(sent, pieces, strict=True))
        noise = plan.shares.within(survivors, summed.shown)
        apart, following = None, None
        if self.squares is not None:
            # Post-processing of released sums. The noise adds its variance to each squared number of the sum, and this
            # variance is subtracted again. If colluding clients have added no noise, too much is subtracted.
            steps = total[: plan.parameters].astype(np.float64)
            squared = (float(steps @ steps) - plan.parameters * noise) / plan.steps**2
            apart = plan.bound * self.squares.apart(int(total[-1]), squared, survivors)
            following = self.restated(self.clip.bound, apart)
        if isinstance(self.clip, AdaptiveClip) and self.bits:
            following = replace(self, clip=self.clip.moved(self.bits.share(int(total[-1]), survivors)))
        return Released(
            (model,),
            self.multiplier * self.factor * sensitivity,
            sensitivity,
            noise_multiplier=self.multiplier * self.factor,
            clipping_norm=self.clip.bound,
            released_distance=apart,
            following=following,
        )

    def stated(self) -> Mapping[str, float]:
        """Return C if it adapts, and the distance if it scales the noise."""
        bound = {CLIPPING_NORM: self.clip.bound} if self.bits else {}
        return bound | ({DISTANCE: self.distance} if self.squares else {})

    def restated(self, bound: float, distance: float) -> "DistributedMean":
        """Return this mechanism with another C, and another distance that is held between its limits.

        Args:
            bound: C > 0, from any source.
            distance: d ≥ 0, from any source.
        """
        low, high = self.scale.limits(bound, ANY_MODEL)
        return replace(self, clip=replace(self.clip, bound=bound), distance=min(max(distance, low), high))

    def state_dict(self) -> State:
        """Return the state of `GaussianMechanism`, with the distance."""
        return {**super().state_dict(), "distance": np.array(self.distance)}

    def restored(self, state: State) -> "DistributedMean":
        """Return this mechanism with a saved state."""
        return replace(super().restored(state), distance=float(state.get("distance", self.distance)))

    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        raise PrivacyError(
            "under secure aggregation clients add the noise, and the server has no single updates; there is nothing to"
            " noise here"
        )

    def refuse_canaries(self) -> None:
        """Raise ConfigError: the server cannot add canaries to a sum of masked updates."""
        raise ConfigError("privacy.canaries contradicts secure-aggregation.enabled = true; use 0 canaries")

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters, by configuration key."""
        return {**super().parameters(), **self.parties.parameters()}


@lru_cache(maxsize=64)
def _planned(
    bound: float,
    multiplier: float,
    parties: Parties,
    parameters: int,
    beside: tuple[Beside, ...] = (),
    ring: int | None = None,
    minimum_variance: int = 0,
) -> Plan:
    """Return the plan in a ring of this many bits; None: the narrowest that fits."""
    if ring is not None:
        return Plan.of(
            bound, multiplier, parties, parameters, bits=ring, beside=beside, minimum_variance=minimum_variance
        )
    try:
        return Plan.of(bound, multiplier, parties, parameters, beside=beside)
    except PrivacyError:
        return Plan.of(bound, multiplier, parties, parameters, bits=64, beside=beside)
