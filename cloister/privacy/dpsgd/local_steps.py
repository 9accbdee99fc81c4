"""What DP-SGD on a client's own examples takes and releases in a round: said once, for training and for the ledger."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cloister.config.privacy import PrivacyConfig
from cloister.core import check
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, Gaussian, Repeated, Sampling, Unaccounted
from cloister.privacy.dpsgd.batches import Batch, poisson, shuffle


@dataclass(frozen=True)
class LocalSteps:
    """The private steps of one client in one round.

    A unit is an example, or a group of examples that are clipped together.

    Args:
        examples: N > 0, the public number of units: q and the number of steps depend on it and show it. How many units
            there really are may be another number.
        batch_size: B > 0, what a noised sum is divided by, and the size of a batch on average, in units.
        epochs: E > 0.
        sampling: `poisson`: E·⌈N/B⌉ steps, in each of which every unit takes part with probability B/N. `shuffle`: in
            each epoch N units in a random order are cut into ⌊N/B⌋ batches, and those behind sit out.

    Guarantee (for neighbours that differ in whether the gradients of one unit count): a `poisson` step is a Gaussian
        mechanism sampled with q = B/N, whatever the true number of units. Under `shuffle` the order does not depend on
        the examples, and whatever it is, a unit is in at most one batch of an epoch: the other steps are
        post-processing of what was released before, on data that do not differ. So a whole epoch is one Gaussian
        mechanism of multiplier σ, without amplification, also against somebody who knows the order.
    """

    examples: int
    batch_size: int
    epochs: int
    sampling: Literal["poisson", "shuffle"] = "poisson"

    def __post_init__(self) -> None:
        check.positive(examples=self.examples, batch_size=self.batch_size, local_epochs=self.epochs)
        check.one_of(("poisson", "shuffle"), batch_sampling=self.sampling)

    @property
    def count(self) -> int:
        """Steps in a round."""
        if self.sampling == "poisson":
            return self.epochs * math.ceil(self.examples / self.batch_size)
        return self.epochs * max(1, self.examples // self.batch_size)

    @property
    def rate(self) -> float:
        """q: the probability of a unit to be in a batch of `poisson`."""
        return min(1.0, self.batch_size / self.examples)

    def batches(self, seed: int | None = None, present: int | None = None) -> Iterator[Batch]:
        """Indices of the units in each step; the operating system draws them unless there is a seed.

        Args:
            seed: for tests and papers.
            present: how many units there really are; N by default. Only `poisson` can do with another number.

        Raises:
            PrivacyError: the batches of a shuffled order would show how many units there are.
        """
        if self.sampling == "poisson":
            return poisson(self.examples if present is None else present, self.rate, self.count, seed)
        if present not in (None, self.examples):
            raise PrivacyError("privacy.batch-sampling = 'shuffle' needs a public number of units; use 'poisson'")
        return shuffle(self.examples, min(self.batch_size, self.examples), self.count, seed)

    def event(self, noise_multiplier: float) -> Event:
        """What a round with this σ costs one unit."""
        if self.sampling == "poisson":
            return Repeated(Gaussian(noise_multiplier, Sampling("poisson", self.rate)), self.count)
        return Repeated(Gaussian(noise_multiplier), self.epochs)


def clipping_norm_of(privacy: PrivacyConfig, server_round: int) -> float:
    """S of a round: S ← max(S, least) before it and S ← S - S·decay after it, from the configured S on.

    The noise follows S: whatever it is, a step is a Gaussian mechanism of multiplier σ. See `docs/end-to-end.md`.
    """
    client = privacy.dp_sgd
    decayed = client.clipping_norm * (1 - client.clipping_decay) ** max(0, server_round - 1)
    return max(decayed, client.least_clipping_norm)


def recorded_event(privacy: PrivacyConfig, steps: LocalSteps) -> Event:
    """What is entered in a client's ledger for a round, before its training starts."""
    reasons = caveats(privacy)
    return Unaccounted("; ".join(reasons)) if reasons else steps.event(privacy.client.noise_multiplier)


def caveats(privacy: PrivacyConfig) -> list[str]:
    """Why nothing can be claimed for the examples of a client; empty if it can."""
    if not privacy.client.clips_gradients:
        return [f"privacy.client is {privacy.client.name!r}: the server sees models trained on examples without noise"]
    reasons = []
    if privacy.client.noise_multiplier == 0:
        reasons.append("privacy.client-noise-multiplier is 0: there is no noise")
    if privacy.noise_seed != -1:
        reasons.append("the noise is seeded: whoever knows privacy.noise-seed can remove it")
    if privacy.chooses_exactly:
        reasons.append("privacy.choice is 'exact': which hypothesis suits the examples is found out without noise")
    return reasons
