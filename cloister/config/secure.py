"""Section `secure-aggregation.*`: its keys, and its contradictions with other settings."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pydantic import model_validator

from cloister.config import variants
from cloister.config.section import Scalar, Section, Whole
from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms.distributed.beside import LARGEST_MULTIPLIER
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD, Parties

if TYPE_CHECKING:
    from cloister.config.run import RunConfig

ENABLED = "secure-aggregation.enabled"
SWITCHED_OFF: Mapping[str, Scalar] = {ENABLED: False, THRESHOLD: 0, COLLUDING: 0}
"""Settings of the same run without secure aggregation. The server then sees every update, and the noise of its mean is
the same.
"""
LARGEST_COHORT = 100
"""Largest cohort of a round: every client shares secrets with every other one."""


class SecureAggregationConfig(Section):
    """Section `secure-aggregation.*`: the server receives a sum, to which each client has added a share of the noise.

    Args:
        enabled: whether it is on.
        threshold: t: the number of clients that must stay to the end of a round; with fewer there is no sum.
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

    @model_validator(mode="after")
    def _agree(self) -> "SecureAggregationConfig":
        if not self.enabled:
            if self.threshold or self.colluding:
                raise ValueError(
                    f"{THRESHOLD} = {self.threshold} and {COLLUDING} = {self.colluding} have no effect with {ENABLED} ="
                    " False"
                )
        elif not max(1, self.colluding) < self.threshold <= LARGEST_COHORT:
            raise ValueError(
                f"{THRESHOLD} = {self.threshold} must be at least 2, above {COLLUDING} = {self.colluding} and at most "
                f"{LARGEST_COHORT}"
            )
        return self


def shared_mean(config: "RunConfig") -> DistributedMean:
    """Return the distributed mechanism of a run with secure aggregation.

    Args:
        config: of the run.

    Raises:
        ConfigError: secure aggregation is off, or the server's mechanism does not support it.
    """
    server = config.privacy.server
    if not config.secure_aggregation.enabled or not isinstance(server, variants.GlobalPrivacy | variants.MetricPrivacy):
        raise ConfigError(f"{ENABLED} = {config.secure_aggregation.enabled} with privacy.server = {server.name!r}")
    return DistributedMean(
        noise_multiplier=server.noise_multiplier,
        clip=server.clipping.clip(),
        parties=config.secure_aggregation.parties,
        scale=server.scale(),
    )


def refusal(config: "RunConfig") -> str:
    """Return the setting that contradicts secure aggregation.

    It is empty if no setting does, or if secure aggregation is off.
    """
    if not config.secure_aggregation.enabled:
        return ""
    reason = next(filter(None, (rule(config) for rule in _RULES)), "")
    return f"{ENABLED} = true contradicts {reason}" if reason else ""


def _of_server(config: "RunConfig") -> str:
    server = config.privacy.server
    if isinstance(server, variants.MetricPrivacy):
        if reason := _of_distance(server):
            return reason
    elif not isinstance(server, variants.GlobalPrivacy):
        return (
            f"privacy.server = {server.name!r}: groups and choices need single updates, and the server sees none; use "
            "'global-dp', or 'metric' with privacy.distance = 'rms'"
        )
    if server.placement != "update":
        return f"privacy.placement = {server.placement!r}, which needs single updates; use 'update'"
    clipping = server.clipping
    if isinstance(clipping, variants.AdaptiveClipping) and clipping.bits_noise_multiplier > LARGEST_MULTIPLIER:
        return (
            f"privacy.bits-noise-multiplier = {clipping.bits_noise_multiplier:g}: no shares of so much noise are made; "
            f"use at most {LARGEST_MULTIPLIER:g}"
        )
    if server.is_calibrated:
        return (
            "privacy.noise-multiplier = 'auto': clients add the noise, and go by the configuration; "
            "`cloister plan --epsilon` finds it"
        )
    if server.examples_cap or config.strategy.weighting == "examples":
        return (
            "strategy.weighting = 'examples': every update counts the same; use 'uniform' and no privacy.examples-cap"
        )
    return ""


def _of_distance(server: variants.MetricPrivacy) -> str:
    if server.distance != "rms":
        return (
            f"privacy.distance = {server.distance!r}: the distance of two clients needs single updates, and the server "
            "sees none; use 'rms', which follows from sums"
        )
    if server.distance_release != "private" or server.distance_clip != "after":
        return (
            f"privacy.distance-release = {server.distance_release!r} with privacy.distance-clip = "
            f"{server.distance_clip!r}: what the server learns beside the sum has noise of its own, and is of clipped "
            "updates; use 'private' and 'after'"
        )
    if isinstance(server.clipping, variants.AdaptiveClipping):
        return "privacy.clipping = 'adaptive' with privacy.server = 'metric': a distance is of one clip; use 'fixed'"
    if server.distance_noise_multiplier > LARGEST_MULTIPLIER:
        return (
            f"privacy.distance-noise-multiplier = {server.distance_noise_multiplier:g}: no shares of so much noise are "
            f"made; use at most {LARGEST_MULTIPLIER:g}"
        )
    return ""


def _of_clients(config: "RunConfig") -> str:
    if config.privacy.client.is_on:
        return (
            f"privacy.client = {config.privacy.client.name!r}: clients add a share of the server's noise and no "
            "other; use 'none'"
        )
    if config.privacy.noise_seed != -1:
        return (
            f"privacy.noise-seed = {config.privacy.noise_seed}: the noise of each client comes from its own secrets; "
            "use -1"
        )
    return ""


def _of_draws(config: "RunConfig") -> str:
    server, strategy = config.privacy.server, config.strategy
    if strategy.sampling != "fixed" or server.population:
        return (
            f"strategy.sampling = {strategy.sampling!r} and privacy.population = {server.population}: members sign "
            "each other's names, so that no draw is secret; use 'fixed' and 0"
        )
    if server.canaries:
        return f"privacy.canaries = {server.canaries}: the server cannot put made-up clients into a sum; use 0"
    if strategy.min_replies:
        return f"strategy.min-replies = {strategy.min_replies}: {THRESHOLD} says how many a round needs; use 0"
    return ""


def _of_cohorts(config: "RunConfig") -> str:
    parties, minimum = config.secure_aggregation.parties, config.strategy.min_nodes
    if minimum not in parties.survivors():
        return (
            f"strategy.min-nodes = {minimum}: with {THRESHOLD} = {parties.threshold} and {COLLUDING} = "
            f"{parties.colluding} a round needs {parties.threshold} to {parties.members} clients"
        )
    return ""


_RULES: tuple[Callable[["RunConfig"], str], ...] = (_of_server, _of_clients, _of_draws, _of_cohorts)
