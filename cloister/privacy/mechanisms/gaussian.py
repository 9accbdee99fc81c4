"""Gaussian mechanisms on the server, one for each placement of the noise, and their factories by name.

    GaussianMean           the sum of the clipped updates is noised, and the strategy sees the mean (placement `update`)
    GaussianTrimmedMean    the median or trimmed mean takes the place of the sum                    (placement `rule`)
    GaussianOutput         the strategy's output from all clipped models is noised, as in Flower and the papers
                           (placement `model`, heuristic)

Edge cases of all three:

| edge case | result |
|---|---|
| an update of norm 0 | it keeps its norm, and counts like any other |
| an update with NaN or infinity | screening has rejected it; it does not count |
| no replies | noise is released on zero updates; `GaussianOutput` and an exact distance release nothing |
| one reply | as for any number; the distance of one client is 0 |
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypedDict, Unpack

import numpy as np

from cloister.privacy.accounting.events import Event, Gaussian
from cloister.privacy.accounting.filters import minimum_multiplier
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER, UNSAMPLED, Sampling
from cloister.privacy.claims.premises import CRYPTOGRAPHY, Premise
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip, capped_weights, clip, clipped_fraction
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.mechanism import (
    Contributions,
    Mechanism,
    Parameter,
    Released,
    refuse_unless_meaningful_on_one_reply,
)
from cloister.privacy.mechanisms.metric import CONSTANT, Constant, DistanceScaled
from cloister.privacy.mechanisms.release import (
    StreamingAggregator,
    Total,
    bounded_models,
    noisy_mean,
    noisy_total,
    noisy_trimmed_mean,
)
from cloister.utils import check
from cloister.utils.arrays import Layout, Row, State, joined, part
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError
from cloister.utils.registry import Capabilities

AUTO = "auto"
RULE_OR_MODEL = "privacy.placement = 'rule' (sound), or 'model' (heuristic)"
MODEL_ONLY = "privacy.placement = 'model' (heuristic)"


@dataclass(frozen=True, kw_only=True)
class GaussianMechanism(Mechanism):
    """Base of the Gaussian mechanisms: a clip, a noise multiplier, and its scale.

    Attributes:
        noise_multiplier: z ≥ 0; `auto` until the mechanism is calibrated.
        clip: the bound C on the L2 norm of one client's update, in units of the weights.
        scale: factor of z in each round.
        examples_cap: cap for weights min(n/cap, 1) from example counts; 0: uniform weights.

    Raises:
        ConfigError: a parameter is out of range, or the parameters contradict each other.

    Source: McMahan et al. (2018), arXiv:1710.06963.
    """

    noise_multiplier: float | Literal["auto"]
    clip: FixedClip
    scale: Constant = CONSTANT
    examples_cap: float = 0.0

    placement = ""
    premises: ClassVar[tuple[Premise, ...]] = (CRYPTOGRAPHY,)

    def __post_init__(self) -> None:
        if not isinstance(self.noise_multiplier, str):
            check.non_negative(noise_multiplier=self.noise_multiplier)
        check.non_negative(examples_cap=self.examples_cap)
        self.scale.refuse_with(self.clip)

    @property
    def name(self) -> str:
        """Return `global-dp`, or `metric` if a distance scales the noise."""
        return self.scale.mechanism

    @property
    def amplified(self) -> bool:
        """Return whether a draw amplifies: only if the round makes one release of it."""
        return self.scale.amplified

    @property
    def is_calibrated(self) -> bool:
        """Return whether z is a number."""
        return self.noise_multiplier != AUTO

    @property
    def clipping_norm(self) -> float:
        """Return C in force."""
        return self.clip.bound

    @property
    def skips_empty_rounds(self) -> bool:
        """Return whether a round without replies makes no release.

        An exact distance makes none.
        """
        return self.scale.skips_empty_rounds

    @property
    def multiplier(self) -> float:
        """Return z.

        Raises:
            ConfigError: z is not calibrated yet.
        """
        if isinstance(self.noise_multiplier, str):
            raise ConfigError("privacy.noise-multiplier = 'auto' has not been calibrated to privacy.max-epsilon yet")
        return self.noise_multiplier

    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED) -> tuple[Event, ...]:
        """Return the events of a round: of the distance, if any, and of the sum.

        The sum is charged with the least noise it can have.

        Args:
            layout: of the model.
            sampling: draw of the round's clients.
        """
        z = self.clip.joint_multiplier(self.multiplier * self.scale.minimum(self.clip, layout))
        # A small distance may multiply the noise by a lot: it is charged at most at the accountants' largest z.
        return (*self.scale.events(), Gaussian(min(z, 1 / MIN_MULTIPLIER), sampling))

    def release(self, contributions: Contributions) -> Released:
        """Clip, scale the noise, release, and update the clip.

        Args:
            contributions: of the round.
        """
        raw = contributions.cohort
        bounded = self.bounded(raw, contributions.examples)
        scaling = self.scale.of(contributions, bounded)
        z = self.multiplier * scaling.factor
        return replace(
            self._noised(bounded, z, contributions),
            noise_multiplier=z,
            clipping_norm=self.clip.bound,
            released_distance=scaling.released,
            diagnostics=replace(scaling.diagnostics, clipped_fraction=clipped_fraction(clip(raw, self.clip.bound))),
            following=replace(self, clip=self.clip.followed(raw, contributions.expected, contributions.noise)),
        )

    def bounded(self, cohort: Cohort, examples: tuple[float, ...]) -> Cohort:
        """Return the contributions, independently clipped to C and weighted.

        Args:
            cohort: of n unbounded updates.
            examples: the example count that each client reports, shape (n,).
        """
        clipped = clip(cohort, self.clip.bound)
        return capped_weights(clipped, examples, self.examples_cap) if self.examples_cap else clipped

    @abstractmethod
    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        """Return the input of the wrapped strategy, from the bounded cohort."""

    def caveats(self) -> tuple[str, ...]:
        """Return a caveat if there is no noise, and those of the scale."""
        silent = ("privacy.noise-multiplier is 0: there is no noise",) if self.noise_multiplier == 0 else ()
        return (*silent, *self.scale.caveats())

    def refuse_canaries(self) -> None:
        """Raise ConfigError: canaries are scored on a noised mean only."""
        raise ConfigError(
            f"privacy.canaries contradicts privacy.placement = {self.placement!r}: scores of canaries are read off the "
            "noised mean of clipped updates; use 'update', or 0 canaries"
        )

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters, by configuration key."""
        return {
            "privacy.noise-multiplier": self.noise_multiplier,
            "privacy.placement": self.placement,
            "privacy.examples-cap": self.examples_cap,
            **self.clip.parameters(),
            **self.scale.parameters(),
        }

    def state_dict(self) -> State:
        """Return z, which may have been calibrated, and the clip, which may have adapted."""
        return {"noise-multiplier": np.array(self.multiplier), **joined({"clip": self.clip.state_dict()})}

    def restored(self, state: State) -> Self:
        """Return this mechanism with a saved state."""
        z, clip = float(state["noise-multiplier"]), self.clip.restored(part(state, "clip"))
        if self.is_calibrated and z != self.multiplier:
            raise ValueError(f"{self.multiplier} was asked for, and {z} was saved")
        return replace(self, noise_multiplier=z, clip=clip)

    def calibrated(self, spent: Callable[[Mechanism], float], limit: float, budget: str) -> Self:
        """Return this mechanism with the smallest z within the budget.

        It is exact to one part in a thousand.

        Args:
            spent: returns the total spending with a mechanism; it falls as z grows.
            limit: upper bound of the spending.
            budget: description of the limit, for the message.

        Raises:
            ConfigError: no z stays within the budget.
        """

        beside = spent(replace(self, noise_multiplier=1 / MIN_MULTIPLIER))
        if beside > limit:
            raise ConfigError(
                f"{budget} is passed for any privacy.noise-multiplier: what the ledger holds and what is released "
                "beside the sum in all rounds (a distance, with privacy.distance-noise-multiplier; the share of an "
                "adaptive clip, with privacy.clipping-count-noise-multiplier) already take "
                f"{100 * beside / limit:.4g} % of it"
            )
        z = minimum_multiplier(lambda z: spent(replace(self, noise_multiplier=z)), limit, budget)
        return replace(self, noise_multiplier=z)


@dataclass(frozen=True, kw_only=True)
class GaussianMean(GaussianMechanism):
    """Mean of the clipped updates, with noise of standard deviation z·C on their sum.

    Guarantee: each round is a Gaussian mechanism with noise multiplier z for adding or removing one client's
        contribution, for any strategy and any dropouts. The weights that clients report are ignored, or capped at 1.

    Source: McMahan et al. (2018), arXiv:1710.06963; noise before the server optimizer as in Reddi et al. (2021),
        Algorithm 1, whose Δ_t it replaces.
    """

    placement = "update"

    def intake(self, layout: Layout, sent: Row, most: int) -> StreamingAggregator | None:
        """Return an intake for replies; None if the scale has to compare them.

        Args:
            layout, sent, most: as in `Mechanism.intake`.
        """
        if self.scale.compares_clients:
            return None
        return StreamingAggregator(Total(Grid.of(self.clip.bound, self.multiplier, most), layout, sent), self.bounded)

    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        size, noise = contributions.expected, contributions.noise
        if contributions.taken:
            made = noisy_total(contributions.taken.total, multiplier, size, noise)
        else:
            widest = self.multiplier * self.scale.widest(bounded.l2_bound, bounded.layout)
            made = noisy_mean(bounded, multiplier, size, noise, widest)
        return Released((made.model,), made.noise_std, made.sensitivity)

    def refuse_canaries(self) -> None:
        """Accept canaries, unless the clip or the noise follows the clients' updates."""
        self.clip.refuse_canaries()
        self.scale.refuse_canaries()

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> Mechanism:
        """Return this mechanism for a strategy that is meaningful on one released model.

        Args:
            capabilities, strategy: as in `Mechanism.suited_to`.
        """
        ranked = capabilities is not None and capabilities.cuts is not None
        refuse_unless_meaningful_on_one_reply(capabilities, strategy, RULE_OR_MODEL if ranked else MODEL_ONLY)
        return self


@dataclass(frozen=True, kw_only=True)
class GaussianTrimmedMean(GaussianMechanism):
    """Coordinate-wise median or trimmed mean of the clipped updates, with noise for its sensitivity to one client.

    Attributes:
        cuts: returns the number of values cut off at each end of n; it comes from the strategy.

    Guarantee: that of `cloister.privacy.mechanisms.release.noisy_trimmed_mean`: each round is a Gaussian mechanism
        with noise multiplier z, for a cohort whose size is public.
    """

    cuts: Callable[[int], int] | None = None

    placement = "rule"

    @property
    def needs_public_cohort(self) -> bool:
        """Return True: a rank among a secret number of values has no public sensitivity."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.examples_cap:
            raise ConfigError(
                f"privacy.examples-cap = {self.examples_cap:g} has no meaning with privacy.placement = 'rule': "
                "a rank knows no weights; remove it"
            )

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> Mechanism:
        """Return this mechanism with the cuts of the strategy.

        Args:
            capabilities, strategy: as in `Mechanism.suited_to`.

        Raises:
            ConfigError: the strategy is neither a median nor a trimmed mean.
        """
        if capabilities is None or capabilities.cuts is None:
            raise ConfigError(
                f"privacy.placement = 'rule' is for a coordinate-wise median or trimmed mean, and strategy {strategy} "
                "is none; use privacy.placement = 'update'"
            )
        return replace(self, cuts=capabilities.cuts)

    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        asked = contributions.asked
        if self.cuts is None:
            raise ConfigError("privacy.placement = 'rule' releases what a strategy stands for, and has none yet")
        widest = self.multiplier * self.scale.widest(bounded.l2_bound, bounded.layout)
        made = noisy_trimmed_mean(bounded, multiplier, asked, self.cuts(asked), contributions.noise, widest)
        return Released((made.model,), made.noise_std, made.sensitivity)


@dataclass(frozen=True, kw_only=True)
class GaussianOutput(GaussianMechanism):
    """Noise on the strategy's output from all clipped models, as if it were their mean: std z·C/n.

    Attributes:
        strategy: the name of the strategy, for the caveat.
        is_uniform_mean: whether the strategy declares itself the plain mean.

    Guarantee: none. One client can move an output other than a mean further than C/n, and n is the number of replies.
    """

    strategy: str = ""
    is_uniform_mean: bool = False

    placement = "model"

    @property
    def noises_output(self) -> bool:
        """Return True: the noise is added to the strategy's output."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.examples_cap or isinstance(self.clip, AdaptiveClip):
            raise ConfigError(
                "privacy.placement = 'model' goes with a fixed clip and uniform weights only; "
                "use privacy.placement = 'update'"
            )

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> Mechanism:
        """Return this mechanism with the strategy's name and kind; accept any strategy.

        Args:
            capabilities, strategy: as in `Mechanism.suited_to`.
        """
        return replace(self, strategy=strategy, is_uniform_mean=bool(capabilities and capabilities.is_uniform_mean))

    def _noised(self, bounded: Cohort, multiplier: float, contributions: Contributions) -> Released:
        # Fewer replies than requests increase the noise, and keep the protection of the clients that replied.
        sensitivity = bounded.l2_bound / max(1, len(bounded))
        widest = self.multiplier * self.scale.widest(bounded.l2_bound, bounded.layout)
        models = tuple(bounded_models(bounded))
        return Released(models, multiplier * sensitivity, sensitivity, widest_std=widest * sensitivity)

    def caveats(self) -> tuple[str, ...]:
        """Return the caveat that the noise is calibrated for a mean of the replies."""
        why = (
            "privacy.placement is 'model': the noise depends on how many clients replied"
            if self.is_uniform_mean
            else f"privacy.placement is 'model': the noise is calibrated for a plain mean, and {self.strategy} is "
            "none; one client can move its output further than C/n"
        )
        return (*super().caveats(), why)


Placement = Literal["update", "rule", "model"]
PLACEMENTS: Mapping[Placement, type[GaussianMechanism]] = {
    "update": GaussianMean,
    "rule": GaussianTrimmedMean,
    "model": GaussianOutput,
}
"""Mechanism by placement of the noise: on the mean update, the median or trimmed mean, or the strategy's output."""


class DistanceOptions(TypedDict, total=False):
    """Options of `DistanceScaled`; see there for their meaning."""

    distance: str
    direction: Literal["divide", "multiply"]
    measure: Literal["after", "before"]
    release: Literal["exact", "private"]
    distance_multiplier: float
    min_distance: float
    max_distance: float


def global_dp(
    *,
    noise_multiplier: float | Literal["auto"],
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    examples_cap: float = 0.0,
    scale: Constant = CONSTANT,
) -> GaussianMechanism:
    """Return a mechanism for central differential privacy with Gaussian noise.

    Args:
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C. `auto`: calibrated later.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights; or a clip that
            adapts it.
        placement: `update` noises the mean update and hands it to the strategy; `rule` noises the strategy's median or
            trimmed mean; `model` noises the strategy's output from all clipped replies.
        examples_cap: cap for weights min(n/cap, 1) from example counts; 0: uniform weights.
        scale: factor of z in each round.

    Raises:
        ConfigError: a parameter is out of range, or parameters contradict each other.
    """
    check.one_of(PLACEMENTS, placement=placement)
    clip = clipping_norm if isinstance(clipping_norm, FixedClip) else FixedClip(clipping_norm)
    return PLACEMENTS[placement](noise_multiplier=noise_multiplier, clip=clip, examples_cap=examples_cap, scale=scale)


def metric(
    *,
    noise_multiplier: float | Literal["auto"],
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    examples_cap: float = 0.0,
    **distance: Unpack[DistanceOptions],
) -> GaussianMechanism:
    """Return a mechanism with noise scaled by the models' distance: σ = (z/d)·C/n.

    Args:
        noise_multiplier, clipping_norm, placement, examples_cap: as in `global_dp`.
        distance: options of `DistanceScaled`.

    Raises:
        ConfigError: a parameter is out of range, or parameters contradict each other.
    """
    return global_dp(
        noise_multiplier=noise_multiplier,
        clipping_norm=clipping_norm,
        placement=placement,
        examples_cap=examples_cap,
        scale=DistanceScaled(**distance),
    )
