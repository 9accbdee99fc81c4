"""Variants of `privacy.server`, `privacy.client` and `privacy.clipping`: a section for each choice.

A section contains the keys that its choice uses, and the properties that code needs of every choice. So no code
compares names. If a key of the client has the name of a key of the server, it has the prefix `client-`.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cloister.config.io import (
    Auto,
    Count,
    Inner,
    NonNegative,
    Positive,
    Scalar,
    Section,
    Share,
    Whole,
    read_options,
    sections_of,
)
from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps, OneStep
from cloister.privacy.mechanisms.clipping import MAX_RATE, AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.gaussian import GaussianMechanism, global_dp
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.privacy.mechanisms.metric import CONSTANT, Constant, DistanceScaled
from cloister.utils.errors import ConfigError


class FixedClipping(Section):
    """Clipping of every update to the same norm in every round."""

    name: Literal["fixed"] = Field(default="fixed", alias="clipping")
    norm: Positive = Field(default=2.0, alias="clipping-norm")

    def clip(self) -> FixedClip:
        """Return the bound of the updates of the first round."""
        return FixedClip(self.norm)


class AdaptiveClipping(Section):
    """Clipping norm that follows a quantile of the updates' norms, estimated from noised bits."""

    name: Literal["adaptive"] = Field(default="adaptive", alias="clipping")
    norm: Positive = Field(default=2.0, alias="clipping-norm")
    quantile: Inner = Field(default=0.5, alias="clipping-quantile")
    rate: Annotated[float, Field(gt=0, le=MAX_RATE)] = Field(default=0.2, alias="clipping-rate")
    count_noise_multiplier: Positive = Field(default=10.0, alias="clipping-count-noise-multiplier")

    def clip(self) -> AdaptiveClip:
        """Return the bound of the updates of the first round."""
        return AdaptiveClip(self.norm, self.quantile, self.rate, self.count_noise_multiplier)


Clipping = Annotated[FixedClipping | AdaptiveClipping, Field(discriminator="name")]


class _WithoutNoise(Section):
    """Server without noise: it has no budget, no weights to cap and no population to amplify by."""

    is_noised: ClassVar[bool] = False
    is_silent: ClassVar[bool] = True
    is_calibrated: ClassVar[bool] = False
    max_epsilon: ClassVar[float] = 0.0
    population: ClassVar[int] = 0
    examples_cap: ClassVar[float] = 0.0
    canaries: ClassVar[int] = 0


class NoServerPrivacy(_WithoutNoise):
    """Server that aggregates updates without a mechanism."""

    name: Literal["none"] = Field(default="none", alias="server")
    is_on: ClassVar[bool] = False
    hypotheses: ClassVar[int] = 0


class ClusteringPrivacy(_WithoutNoise):
    """Server that trains several models; each client chooses one and applies its own mechanism.

    Args:
        hypotheses: number of models, `privacy.clusters`.
        split_round: the round whose releases separate the models, `privacy.clusters-split-round`. Until then all
            clients train one model. 0: each model has its own random start.
    """

    name: Literal["laplace-clustering"] = Field(default="laplace-clustering", alias="server")
    hypotheses: Annotated[int, Field(ge=1, le=100)] = Field(default=2, alias="clusters")
    split_round: Annotated[int, Field(ge=0)] = Field(default=0, alias="clusters-split-round")
    is_on: ClassVar[bool] = True


class _WithNoise(Section):
    """Server that adds noise to its releases under a budget, and may measure their leakage.

    Args:
        max_epsilon: the budget; 0: none.
        canaries: number of artificial clients for the measurement.
    """

    max_epsilon: NonNegative = 0.0
    canaries: Annotated[int, Field(ge=0, le=100_000)] = 0
    is_on: ClassVar[bool] = True
    is_noised: ClassVar[bool] = True
    hypotheses: ClassVar[int] = 0


class _WithGaussianNoise(_WithNoise):
    """Server that clips every update and adds Gaussian noise in proportion to the clipping norm."""

    noise_multiplier: NonNegative | Auto = 0.05
    clipping: Clipping = FixedClipping()
    examples_cap: NonNegative = 0.0
    placement: Literal["update", "rule", "model"] = "update"

    def mechanism(self) -> GaussianMechanism:
        """Return the server's mechanism for the updates of a round."""
        return global_dp(
            noise_multiplier=self.noise_multiplier,
            clipping_norm=self.clipping.clip(),
            placement=self.placement,
            examples_cap=self.examples_cap,
            scale=self.scale(),
        )

    def scale(self) -> Constant:
        """Return the scale of a round's noise, which is constant."""
        return CONSTANT

    @property
    def is_silent(self) -> bool:
        """Return whether the noise multiplier is 0."""
        return self.noise_multiplier == 0

    @property
    def is_calibrated(self) -> bool:
        """Return whether the noise is calibrated to the budget."""
        return self.noise_multiplier == "auto"

    @model_validator(mode="after")
    def _has_a_budget(self) -> "_WithGaussianNoise":
        if self.is_calibrated and not self.max_epsilon:
            raise ValueError("privacy.noise-multiplier = 'auto' is calibrated to privacy.max-epsilon = 0; set a budget")
        return self


class GlobalPrivacy(_WithGaussianNoise):
    """Server with the same noise in every round; its cost adds up over rounds."""

    name: Literal["global-dp"] = Field(default="global-dp", alias="server")
    population: Whole = 0


class MetricPrivacy(_WithGaussianNoise):
    """Server with noise in proportion to the distance of the clients' models."""

    name: Literal["metric"] = Field(default="metric", alias="server")
    distance: str = "mean-layer-frobenius"
    distance_release: Literal["exact", "private"] = "exact"
    distance_noise_multiplier: Positive = 1.0
    distance_direction: Literal["divide", "multiply"] = "divide"
    distance_clip: Literal["after", "before"] = "after"
    min_distance: NonNegative = 0.1
    max_distance: NonNegative = 0.0
    # Each draw gives two releases, and the second depends on the first: no amplification applies.
    population: ClassVar[int] = 0

    def scale(self) -> DistanceScaled:
        """Return the scale of a round's noise: the distance of the clients' models."""
        return DistanceScaled(
            distance=self.distance,
            direction=self.distance_direction,
            measure=self.distance_clip,
            release=self.distance_release,
            distance_multiplier=self.distance_noise_multiplier,
            min_distance=self.min_distance,
            max_distance=self.max_distance,
        )

    @model_validator(mode="after")
    def _has_a_range(self) -> "MetricPrivacy":
        if self.max_distance and self.max_distance < self.min_distance:
            raise ValueError(
                f"privacy.max-distance = {self.max_distance} must be at least privacy.min-distance = "
                f"{self.min_distance}, or 0 for no limit"
            )
        return self


class PluginPrivacy(_WithNoise):
    """Mechanism of another package, which the server looks up by name; nodes need not install it.

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
        """Return the options by their names."""
        return read_options("privacy.options", self.text)

    @field_validator("text")
    @classmethod
    def _can_be_read(cls, text: str) -> str:
        read_options("privacy.options", text)
        return text


class NoClientPrivacy(Section):
    """Clients without a mechanism: they send their trained weights."""

    name: Literal["none"] = Field(default="none", alias="client")
    is_on: ClassVar[bool] = False
    clips_gradients: ClassVar[bool] = False
    is_calibrated: ClassVar[bool] = False
    has_delta: ClassVar[bool] = False
    counts_leakage: ClassVar[bool] = False
    noise_multiplier: ClassVar[float] = 0.0
    noise_key: ClassVar[str] = ""
    max_epsilon: ClassVar[float] = 0.0
    max_leakage: ClassVar[float] = 0.0
    bound: ClassVar[float] = 0.0
    bounds: ClassVar[tuple[str, ...]] = ()
    noise_on_update: ClassVar[None] = None


class _ClientNoise(Section):
    """Clients that add noise to what they send, or to their gradients.

    Noise and clip are of other things in each mechanism, so each has keys of its own.
    """

    name: str
    noise: NonNegative | Auto
    is_on: ClassVar[bool] = True

    @property
    def noise_key(self) -> str:
        """Return the dotted key of the noise multiplier."""
        return f"privacy.{self.name}-noise-multiplier"

    @property
    def is_calibrated(self) -> bool:
        """Return whether the noise is to be calibrated to the budget."""
        return self.noise == "auto"

    @property
    def noise_multiplier(self) -> float:
        """Return the noise multiplier.

        Raises:
            ConfigError: it has not been calibrated yet.
        """
        if isinstance(self.noise, str):
            raise ConfigError(f"{self.noise_key} = {self.noise!r} is no number before it is calibrated")
        return self.noise


class _ClippedNoise(_ClientNoise):
    """Gaussian noise in proportion to a clipping norm."""

    clipping_norm: Positive
    max_epsilon: NonNegative = Field(default=0.0, alias="client-max-epsilon")
    has_delta: ClassVar[bool] = True
    counts_leakage: ClassVar[bool] = False
    max_leakage: ClassVar[float] = 0.0

    @property
    def bound(self) -> float:
        """Return the largest L2 norm of one unit's contribution."""
        return self.clipping_norm

    @property
    def bounds(self) -> tuple[str, ...]:
        """Describe the bounds of a contribution in words."""
        return (f"{self.name}-clipping-norm {self.clipping_norm:.4g}",)

    @model_validator(mode="after")
    def _has_a_budget(self) -> "_ClippedNoise":
        if self.is_calibrated and not self.max_epsilon:
            raise ValueError(f"{self.noise_key} = 'auto' is calibrated to privacy.client-max-epsilon = 0; set a budget")
        return self


class DpSgdPrivacy(_ClippedNoise):
    """Clients that train with clipped and noised gradients.

    Each example (or group) is protected against every adversary.
    """

    name: Literal["dp-sgd"] = Field(default="dp-sgd", alias="client")
    noise: NonNegative | Auto = Field(default=1.0, alias="dp-sgd-noise-multiplier")
    clipping_norm: Positive = Field(default=1.0, alias="dp-sgd-clipping-norm")
    clipping_decay: Share = 0.0
    min_clipping_norm: NonNegative = 0.0
    batch_sampling: Literal["poisson", "shuffle"] = "poisson"
    sampling_rate: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, alias="dp-sgd-sampling-rate")
    group_cap: Count = 10
    clips_gradients: ClassVar[bool] = True
    noise_on_update: ClassVar[None] = None

    def mechanism(self, group: str = "") -> LocalDpSgd:
        """Return the configured DP-SGD mechanism.

        Args:
            group: name of the column of the groups that are clipped together; empty: each example is by itself.
        """
        return LocalDpSgd(
            self.noise_multiplier,
            self.clipping_norm,
            self.clipping_decay,
            self.min_clipping_norm,
            self.batch_sampling,
            self.group_cap if group else 0,
            group,
        )

    def steps(self, units: int, batch_size: int, epochs: int) -> LocalSteps:
        """Return the private steps of a client in a round.

        Args:
            units: N > 0, its public number of units.
            batch_size, epochs: B and E of steps with noise of this client alone.

        Raises:
            ConfigError: a number is out of range.
        """
        if self.sampling_rate:  # only in a run with secure aggregation
            return OneStep.of(units, self.sampling_rate)
        return LocalSteps(units, batch_size, epochs, self.batch_sampling)

    @property
    def bounds(self) -> tuple[str, ...]:
        """Describe the bounds of a contribution in words."""
        return (*super().bounds, f"{self.batch_sampling} batches")

    @model_validator(mode="after")
    def _has_a_floor(self) -> "DpSgdPrivacy":
        if self.clipping_decay and not self.min_clipping_norm:
            raise ValueError(
                f"privacy.clipping-decay = {self.clipping_decay} needs privacy.min-clipping-norm above 0: the clip "
                "would shrink until single precision knows it no more"
            )
        return self


class GaussianPrivacy(_ClippedNoise):
    """Clients that clip their update and add Gaussian noise to it."""

    name: Literal["gaussian"] = Field(default="gaussian", alias="client")
    noise: NonNegative | Auto = Field(default=1.0, alias="gaussian-noise-multiplier")
    clipping_norm: Positive = Field(default=1.0, alias="gaussian-clipping-norm")
    clips_gradients: ClassVar[bool] = False

    @property
    def noise_on_update(self) -> LocalGaussian:
        """Return the client's mechanism for its update."""
        return LocalGaussian(self.clipping_norm, self.noise_multiplier)


class LaplacePrivacy(_ClientNoise):
    """Clients that add multivariate Laplace noise to their model."""

    name: Literal["laplace"] = Field(default="laplace", alias="client")
    noise: NonNegative = Field(default=1.0, alias="laplace-noise-multiplier")
    radius: NonNegative = 0.0
    per_layer: bool = False
    max_leakage: NonNegative = 0.0
    clips_gradients: ClassVar[bool] = False
    has_delta: ClassVar[bool] = False
    counts_leakage: ClassVar[bool] = True
    max_epsilon: ClassVar[float] = 0.0

    @field_validator("noise", mode="before")
    @classmethod
    def _is_not_calibrated(cls, noise: object) -> object:
        if noise == "auto":
            raise ValueError(
                "privacy.laplace-noise-multiplier = 'auto' is not possible: the cost of a round depends on the model's "
                "size; `cloister plan --epsilon L` with any number here prints the smallest for a privacy.max-leakage "
                "of L"
            )
        return noise

    @property
    def noise_on_update(self) -> LocalLaplace | PublishedLaplace:
        """Return the client's mechanism for its update.

        With a radius, updates are bounded. Otherwise the noise is scaled by the norm of the update.
        """
        if self.radius:
            return LocalLaplace(self.radius, self.noise_multiplier, self.per_layer)
        return PublishedLaplace(self.noise_multiplier, self.per_layer)

    @property
    def bound(self) -> float:
        """Return the largest L2 norm of an update; 0: updates are not clipped."""
        return self.radius

    @property
    def bounds(self) -> tuple[str, ...]:
        """Describe the bounds of a contribution in words."""
        return (f"radius {self.radius:.4g}" if self.radius else "radius of the update",)


def _server_tag(value: object) -> str:
    name = value.get("server") if isinstance(value, Mapping) else getattr(value, "name", None)
    return str(name) if name in BY_NAME["server"] else "plugin"


ServerPrivacy = Annotated[
    Annotated[NoServerPrivacy, Tag("none")]
    | Annotated[GlobalPrivacy, Tag("global-dp")]
    | Annotated[MetricPrivacy, Tag("metric")]
    | Annotated[ClusteringPrivacy, Tag("laplace-clustering")]
    | Annotated[PluginPrivacy, Tag("plugin")],
    Discriminator(_server_tag),
]
ClientPrivacy = Annotated[
    NoClientPrivacy | DpSgdPrivacy | GaussianPrivacy | LaplacePrivacy, Field(discriminator="name")
]
CHOICES: Mapping[str, tuple[type[Section], ...]] = {
    "server": sections_of(ServerPrivacy),
    "client": sections_of(ClientPrivacy),
    "clipping": sections_of(Clipping),
}
"""Variants of each key."""
BY_NAME: Mapping[str, Mapping[str, type[Section]]] = {
    key: {variant.model_fields["name"].default: variant for variant in variants if variant is not PluginPrivacy}
    for key, variants in CHOICES.items()
}
"""Variants of each key by their names, without plugins, whose names are not known here."""
