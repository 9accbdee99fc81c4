"""Release of a round with secure aggregation, to which each client adds a share of the noise.

Server, nodes and `cloister plan` ask one value about it, `RunConfig.shared_release`:

| form | a client sends | the noise protects |
|---|---|---|
| `mean.DistributedMean` | its clipped update | a client, and so each of its examples and groups |
| `steps.DistributedStep` | the sum of its clipped gradients, for one step of DP-SGD | an example or a group |
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.mechanism import Mechanism, Released
from cloister.utils import check
from cloister.utils.arrays import Layout, Row
from cloister.utils.errors import ConfigError
from cloister.utils.registry import Capabilities


@dataclass(frozen=True)
class SharedSum:
    """Sum of a round, of which the server sees nothing else.

    Attributes:
        total: sum of the survivors' integers, shape (plan.length,), without surplus noise.
        survivors: public number of inputs in the sum, above 0.
        shown: number of survivors that revealed their surplus noise, which is not in the total.
        units: sum of the survivors' public sizes; 0: the release needs none.
    """

    total: NDArray[np.int64]
    survivors: int
    shown: int
    units: int = 0

    def __post_init__(self) -> None:
        check.positive(survivors=self.survivors)


class SharedRelease(Mechanism, abstract=True):
    """Mechanism whose noise is made by the clients, and whose input at the server is a sum.

    Attributes:
        seen: what the server sees of a round without noise.

    Guarantee: for any survivors, a round costs at most `events` for a client, and `unit_events` for an example or a
        group of one client.
    """

    seen: ClassVar[str]

    @abstractmethod
    def plan(self, parameters: int, server_round: int = 1) -> Plan:
        """Return the plan of a round, the same for all parties.

        Args:
            parameters: p, numbers of the model.
            server_round: counted from 1.

        Raises:
            PrivacyError: the sum might exceed the ring, or the noise is beyond the range of exact noise.
        """

    @abstractmethod
    def bound_in(self, server_round: int) -> float:
        """Return the largest L2 norm of a protected contribution: C of an update, S of a unit's gradient.

        Args:
            server_round: counted from 1.
        """

    @abstractmethod
    def encode(self, made: Row, sent: Row, layout: Layout, plan: Plan) -> NDArray[np.int64]:
        """Return a client's bounded input to the sum, without noise.

        Args:
            made: the trained model, or the sum of clipped gradients.
            sent: the global model of the round.
            layout: of the model.
            plan: of the round.

        Returns:
            Whole numbers, shape (plan.length,).

        Raises:
            PrivacyError: the arrays have not p numbers.
        """

    @abstractmethod
    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return the releases of a round about a whole client, for any survivors.

        Args:
            layout, sampling: as in `Mechanism.events`.
            by_provisioner: members of the roster whose keys the provisioner made; they count as colluding. The sum is
                proved to hold t - c honest shares if at most c collude. If more do, one share counts.
        """

    @abstractmethod
    def unit_events(self, layout: Layout, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return the releases of a round about an example or a group of one client, for any survivors.

        Args:
            layout, by_provisioner: as in `events`.
        """

    @abstractmethod
    def released(self, summed: SharedSum, sent: Row, layout: Layout, server_round: int) -> Released:
        """Return the release that follows from a sum: post-processing of it and of public numbers.

        Args:
            summed: of the round.
            sent: the global model of the round.
            layout: of the model.
            server_round: counted from 1.

        Raises:
            PrivacyError: the release is a mean over units, and the survivors attest no size.
        """

    def stated(self) -> Mapping[str, float]:
        """Return the fields that the server states in its messages, because they follow from earlier rounds."""
        return {}

    def restated(self, bound: float, distance: float) -> Self:
        """Return this release with the numbers of a message; other forms than the one that states them ignore them.

        Args:
            bound: C > 0 of the message, or as configured.
            distance: d > 0 of the message; 1 if it states none.
        """
        return self

    @property
    def needs_public_cohort(self) -> bool:
        """Return True: members learn who takes part."""
        return True

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> Self:
        """Return this mechanism for a strategy that uses the mean alone.

        Args:
            capabilities, strategy: as in `Mechanism.suited_to`.

        Raises:
            ConfigError: the strategy needs single updates, or declares no capabilities.
        """
        if capabilities is None or capabilities.needs_every_reply:
            why = "declares no capabilities" if capabilities is None else "needs every reply"
            raise ConfigError(
                f"secure-aggregation.enabled = true contradicts strategy {strategy}, which {why}: the server learns "
                "the sum of the updates and no single one; use a strategy on the mean"
            )
        return self
