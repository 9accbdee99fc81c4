"""`privacy.*`: what is done to what leaves, as one choice for the server and one for the clients.

The keys are flat, and each run hands over all of them. A variant holds the keys that mean something with it; a key of
another variant may stand at its default, and is refused otherwise.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_serializer, model_validator

from cloister.config.errors import no_effect, sections_of, suggestion
from cloister.config.section import (
    Auto,
    Count,
    Inner,
    NonNegative,
    Positive,
    Scalar,
    Section,
    Share,
    Whole,
    kebab,
    leaves,
)
from cloister.config.settings import read_options
from cloister.core.errors import ConfigError


class FixedClipping(Section):
    """Every update is clipped to the same norm in every round."""

    name: Literal["fixed"] = Field(default="fixed", alias="clipping")
    norm: Positive = Field(default=2.0, alias="clipping-norm")


class AdaptiveClipping(Section):
    """The norm follows a quantile of the updates, which is learnt from noised bits."""

    name: Literal["adaptive"] = Field(default="adaptive", alias="clipping")
    norm: Positive = Field(default=2.0, alias="clipping-norm")
    quantile: Inner = Field(default=0.5, alias="clipping-quantile")
    rate: Positive = Field(default=0.2, alias="clipping-rate")
    bits_noise_multiplier: Positive = 10.0


Clipping = Annotated[FixedClipping | AdaptiveClipping, Field(discriminator="name")]


class _WithoutNoise(Section):
    """A server that adds no noise has no budget, no weights to cap and no population to amplify by."""

    is_noised: ClassVar[bool] = False
    is_silent: ClassVar[bool] = True
    is_calibrated: ClassVar[bool] = False
    max_epsilon: ClassVar[float] = 0.0
    population: ClassVar[int] = 0
    examples_cap: ClassVar[float] = 0.0


class NoServerPrivacy(_WithoutNoise):
    """The server aggregates what it gets."""

    name: Literal["none"] = Field(default="none", alias="server")
    is_on: ClassVar[bool] = False
    hypotheses: ClassVar[int] = 0


class ClusteringPrivacy(_WithoutNoise):
    """The server trains several models side by side; each client chooses one and protects itself.

    Args:
        hypotheses: how many models there are, `privacy.clusters`.
    """

    name: Literal["laplace-clustering"] = Field(default="laplace-clustering", alias="server")
    hypotheses: Annotated[int, Field(ge=1, le=100)] = Field(default=2, alias="clusters")
    is_on: ClassVar[bool] = True


class _WithNoise(Section):
    """A server that noises what it releases, under a budget."""

    max_epsilon: NonNegative = 0.0
    is_on: ClassVar[bool] = True
    is_noised: ClassVar[bool] = True
    hypotheses: ClassVar[int] = 0


class _WithGaussianNoise(_WithNoise):
    """A server that clips every update and adds Gaussian noise in proportion to the clip."""

    noise_multiplier: NonNegative | Auto = 0.05
    clipping: Clipping = FixedClipping()
    examples_cap: NonNegative = 0.0
    placement: Literal["update", "rule", "model"] = "update"

    @property
    def is_silent(self) -> bool:
        """Whether the noise is switched off."""
        return self.noise_multiplier == 0

    @property
    def is_calibrated(self) -> bool:
        """Whether the noise is chosen to fit the budget."""
        return self.noise_multiplier == "auto"

    @model_validator(mode="after")
    def _has_a_budget(self) -> "_WithGaussianNoise":
        if self.is_calibrated and not self.max_epsilon:
            raise ValueError("privacy.noise-multiplier = 'auto' is calibrated to privacy.max-epsilon = 0; set a budget")
        return self


class GlobalPrivacy(_WithGaussianNoise):
    """The same noise in every round, whose cost adds up over rounds."""

    name: Literal["global-dp"] = Field(default="global-dp", alias="server")
    population: Whole = 0


class MetricPrivacy(_WithGaussianNoise):
    """Noise in proportion to how far the clients' models lie apart."""

    name: Literal["metric"] = Field(default="metric", alias="server")
    distance: str = "mean-layer-frobenius"
    distance_release: Literal["exact", "private"] = "exact"
    distance_noise_multiplier: Positive = 1.0
    distance_direction: Literal["divide", "multiply"] = "divide"
    distance_clip: Literal["after", "before"] = "after"
    min_distance: Positive = 0.1
    max_distance: NonNegative = 0.0
    # Two releases of one draw, the second of which depends on the first: nothing is amplified.
    population: ClassVar[int] = 0

    @model_validator(mode="after")
    def _has_a_range(self) -> "MetricPrivacy":
        if self.max_distance and self.max_distance < self.min_distance:
            raise ValueError(
                f"privacy.max-distance = {self.max_distance} must be at least privacy.min-distance = "
                f"{self.min_distance}, or 0 for no limit"
            )
        return self


class PluginPrivacy(_WithNoise):
    """A mechanism of another package, which the server looks up by its name; nodes need not have it.

    Args:
        name: under which the package registers it.
        options: of the mechanism, `privacy.options`: `key=value` pairs or TOML.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")] = Field(alias="server")
    text: str = Field(default="", alias="options")
    population: Whole = 0
    is_silent: ClassVar[bool] = False
    is_calibrated: ClassVar[bool] = False
    examples_cap: ClassVar[float] = 0.0

    @property
    def options(self) -> dict[str, Scalar]:
        """The options by their names."""
        return read_options("privacy.options", self.text)

    @field_validator("text")
    @classmethod
    def _can_be_read(cls, text: str) -> str:
        read_options("privacy.options", text)
        return text


class NoClientPrivacy(Section):
    """Clients send what they trained."""

    name: Literal["none"] = Field(default="none", alias="client")
    is_on: ClassVar[bool] = False
    clips_gradients: ClassVar[bool] = False
    has_delta: ClassVar[bool] = False
    counts_leakage: ClassVar[bool] = False
    noise_multiplier: ClassVar[float] = 0.0
    max_epsilon: ClassVar[float] = 0.0
    max_leakage: ClassVar[float] = 0.0
    bound: ClassVar[float] = 0.0
    bounds: ClassVar[tuple[str, ...]] = ()


class _ClientNoise(Section):
    """Clients add noise to what they send, or to what it is trained with."""

    noise_multiplier: NonNegative = Field(default=1.0, alias="client-noise-multiplier")
    is_on: ClassVar[bool] = True


class _ClippedNoise(_ClientNoise):
    """Gaussian noise in proportion to a clip."""

    clipping_norm: Positive = Field(default=1.0, alias="client-clipping-norm")
    max_epsilon: NonNegative = Field(default=0.0, alias="client-max-epsilon")
    has_delta: ClassVar[bool] = True
    counts_leakage: ClassVar[bool] = False
    max_leakage: ClassVar[float] = 0.0

    @property
    def bound(self) -> float:
        """Largest L2 norm of what one unit contributes."""
        return self.clipping_norm

    @property
    def bounds(self) -> tuple[str, ...]:
        """What bounds a contribution, in words."""
        return (f"client-clipping-norm {self.clipping_norm:.4g}",)


class DpSgdPrivacy(_ClippedNoise):
    """Clients train with clipped and noised gradients: each example (or group) is protected against everybody."""

    name: Literal["dp-sgd"] = Field(default="dp-sgd", alias="client")
    clipping_decay: Share = 0.0
    least_clipping_norm: NonNegative = 0.0
    batch_sampling: Literal["poisson", "shuffle"] = "poisson"
    group_cap: Count = 10
    clips_gradients: ClassVar[bool] = True

    @property
    def bounds(self) -> tuple[str, ...]:
        """What bounds a contribution, in words."""
        return (*super().bounds, f"{self.batch_sampling} batches")

    @model_validator(mode="after")
    def _has_a_floor(self) -> "DpSgdPrivacy":
        if self.clipping_decay and not self.least_clipping_norm:
            raise ValueError(
                f"privacy.clipping-decay = {self.clipping_decay} needs privacy.least-clipping-norm above 0: the clip "
                "would shrink until single precision knows it no more"
            )
        return self


class GaussianPrivacy(_ClippedNoise):
    """Clients clip their update and add Gaussian noise to it."""

    name: Literal["gaussian"] = Field(default="gaussian", alias="client")
    clips_gradients: ClassVar[bool] = False


class LaplacePrivacy(_ClientNoise):
    """Clients add multivariate Laplace noise to their model."""

    name: Literal["laplace"] = Field(default="laplace", alias="client")
    radius: NonNegative = 0.0
    per_layer: bool = False
    max_leakage: NonNegative = 0.0
    clips_gradients: ClassVar[bool] = False
    has_delta: ClassVar[bool] = False
    counts_leakage: ClassVar[bool] = True
    max_epsilon: ClassVar[float] = 0.0

    @property
    def bound(self) -> float:
        """Largest L2 norm of an update; 0: as far as training moves it."""
        return self.radius

    @property
    def bounds(self) -> tuple[str, ...]:
        """What bounds a contribution, in words."""
        return (f"radius {self.radius:.4g}" if self.radius else "radius of the update",)


ServerPrivacy = Annotated[
    Annotated[NoServerPrivacy, Tag("none")]
    | Annotated[GlobalPrivacy, Tag("global-dp")]
    | Annotated[MetricPrivacy, Tag("metric")]
    | Annotated[ClusteringPrivacy, Tag("laplace-clustering")]
    | Annotated[PluginPrivacy, Tag("plugin")],
    Discriminator(lambda value: _server_tag(value)),
]
ClientPrivacy = Annotated[
    NoClientPrivacy | DpSgdPrivacy | GaussianPrivacy | LaplacePrivacy, Field(discriminator="name")
]
CHOICES: Mapping[str, tuple[type[Section], ...]] = {
    "server": sections_of(ServerPrivacy),
    "client": sections_of(ClientPrivacy),
    "clipping": sections_of(Clipping),
}
"""The variants that a key chooses among, by that key."""
VARIANTS: Mapping[str, Mapping[str, type[Section]]] = {
    key: {variant.model_fields["name"].default: variant for variant in variants if variant is not PluginPrivacy}
    for key, variants in CHOICES.items()
}
"""The same by their names; that of a plugin is its own affair."""


def _server_tag(value: object) -> str:
    name = value.get("server") if isinstance(value, Mapping) else getattr(value, "name", None)
    return str(name) if name in VARIANTS["server"] else "plugin"


class PrivacyConfig(Section):
    """`privacy.*`: a choice for the server, one for the clients, and what both have in common.

    It is made from the flat keys, and is dumped as them.

    Args:
        server, client: what each does to what it sends.
        noise_seed: -1: the operating system's entropy.
        target_delta: δ at which budgets and claims are stated.
        ledger_dir, data_identity: where the ledger lies, and whose data it is about.
        choice, choice_epsilon, max_loss: how a client that protects itself chooses among hypotheses.
    """

    server: ServerPrivacy = MetricPrivacy()
    client: ClientPrivacy = NoClientPrivacy()
    noise_seed: Annotated[int, Field(ge=-1)] = -1
    target_delta: Inner = 1e-5
    ledger_dir: str = ""
    data_identity: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    choice: Literal["private", "exact"] = "private"
    choice_epsilon: Positive = 1.0
    max_loss: Positive = 10.0

    @property
    def chooses_exactly(self) -> bool:
        """Whether clients choose among hypotheses without noise."""
        return self.server.hypotheses > 1 and self.choice == "exact"

    @property
    def chooses_privately(self) -> bool:
        """Whether clients choose among hypotheses by noised losses."""
        return self.server.hypotheses > 1 and self.client.is_on and self.choice == "private"

    @property
    def dp_sgd(self) -> DpSgdPrivacy:
        """The settings of DP-SGD.

        Raises:
            ConfigError: the clients do something else.
        """
        if not isinstance(self.client, DpSgdPrivacy):
            raise ConfigError(f"privacy.client = {self.client.name!r}, expected 'dp-sgd'")
        return self.client

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Give each chosen variant its keys; refuse what would silently do nothing."""
        given: dict[str, object] = {}
        for name, value in values.items():
            given |= leaves(value) if isinstance(value, Section) else {kebab(name): value}
        rest, chosen = dict(given), dict[str, Variant]()
        nested = _taken(cls, rest, chosen)
        if None in chosen.values():
            return nested  # a name that nothing has: which keys belong to it, nobody knows
        idle = {key: _blamed(key, chosen) for key in rest if key in OWNERS} | dict(_jointly_idle(nested, chosen))
        set_idly = [key for key in sorted(idle.keys() & given) if not _is_default(key, given[key])]
        if lines := [_idle(key, idle[key], given) for key in set_idly]:
            raise ValueError("\n".join(lines))
        return nested | {key: value for key, value in rest.items() if key not in OWNERS}

    @model_serializer
    def _flat(self) -> dict[str, Scalar]:
        """Every key of every variant: those of others at their defaults."""
        return DEFAULTS | leaves(self)


Variant = type[Section] | None


def _taken(section: type[Section], keys: dict[str, object], chosen: dict[str, Variant]) -> dict[str, object]:
    """Take what a section and the variants in it hold out of `keys`, and note the variants in `chosen`."""
    found: dict[str, object] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if name in CHOICES:
            named = keys.pop(key, field.default.name)
            chosen[key] = VARIANTS[key].get(str(named), PluginPrivacy if key == "server" else None)
            variant = chosen[key]
            found[key] = {**(_taken(variant, keys, chosen) if variant else {}), key: named}
        elif key in keys:
            found[key] = keys.pop(key)
    return found


def _blamed(key: str, chosen: Collection[str]) -> str:
    """The key whose value leaves another one without a meaning: the choice that it belongs to, if that is made."""
    owner = OWNERS[key]
    return owner if owner in chosen else _blamed(owner, chosen)


def _jointly_idle(nested: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys whose meaning hangs on more than one choice, each with the key whose value leaves it without one."""
    server, client = chosen["server"], chosen["client"]
    if not server.is_noised and not client.is_on:
        yield "noise-seed", "server"
    if not server.is_noised and not client.has_delta:
        yield "target-delta", "server"
    if server is MetricPrivacy and nested["server"].get("distance-release", "exact") == "exact":
        yield "distance-noise-multiplier", "distance-release"
    if not client.is_on:
        yield from ((key, "client") for key in CHOICE)
    elif server is not ClusteringPrivacy:
        yield from ((key, "server") for key in CHOICE)
    elif nested.get("choice") == "exact":
        yield from ((key, "choice") for key in CHOICE if key != "choice")


def _idle(key: str, because: str, given: Mapping[str, object]) -> str:
    found = str(given.get(because, DEFAULTS[because]))
    meant = suggestion(found, VARIANTS["server"]) if because == "server" and found not in VARIANTS["server"] else ""
    return no_effect(f"privacy.{key}", given[key], because, found) + meant


def _is_default(key: str, value: object) -> bool:
    """Whether it is the default of a key; 0 is no False."""
    return value == DEFAULTS[key] and isinstance(value, bool) == isinstance(DEFAULTS[key], bool)


CHOICE = ("choice", "choice-epsilon", "max-loss")
KEYS = """
server noise-multiplier clipping-norm clipping clipping-quantile clipping-rate bits-noise-multiplier examples-cap
placement distance distance-release distance-noise-multiplier distance-direction distance-clip min-distance
max-distance noise-seed target-delta max-epsilon population ledger-dir data-identity clusters options client
client-noise-multiplier client-clipping-norm clipping-decay least-clipping-norm batch-sampling client-max-epsilon
radius per-layer max-leakage choice choice-epsilon max-loss group-cap
""".split()  # noqa: SIM905
"""Every key, in the order in which it is written down."""
OWNERS = {
    field.alias or name: key
    for key in CHOICES
    for variant in CHOICES[key]
    for name, field in variant.model_fields.items()
    if name != "name"
}
"""The choice that a key belongs to."""
_defaults = {
    field.alias or name: field.default
    for variants in CHOICES.values()
    for variant in variants
    for name, field in variant.model_fields.items()
} | leaves(PrivacyConfig())
DEFAULTS: dict[str, Scalar] = {key: _defaults[key] for key in KEYS}
"""The value of every key that is not given."""
