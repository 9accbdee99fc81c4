"""Sections `privacy.*` and `secure-aggregation.*`: the mechanisms of the server and the clients, and shared noise.

The keys of `privacy.*` are flat, and every run passes all of them. A key of a variant that is not chosen must have its
default value.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from cloister.config import variants
from cloister.config.io import Inner, Positive, Scalar, Section, Whole, kebab, no_effect
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.shared import SharedRelease
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD, Parties
from cloister.privacy.mechanisms.distributed.steps import SAMPLING_RATE, DistributedStep, SharedDpSgd
from cloister.privacy.mechanisms.selection import ReleaseContext
from cloister.utils.errors import ConfigError
from cloister.utils.text import suggestion

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


class PrivacyConfig(Section):
    """Section `privacy.*`: a choice for the server, one for the clients, and common keys.

    It is parsed from the flat keys, and serialized to them.

    Args:
        server, client: mechanism of the server and of the clients.
        noise_seed: -1: the operating system's entropy.
        target_delta: δ at which budgets and claims are stated.
        ledger_dir, data_identity: folder of the ledger, and the identity of the data it is about.
        close_budget: whether a run without a guarantee may invalidate the budget in that ledger.
        choice, choice_epsilon, max_loss: mechanism by which a private client chooses among hypotheses.
    """

    server: variants.ServerPrivacy = variants.MetricPrivacy()
    client: variants.ClientPrivacy = variants.NoClientPrivacy()
    noise_seed: Annotated[int, Field(ge=-1)] = -1
    target_delta: Inner = 1e-5
    ledger_dir: str = ""
    data_identity: Annotated[str, Field(pattern=r"^[\w.-]{0,200}$")] = ""
    close_budget: bool = False
    choice: Literal["private", "exact"] = "private"
    choice_epsilon: Positive = 1.0
    max_loss: Positive = 10.0

    @property
    def chooses_exactly(self) -> bool:
        """Return whether clients choose among hypotheses without noise."""
        return self.server.hypotheses > 1 and self.choice == "exact"

    @property
    def split_round(self) -> int:
        """Return the round whose releases separate hypotheses.

        Until that round they are one model. 0: there is no such round.
        """
        return self.server.split_round if isinstance(self.server, variants.ClusteringPrivacy) else 0

    @property
    def chooses_privately(self) -> bool:
        """Return whether clients choose among hypotheses by noised losses."""
        return self.server.hypotheses > 1 and self.client.is_on and self.choice == "private"

    @property
    def circumstances(self) -> ReleaseContext:
        """Return the other settings on which the clients' guarantee depends."""
        hypotheses, private = max(1, self.server.hypotheses), self.choice == "private"
        return ReleaseContext(self.noise_seed != -1, hypotheses, private, self.choice_epsilon)

    @property
    def dp_sgd(self) -> variants.DpSgdPrivacy:
        """Return the settings of DP-SGD.

        Raises:
            ConfigError: the clients have another mechanism.
        """
        if not isinstance(self.client, variants.DpSgdPrivacy):
            raise ConfigError(f"privacy.client = {self.client.name!r}, expected 'dp-sgd'")
        return self.client

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Sort the keys into the chosen variants, and refuse keys without effect."""
        given: dict[str, object] = {}
        for name, value in values.items():
            given |= value.leaves() if isinstance(value, Section) else {kebab(name): value}
        rest, chosen = dict(given), dict[str, Variant]()
        nested = _taken(cls, rest, chosen)
        if None in chosen.values():
            return nested  # an unknown name: its keys are unknown too
        idle = {key: _blamed(key, chosen) for key in rest if key in OWNERS} | dict(_jointly_idle(nested, chosen))
        lines, names = list[str](), variants.BY_NAME["server"]
        for key in sorted(idle.keys() & given):
            value, default, because = given[key], DEFAULTS[key], idle[key]
            if value != default or isinstance(value, bool) != isinstance(default, bool):  # 0 and False differ
                found = str(given.get(because, DEFAULTS[because]))
                meant = suggestion(found, names) if because == "server" and found not in names else ""
                lines.append(no_effect(f"privacy.{key}", value, because, found) + meant)
        if lines:
            raise ValueError("\n".join(lines))
        return nested | {key: value for key, value in rest.items() if key not in OWNERS}

    @model_serializer
    def _flat(self) -> dict[str, Scalar]:
        """Return every key of every variant.

        Keys of variants that are not chosen have their defaults.
        """
        return DEFAULTS | self.leaves()


def idle(settings: Mapping[str, Scalar]) -> set[str]:
    """Return the keys of `privacy.*` that belong to variants that are not chosen.

    These keys have no effect.

    Args:
        settings: dotted keys of a run. If a choice is invalid, the result is empty.
    """
    chosen = {key: settings[f"privacy.{key}"] for key in variants.CHOICES if f"privacy.{key}" in settings}
    for given in (chosen, {key: value for key, value in chosen.items() if key != "clipping"}):
        with suppress(ValueError, ConfigError):
            active = PrivacyConfig.model_validate(given).leaves()
            return {f"privacy.{key}" for key in DEFAULTS if key not in active}
    return set()


Variant = type[Section] | None


def _taken(section: type[Section], keys: dict[str, object], chosen: dict[str, Variant]) -> dict[str, object]:
    """Move the keys of a section and its variants out of `keys`.

    The variants are recorded in `chosen`.
    """
    found: dict[str, object] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if name in variants.CHOICES:
            named = keys.pop(key, field.default.name)
            chosen[key] = variants.BY_NAME[key].get(str(named), variants.PluginPrivacy if key == "server" else None)
            variant = chosen[key]
            found[key] = {**(_taken(variant, keys, chosen) if variant else {}), key: named}
        elif key in keys:
            found[key] = keys.pop(key)
    return found


def _blamed(key: str, chosen: Collection[str]) -> str:
    """Return the key whose value makes another one meaningless.

    This is the innermost choice that has been made.
    """
    owner = OWNERS[key]
    return owner if owner in chosen else _blamed(owner, chosen)


def _jointly_idle(nested: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that depend on several choices and have no effect.

    Each comes with the key that causes it.
    """
    server, client = chosen["server"], chosen["client"]
    if not server.is_noised and not client.is_on:
        yield "noise-seed", "server"
    if not server.is_noised and not client.has_delta:
        yield "target-delta", "server"
    if server is variants.MetricPrivacy and nested["server"].get("distance-release", "exact") == "exact":
        yield "distance-noise-multiplier", "distance-release"
    if not client.is_on:
        yield from ((key, "client") for key in CHOICE)
    elif server is not variants.ClusteringPrivacy:
        yield from ((key, "server") for key in CHOICE)
    elif nested.get("choice") == "exact":
        yield from ((key, "choice") for key in CHOICE if key != "choice")


CHOICE = ("choice", "choice-epsilon", "max-loss")
_FIELDS = [
    (key, field.alias or name, field.default)
    for key, choice in variants.CHOICES.items()
    for variant in choice
    for name, field in variant.model_fields.items()
    if name != "name"
]
OWNERS = {name: key for key, name, _ in _FIELDS}
"""Choice that each key belongs to."""
_defaults = {name: default for _, name, default in _FIELDS} | PrivacyConfig().leaves()
DEFAULTS: dict[str, Scalar] = dict(sorted(_defaults.items(), key=lambda item: item[0] not in variants.CHOICES))
"""Default of every key, those of choices first."""


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
