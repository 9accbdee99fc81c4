"""Section `secure-aggregation.*`, and the shared release that it asks for."""

from collections.abc import Mapping

from pydantic import model_validator

from cloister.config import variants
from cloister.config.io import Scalar, Section, Whole
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.shared import SharedRelease
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD, Parties
from cloister.privacy.mechanisms.distributed.steps import SAMPLING_RATE, DistributedStep, SharedDpSgd
from cloister.utils.errors import ConfigError

ENABLED = "secure-aggregation.enabled"
SWITCHED_OFF: Mapping[str, Scalar] = {ENABLED: False, THRESHOLD: 0, COLLUDING: 0, SAMPLING_RATE: 0.0}
"""Settings of the same run without secure aggregation. The server then sees every update, and the noise of its mean is
the same. The steps of `dp-sgd` are then each client's own.
"""
LARGEST_COHORT = 100
"""Largest cohort of a round: every client shares secrets with every other one."""
NODES = "strategy.min-nodes"
SMALLEST = 4
"""Least number of nodes from which t and c follow: of 3 or fewer none could collude, or none could be lost."""


class SecureAggregationConfig(Section):
    """Section `secure-aggregation.*`: the server receives a sum, to which each client has added a share of the noise.

    Args:
        enabled: whether it is on.
        threshold: t: the number of clients that must stay to the end of a round; with fewer there is no sum. 0: t and c
            follow from the number of nodes (`with_parties`).
        colluding: c: the largest number of clients that may collude with the server or each other; 0: none.
    """

    enabled: bool = False
    threshold: Whole = 0
    colluding: Whole = 0

    @property
    def parties(self) -> Parties:
        """Return the largest accepted cohort, t and c.

        Two lists of survivors with t signatures each must have an honest signer in common: 2t > n + c.
        """
        return Parties(min(2 * self.threshold - self.colluding - 1, LARGEST_COHORT), self.threshold, self.colluding)

    def shared_release(self, privacy: PrivacyConfig, group: str) -> SharedRelease | None:
        """Return the release of a round; None if secure aggregation is off.

        Args:
            privacy: section `privacy.*` of the run.
            group: `task.group`.

        Raises:
            ConfigError: the noise is not calibrated yet, or the server's mechanism does not support it.
        """
        if not self.enabled:
            return None
        if privacy.client.clips_gradients:
            dp_sgd = privacy.dp_sgd
            own = vars(dp_sgd.mechanism(group))
            return DistributedStep(SharedDpSgd(**own, sampling_rate=dp_sgd.sampling_rate, parties=self.parties))
        server = privacy.server
        if not isinstance(server, variants.GlobalPrivacy | variants.MetricPrivacy):
            raise ConfigError(f"{ENABLED} = True with privacy.server = {server.name!r}; use 'global-dp' or 'metric'")
        return DistributedMean(
            noise_multiplier=server.noise_multiplier,
            clip=server.clipping.clip(),
            parties=self.parties,
            scale=server.scale(),
        )

    @model_validator(mode="after")
    def _agree(self) -> "SecureAggregationConfig":
        if not self.enabled:
            if self.threshold or self.colluding:
                raise ValueError(
                    f"{THRESHOLD} = {self.threshold} and {COLLUDING} = {self.colluding} have no effect with {ENABLED} ="
                    " False"
                )
        elif not self.threshold and not self.colluding:
            raise ValueError(
                f"{THRESHOLD} = 0 follows from {NODES} of {SMALLEST} to {LARGEST_COHORT}: set that to the number of "
                f"nodes of a round, or set {THRESHOLD} and {COLLUDING}"
            )
        elif not max(1, self.colluding) < self.threshold <= LARGEST_COHORT:
            raise ValueError(
                f"{THRESHOLD} = {self.threshold} must be at least 2, above {COLLUDING} = {self.colluding} and at most "
                f"{LARGEST_COHORT}"
            )
        return self


def with_parties(settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """Return the settings with t and c of a secure aggregation that sets neither.

    They follow from n = `strategy.min-nodes`: c = ⌊(n - 1)/3⌋ clients may collude, and as many may be lost: t = n - c.
    This is the largest c with an honest signer in common to any two lists of survivors, 2t > n + c, and as many losses.

    Args:
        settings: dotted keys of a run. An n that is too small, too large or invalid adds nothing.
    """
    nodes = settings.get(NODES)
    if settings.get(ENABLED) is not True or settings.get(THRESHOLD) or settings.get(COLLUDING):
        return settings
    if type(nodes) is not int or not SMALLEST <= nodes <= LARGEST_COHORT:
        return settings
    colluding = (nodes - 1) // 3
    return {**settings, THRESHOLD: nodes - colluding, COLLUDING: colluding}
