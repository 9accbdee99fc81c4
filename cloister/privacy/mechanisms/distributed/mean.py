"""The mean of updates that nobody sees alone: each client clips its own, and adds its share of the noise to it.

| edge case | what happens |
|---|---|
| a client's training fails, or it has no examples | its update is 0, with its share of the noise |
| an update with NaN, infinity, or squares that overflow | it counts as 0, with its share of the noise |
| fewer clients than the threshold are left | there is no sum; the model, the clip and the distance stay as they were |
| single updates in the server's hands | refused: there is nothing here that would add noise to them |
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import Layout, Row
from cloister.core.capabilities import Capabilities
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError, PrivacyError
from cloister.core.state import State
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.premises import BUNDLE, COLLUSION, CRYPTOGRAPHY, KEYS, ROSTER
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.distributed.beside import Beside, Bits, Squares
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD, Parties
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.mechanism import Contributions, Parameter, Released
from cloister.privacy.mechanisms.noise_scale import DistanceScaled

ANY_MODEL = Layout.of({"any": np.zeros(1)})
"""The limits of a distance that follows from sums depend on C, and not on the arrays of a model."""


@dataclass(frozen=True, kw_only=True)
class DistributedMean(GaussianMechanism):
    """The mean of the clipped updates of those who are left, with noise of standard deviation z·C on their sum.

    Attributes:
        parties: the largest cohort, and how many of it must be left and may collude.
        distance: d that scales the noise, where one does: 1 in the first round, and what followed from the last sum
            afterwards. It is held between the limits of `scale` wherever it comes from.

    Guarantee: each round costs what `events` says, for zeroing one client's update, against the server together
        with as many clients as may collude, whoever drops out, and whatever distance a client is told. It rests on a
        sum that holds at least `parties.honest` honest inputs: the protocol's part.

    Raises:
        ConfigError: a distance scales the noise that does not follow from sums, or that is to be used without noise; or
            the clip that limits it is not fixed.

    Source: Kairouz, Liu, Steinke (2021), arXiv:2102.06387.
    """

    parties: Parties
    distance: float = 1.0

    placement = "update"
    premises = (BUNDLE, ROSTER, KEYS, CRYPTOGRAPHY, COLLUSION)

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

    @property
    def needs_public_cohort(self) -> bool:
        """Always: members sign the names of all who are left."""
        return True

    def plan(self, parameters: int) -> Plan:
        """What a round counts in: the same for all parties, by the configuration alone.

        Args:
            parameters: p, numbers of an update.

        Raises:
            PrivacyError: the sum might leave the widest ring, or the noise is more than can be made.
        """
        return self._at(self.factor, parameters)

    @property
    def factor(self) -> float:
        """What z is multiplied by in this round: 1, unless a distance scales it."""
        return self.scale.at(self.distance, self.clip.bound, ANY_MODEL)

    def _at(self, factor: float, parameters: int) -> Plan:
        """The plan of a round with a factor. The ring is that of the largest factor, and no noise is less than charged.

        Charged is the noise of the smallest factor. Scales of shares are rounded up to whole steps: a factor that is
        barely larger could come out with less noise, so that the smallest one's variance is a minimum for all.
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
        """What the clip follows; None where it is fixed."""
        return Bits.of(self.clip, self.parties) if isinstance(self.clip, AdaptiveClip) else None

    @property
    def is_stationary(self) -> bool:
        """Whether neither clip nor noise follows from earlier rounds."""
        return self.bits is None and self.squares is None

    @property
    def squares(self) -> Squares | None:
        """What the distance of the next round is made of; None where none scales the noise."""
        if not isinstance(self.scale, DistanceScaled):
            return None
        return Squares.of(self.scale.distance_multiplier, self.parties)

    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED, by_provisioner: int = 0) -> tuple[Event, ...]:
        """The releases of a round, whoever is left: what travels beside the updates, and their sum.

        None depends on C, which an adaptive clip moves: updates and noise are counted in steps of it. Where a distance
        scales the noise, the sum is counted with the least noise that any distance gives it.

        Args:
            layout, sampling: as in `GaussianMechanism.events`.
            by_provisioner: members on the roster whose keys the provisioner made, who count as colluding. The sum is
                proved to hold t - c honest shares where at most c collude. Where more do, one share counts.
        """
        plan = self._at(self.scale.factors(self.clip.bound, ANY_MODEL)[0], layout.size)
        return plan.events(single=by_provisioner > self.parties.colluding)

    def released(
        self, total: NDArray[np.int64], layout: Layout, sent: Row, survivors: int, shown: int | None = None
    ) -> Released:
        """The model that follows from a sum.

        Args:
            total: of the survivors' whole numbers, shape (plan.length,), without surplus noise.
            layout: of the model.
            sent: the global model of the round.
            survivors: how many updates are in the sum: a public number.
            shown: how many of them have shown their surplus noise, which is not in the total; None: all.
        """
        plan = self.plan(layout.size)
        step, sensitivity = plan.bound / plan.steps / survivors, plan.bound / survivors
        pieces = (total[start:end] for start, end in pairwise(layout.offsets))
        model = tuple((base + piece * step).astype(base.dtype) for base, piece in zip(sent, pieces, strict=True))
        noise = plan.shares.within(survivors, survivors if shown is None else shown)
        apart = self._apart(total, plan, survivors, noise)
        return Released(
            (model,),
            self.multiplier * self.factor * sensitivity,
            sensitivity,
            noise_multiplier=self.multiplier * self.factor,
            clipping_norm=self.clip.bound,
            released_distance=apart,
            following=self._followed(int(total[-1]), survivors, apart),
        )

    def _apart(self, total: NDArray[np.int64], plan: Plan, survivors: int, noise: int) -> float | None:
        """How far the updates lie apart, in units of the weights; None where nobody asks.

        It follows from what is released anyway. Noise adds its own variance to each squared number of the sum: so much
        is taken off again, and is too much where clients that collude have added none.
        """
        if self.squares is None:
            return None
        steps = total[: plan.parameters].astype(np.float64)
        summed = (float(steps @ steps) - plan.parameters * noise) / plan.steps**2
        return plan.bound * self.squares.apart(int(total[-1]), summed, survivors)

    def _followed(self, beside: int, survivors: int, apart: float | None) -> "DistributedMean | None":
        """The mechanism of the next round, whose clip or distance has followed what was beside the sum of updates."""
        if isinstance(self.clip, AdaptiveClip) and self.bits:
            return replace(self, clip=self.clip.moved(self.bits.share(beside, survivors)))
        return None if apart is None else self.told(apart)

    def told(self, distance: float) -> "DistributedMean":
        """This mechanism with another distance, which its limits hold.

        Args:
            distance: d ≥ 0, as somebody says.
        """
        low, high = self.scale.limits(self.clip.bound, ANY_MODEL)
        return replace(self, distance=min(max(distance, low), high))

    def state_dict(self) -> State:
        """As in `GaussianMechanism`, with the distance."""
        return {**super().state_dict(), "distance": np.array(self.distance)}

    def restored(self, state: State) -> "DistributedMean":
        """As in `Mechanism`."""
        return replace(super().restored(state), distance=float(state.get("distance", self.distance)))

    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        raise PrivacyError(
            "under secure aggregation clients add the noise, and the server has no single updates; there is nothing to"
            " noise here"
        )

    def refuse_canaries(self) -> None:
        """Raises ConfigError: the server cannot put made-up clients into a sum that clients mask."""
        raise ConfigError("privacy.canaries contradicts secure-aggregation.enabled = true; use 0 canaries")

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> "DistributedMean":
        """As in `Mechanism`: any strategy that lives on the mean.

        Args:
            capabilities, strategy: as in `Mechanism.suited_to`.

        Raises:
            ConfigError: the strategy needs single updates, or nobody knows.
        """
        if capabilities is None or capabilities.needs_every_reply:
            why = "declares no capabilities" if capabilities is None else "needs every reply"
            raise ConfigError(
                f"secure-aggregation.enabled = true contradicts strategy {strategy}, which {why}: the server learns "
                "the sum of the updates and no single one; use a strategy on the mean"
            )
        return self

    def parameters(self) -> dict[str, Parameter]:
        """All of them, by configuration key."""
        own: dict[str, Parameter] = {THRESHOLD: self.parties.threshold, COLLUDING: self.parties.colluding}
        return {**super().parameters(), **own}


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
    """The plan in a ring of so many bits; None: in the narrower one that has room for the sum."""
    if ring is not None:
        return Plan.of(
            bound, multiplier, parties, parameters, bits=ring, beside=beside, minimum_variance=minimum_variance
        )
    try:
        return Plan.of(bound, multiplier, parties, parameters, beside=beside)
    except PrivacyError:
        return Plan.of(bound, multiplier, parties, parameters, bits=64, beside=beside)
