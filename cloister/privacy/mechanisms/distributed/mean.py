"""The mean of updates that nobody sees alone: each client clips its own, and adds its share of the noise to it.

| edge case | what happens |
|---|---|
| a client's training fails, or it has no examples | its update is 0, with its share of the noise |
| an update with NaN, infinity, or squares that overflow | it counts as 0, with its share of the noise |
| fewer clients than the threshold are left | there is no sum; the model and the clip stay as they were |
| single updates in the server's hands | refused: there is nothing here that would add noise to them |
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.core.arrays import Layout, Row
from cloister.core.capabilities import Capabilities
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.distributed.beside import Bits
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD, Parties
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.mechanism import Contributions, Parameter, Released


@dataclass(frozen=True, kw_only=True)
class DistributedMean(GaussianMechanism):
    """The mean of the clipped updates of those who are left, with noise of standard deviation z·C on their sum.

    Attributes:
        parties: the largest cohort, and how many of it must be left and may collude.

    Guarantee: each round costs what `Plan.events` says, for zeroing one client's update, against the server together
        with as many clients as may collude, whoever drops out. It rests on a sum that holds at least
        `parties.honest` honest inputs: the protocol's part.

    Source: Kairouz, Liu, Steinke (2021), arXiv:2102.06387.
    """

    parties: Parties

    placement = "update"

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
        beside = (self.bits,) if self.bits else ()
        return _planned(self.clip.bound, self.multiplier, self.parties, parameters, beside)

    @property
    def bits(self) -> Bits | None:
        """What the clip follows; None where it is fixed."""
        return Bits.of(self.clip, self.parties) if isinstance(self.clip, AdaptiveClip) else None

    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED) -> tuple[Event, ...]:
        """The releases of a round, whoever is left: the bits that a clip follows, where it adapts, and the sum.

        None depends on C, which an adaptive clip moves: updates and noise are counted in steps of it.

        Args:
            layout, sampling: as in `GaussianMechanism.events`.
        """
        return self.plan(layout.size).events()

    def released(self, total: NDArray[np.int64], layout: Layout, sent: Row, survivors: int) -> Released:
        """The model that follows from a sum.

        Args:
            total: of the survivors' whole numbers, shape (plan.length,), without surplus noise.
            layout: of the model.
            sent: the global model of the round.
            survivors: how many updates are in the sum: a public number.
        """
        plan = self.plan(layout.size)
        step, sensitivity = plan.bound / plan.steps / survivors, plan.bound / survivors
        pieces = (total[start:end] for start, end in pairwise(layout.offsets))
        model = tuple((base + piece * step).astype(base.dtype) for base, piece in zip(sent, pieces, strict=True))
        return Released(
            (model,),
            self.multiplier * sensitivity,
            sensitivity,
            noise_multiplier=self.multiplier,
            clipping_norm=self.clip.bound,
            following=self._followed(int(total[-1]), survivors),
        )

    def _followed(self, bits: int, survivors: int) -> "DistributedMean | None":
        """The mechanism of the next round, whose clip has followed the sum of bits; None where it is fixed."""
        if not (isinstance(self.clip, AdaptiveClip) and self.bits):
            return None
        return replace(self, clip=self.clip.moved(self.bits.share(bits, survivors)))

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


@lru_cache(maxsize=16)
def _planned(bound: float, multiplier: float, parties: Parties, parameters: int, beside: tuple[Bits, ...] = ()) -> Plan:
    """The plan in the narrower ring that has room for the sum."""
    try:
        return Plan.of(bound, multiplier, parties, parameters, beside=beside)
    except PrivacyError:
        return Plan.of(bound, multiplier, parties, parameters, bits=64, beside=beside)
