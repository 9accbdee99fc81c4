"""Steps of DP-SGD on a client's own examples in a round, and their events, for training and for the ledger."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from cloister.privacy.accounting.events import Event, Gaussian, Repeated
from cloister.privacy.accounting.vocabulary import GROUP, Sampling, word_for
from cloister.privacy.claims.premises import BUNDLE, CRYPTOGRAPHY, KERNELS, TIME, Contributor, Premise
from cloister.privacy.dpsgd.batches import Batch, poisson, shuffle
from cloister.privacy.mechanisms.local import no_noise
from cloister.utils import check
from cloister.utils.errors import ConfigError, PrivacyError

MAX_BATCH = 1 << 16
"""Largest expected number of units in a batch, by the public number: rounding bounds hold for batches of 2^17."""


@dataclass(frozen=True)
class LocalSteps:
    """Private steps of one client in one round.

    A unit is an example, or a group of examples that are clipped together.

    Args:
        examples: N > 0, the public number of units: q and the number of steps depend on it and reveal it. There may be
            fewer units. If there are more, N of them take part in a round.
        batch_size: B > 0, the divisor of a noised sum, and the expected size of a batch, in units.
        epochs: E > 0.
        sampling: `poisson`: E·⌈N/B⌉ steps, in each of which every unit takes part with probability B/N. `shuffle`: in
            each epoch N units in a random order are cut into ⌊N/B⌋ batches, and the remaining units are unused.

    Guarantee (for neighbours that differ in whether the gradients of one unit count): a `poisson` step is a Gaussian
        mechanism sampled with q = B/N, for any true number of units. A draw that fills all places has no claim. Its
        probability is at most `OVERFLOW`. Under `shuffle` the order does not depend on the examples, and a unit is in
        at most one batch of an epoch. All other steps are post-processing of earlier releases, on data that do not
        differ. So a whole epoch is one Gaussian mechanism of multiplier σ, without amplification, also against an
        adversary that has the order.

    Raises:
        ConfigError: a number is out of range, or batches are so large that roundings are not bounded.
    """

    examples: int
    batch_size: int
    epochs: int
    sampling: Literal["poisson", "shuffle"] = "poisson"

    def __post_init__(self) -> None:
        check.positive(examples=self.examples, batch_size=self.batch_size, local_epochs=self.epochs)
        check.one_of(("poisson", "shuffle"), batch_sampling=self.sampling)
        if min(self.batch_size, self.examples) > MAX_BATCH:
            raise ConfigError(f"client.batch-size must be at most {MAX_BATCH} with DP-SGD, got {self.batch_size}")

    @property
    def count(self) -> int:
        """Return the number of steps in a round."""
        if self.sampling == "poisson":
            return self.epochs * math.ceil(self.examples / self.batch_size)
        return self.epochs * max(1, self.examples // self.batch_size)

    @property
    def rate(self) -> float:
        """Return q, the probability of a unit to be in a batch of `poisson`."""
        return min(1.0, self.batch_size / self.examples)

    def batches(self, seed: int | None = None, present: int | None = None) -> Iterator[Batch]:
        """Return the indices of the units in each step.

        Args:
            seed: for tests and papers; None draws from the operating system.
            present: true number of units; N by default. Only `poisson` accepts another number.

        Raises:
            PrivacyError: the batches of a shuffled order would reveal the true number of units.
        """
        present = self.examples if present is None else present
        if self.sampling == "shuffle":
            if present != self.examples:
                raise PrivacyError("privacy.batch-sampling = 'shuffle' needs a public number of units; use 'poisson'")
            return shuffle(self.examples, min(self.batch_size, self.examples), self.count, seed)
        drawn = poisson(min(present, self.examples), self.rate, self.count, seed)
        if present <= self.examples:
            return drawn
        kept = np.random.default_rng(seed).permutation(present)[: self.examples]
        return (kept[batch] for batch in drawn)

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost of a round with this σ for one unit."""
        if self.sampling == "poisson":
            return Repeated(Gaussian(noise_multiplier, Sampling("bounded-poisson", self.rate)), self.count)
        return Repeated(Gaussian(noise_multiplier), self.epochs)


@dataclass(frozen=True)
class OneStep(LocalSteps):
    """The one private step of a round that a client takes together with others: their sum has the noise.

    The client draws its units in secret with a rate that is common to all clients. B is ⌈q·N⌉, which is at least the
    expected size of its batch. So the number of its places covers every rate and size.

    Args:
        sampling_rate: q, from 0 to 1.

    Guarantee: that of one `poisson` step of `LocalSteps` with this q, for noise of multiplier σ on the sum.
    """

    sampling_rate: float = 1.0

    @classmethod
    def of(cls, examples: int, sampling_rate: float) -> "OneStep":
        """Return the step of a client.

        Args:
            examples: N > 0, its public number of units.
            sampling_rate: q.

        Raises:
            ConfigError: batches are so large that roundings are not bounded.
        """
        check.positive(examples=examples, dp_sgd_sampling_rate=sampling_rate)
        numerator, denominator = sampling_rate.as_integer_ratio()
        expected = -(-numerator * examples // denominator)
        if expected > MAX_BATCH:
            raise ConfigError(
                f"privacy.dp-sgd-sampling-rate = {sampling_rate:g} of {examples} units is a batch of {expected} at one "
                f"client, and at most {MAX_BATCH} are possible; use a smaller rate"
            )
        return cls(examples, expected, 1, "poisson", sampling_rate)

    @property
    def count(self) -> int:
        """Return 1."""
        return 1

    @property
    def rate(self) -> float:
        """Return q."""
        return self.sampling_rate


Holders = tuple[LocalSteps, ...]
"""Private steps in a round of each client that holds data of one unit."""


def multiplier_of_each(holders: Holders, noise_multiplier: float) -> float:
    """Return the noise multiplier with which the steps of each holder of one unit count.

    Clients that noise their own sums count with σ each. If k holders add to one sum, its noise is k independent parts
    of variance σ²S²/k, one for each holder's sum. The release follows from these k noised sums, and so costs at most k
    steps of multiplier σ/√k.

    Args:
        holders: the steps of each.
        noise_multiplier: σ.
    """
    if len(holders) > 1 and any(isinstance(steps, OneStep) for steps in holders):
        return math.nextafter(noise_multiplier / math.sqrt(len(holders)), 0)
    return noise_multiplier


@dataclass(frozen=True)
class LocalDpSgd(Contributor):
    """DP-SGD on a client's own examples, as a run asks for it.

    Args:
        noise_multiplier: σ ≥ 0; the noise on the sum of a batch is N(0, σ²S²).
        clipping_norm: S > 0 of the first round, the largest L2 norm of one unit's gradient.
        clipping_decay: the share by which S falls in each round.
        min_clipping_norm: lower limit of S.
        sampling: of batches, as in `LocalSteps`.
        group_cap: largest number of examples of a group that count; 0: a unit is an example.
        group: name of the array or column of groups; empty: it is not known, or a unit is an example.
    """

    noise_multiplier: float
    clipping_norm: float
    clipping_decay: float = 0.0
    min_clipping_norm: float = 0.0
    sampling: Literal["poisson", "shuffle"] = "poisson"
    group_cap: int = 0
    group: str = ""

    premises: ClassVar[tuple[Premise, ...]] = (BUNDLE, CRYPTOGRAPHY, KERNELS, TIME)

    @property
    def unit(self) -> Literal["example", "group"]:
        """Return the unit whose gradients are clipped together."""
        return "group" if self.group_cap else "example"

    @property
    def word(self) -> str:
        """Return the word for a unit in a text."""
        return word_for(self.unit, self.group)

    def clipping_norm_in(self, server_round: int) -> float:
        """Return S of a round: S ← max(S, minimum) before it and S ← S - S·decay after it.

        The noise follows S: for any S, a step is a Gaussian mechanism of multiplier σ. See `docs/end-to-end.md`.
        """
        decayed = self.clipping_norm * (1 - self.clipping_decay) ** max(0, server_round - 1)
        return max(decayed, self.min_clipping_norm)

    def sizes_shown(self, batch_size: int) -> tuple[int, ...]:
        """Return public sizes of clients that serve as examples where none is known.

        Just above one batch an epoch has two steps with almost no subsampling. With little noise, some sizes of two or
        three batches cost a tenth more. A client's own ledger records its actual spending.

        Args:
            batch_size: B > 0.
        """
        return (batch_size, batch_size + 1, 10 * batch_size, 100 * batch_size)

    def caveats(self) -> list[str]:
        """Return a caveat if there is no noise."""
        return [] if self.noise_multiplier else [no_noise("dp-sgd")]

    def parameters(self) -> dict[str, float | str]:
        """Return the parameters, by configuration key."""
        named: dict[str, float | str] = {
            "privacy.dp-sgd-noise-multiplier": self.noise_multiplier,
            "privacy.dp-sgd-clipping-norm": self.clipping_norm,
            "privacy.clipping-decay": self.clipping_decay,
            "privacy.min-clipping-norm": self.min_clipping_norm,
            "privacy.batch-sampling": self.sampling,
        }
        named |= {GROUP: self.group} if self.group else {}
        return named | ({"privacy.group-cap": self.group_cap} if self.group_cap else {})
