"""DP-SGD on a node: its secret randomness, its units and their public number, and training by descent on noised sums.

A unit is an example, or with `task.group` a group of examples (a patient's, a writer's). The rate of batches and the
number of steps reveal the number of units. A node with data of its own therefore uses a constant that its operator
states.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cloister.client.node import NodeConfig
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd import nested
from cloister.privacy.dpsgd.batches import rows_of, units_of
from cloister.privacy.dpsgd.descent import Descent
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.dpsgd.noise import MAX_FEATURES, clipped_products, clipped_sum, noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_models import NumpyModel, SoftmaxRegression
from cloister.tasks.recipe import Augmentation, key_of
from cloister.tasks.targets import Target
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import refuse_what_needs_keras, weighted_gradients
from cloister.utils.arrays import Row, Tensor
from cloister.utils.errors import ConfigError, PrivacyError

D = TypeVar("D", bound=Descent)
SECRET_BYTES = 32


class NoiseSource:
    """Source of secret randomness, or of repeatable streams for each client and round in papers and tests.

    Args:
        seed: `privacy.noise-seed`; -1: the operating system's entropy.

    Guarantee: without a seed, all numbers of this process come from one stream without repetition. With a seed,
        clients, rounds and the server have separate streams, and a party with the seed can remove the noise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entropy = GaussianNoise()

    def noise(self, plan: TrainingPlan) -> GaussianNoise:
        """Return the noise of a client in a round."""
        return self._entropy if self._seed == -1 else GaussianNoise(self._derived("noise", plan))

    def batch_seed(self, plan: TrainingPlan) -> int | None:
        """Return the seed of its batches; None: the operating system's entropy."""
        return None if self._seed == -1 else self._derived("batches", plan)

    def secret(self, plan: TrainingPlan) -> bytes:
        """Return the key of augmentation in a round, unknown to the server."""
        return os.urandom(SECRET_BYTES) if self._seed == -1 else str(self._derived("changes", plan)).encode()

    def _derived(self, use: str, plan: TrainingPlan) -> int:
        """Derive a client seed of at least 2**64, disjoint from configurable seeds."""
        digest = hashlib.sha256(f"client {use} {self._seed} {plan.seed}".encode()).digest()
        return 2**64 + int.from_bytes(digest[:8])


def refuse_penalty(plan: TrainingPlan) -> None:
    """Refuse FedProx's penalty: DP-SGD uses gradients of examples only.

    Raises:
        ConfigError: the server requests one.
    """
    if plan.proximal_mu:
        raise ConfigError(
            f"strategy.proximal-mu = {plan.proximal_mu:g} cannot go with privacy.client = 'dp-sgd': the penalty is not "
            "in its steps; use strategy.name = 'fedavg'"
        )


def size_of(node: NodeConfig) -> int:
    """Return the public number of units for DP-SGD; 0: as simulated.

    Raises:
        PrivacyError: the node has data of its own and states no size.
    """
    if node.data_path and not node.public_size:
        raise PrivacyError(
            "this node has data of its own and states no public-size, in its policy or its configuration: the noise "
            "of dp-sgd would show how many examples it has"
        )
    return node.public_size if node.data_path else 0


@dataclass(frozen=True)
class Units:
    """Training examples of a client, by unit.

    Attributes:
        examples: all of them.
        members: indices of each group's examples; None: every example is a unit.
        augmentation: random change of each example that is taken; None: no change.
        key: of these changes.
    """

    examples: Examples
    members: Sequence[NDArray[np.intp]] | None
    augmentation: Augmentation | None = None
    key: bytes = b""

    @classmethod
    def of(cls, examples: Examples, cap: int, seed: int | None = None) -> "Units":
        """Return the units of some examples.

        Args:
            examples: of the client.
            cap: largest number of a group's examples; the choice is drawn anew each time.
            seed: of that draw, for tests; None: the operating system's entropy.
        """
        if examples.groups is None:
            return cls(examples, None)
        return cls(examples, units_of(examples.groups, cap, seed))

    def changed_by(self, augmentation: Augmentation | None, key: bytes) -> "Units":
        """Return the same units with random changes of their examples.

        Args:
            augmentation: None: no change.
            key: of one step.
        """
        return replace(self, augmentation=augmentation, key=key) if augmentation else self

    def __len__(self) -> int:
        return len(self.examples) if self.members is None else len(self.members)

    def steps(self, plan: TrainingPlan, privacy: PrivacyConfig) -> LocalSteps:
        """Return the private steps of a round, from the public size.

        Only a simulation uses the true size.

        Args:
            plan: of the round.
            privacy: of the run.
        """
        return privacy.dp_sgd.steps(plan.public_size or max(1, len(self)), plan.batch_size, plan.epochs)

    def examples_of(self, number: int) -> Examples:
        """Return the examples of one unit."""
        return self._taken(self.members_of(number))

    def members_of(self, number: int) -> NDArray[np.intp]:
        """Return the indices of one unit's examples."""
        return np.array([number]) if self.members is None else self.members[number]

    def of_batch(self, batch: NDArray[np.intp]) -> Examples:
        """Return the examples of a batch of units.

        If units are groups, `groups` numbers them within the batch.
        """
        if self.members is None:
            return self._taken(batch)
        rows, groups = rows_of(self.members, batch)
        return replace(self._taken(rows), groups=groups)

    def _taken(self, rows: NDArray[np.intp]) -> Examples:
        """Return the examples of these rows, each changed independently."""
        taken = self.examples.take(rows)
        if self.augmentation is None:
            return taken
        return replace(taken, x=self.augmentation.changed_or_lost(taken.x, self.key))


class PrivateTrainer(ABC):
    """Trainer by gradient descent on clipped and noised sums of the gradients of examples or groups.

    A subclass for each kind of model defines the start of a round and a step.

    **Class weights.** A clip to S gives a long gradient the same length at any weight, so that weights would not act.
    A unit is therefore clipped to c·S: c is its class weight relative to the largest, for a group the mean over its
    examples (`Recipe.clip_shares`). The weights are public settings, and c depends on the unit's own labels alone. So
    one unit moves a sum by c·S ≤ S at most, and costs what it costs without weights.

    Args:
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Attributes:
        method: of a Keras or PyTorch model, `rows` or `in turn`; else empty.
        why_in_turn: reason for `in turn`, with the layer.

    Guarantee: that of `LocalSteps`: the public size determines the number of steps, and each is a Gaussian mechanism.
    """

    method = why_in_turn = ""

    def __init__(self, privacy: PrivacyConfig, group_cap: int) -> None:
        self.privacy, self.group_cap = privacy, group_cap
        self._sources = NoiseSource(privacy.noise_seed)

    def fit(self, examples: Examples, plan: TrainingPlan) -> None:
        """Train from the model's weights.

        It returns no loss, which would carry no noise.

        Args:
            examples: of this client.
            plan: of this round.

        Raises:
            ConfigError: the plan has a penalty, or a setting that this model cannot train with.
        """
        refuse_penalty(plan)
        seed, bound = self._sources.batch_seed(plan), self.privacy.dp_sgd.mechanism().clipping_norm_in(plan.round)
        units = Units.of(examples, self.group_cap, seed)
        self._begin(plan, self._sources.noise(plan))
        steps, secret = units.steps(plan, self.privacy), self._sources.secret(plan)
        for number, batch in enumerate(steps.batches(seed, len(units))):
            seen = units.changed_by(plan.augmentation, key_of(secret, number))
            self._step(seen, batch, bound, plan.rate(number * plan.epochs // steps.count))

    def summed(self, examples: Examples, plan: TrainingPlan) -> dict[str, NDArray]:
        """Return the clipped sum over one secret draw of units, without noise: not for release.

        Args:
            examples: of this client.
            plan: of this round, with one step (`OneStep`).

        Returns:
            An array for each one that the model sends, of its shape; zeros for one that is not trained.

        Raises:
            ConfigError: the plan has a penalty.
        """
        refuse_penalty(plan)
        seed, bound = self._sources.batch_seed(plan), self.privacy.dp_sgd.mechanism().clipping_norm_in(plan.round)
        units = Units.of(examples, self.group_cap, seed)
        self._begin(plan, self._sources.noise(plan))
        (batch,) = units.steps(plan, self.privacy).batches(seed, len(units))
        seen = units.changed_by(plan.augmentation, key_of(self._sources.secret(plan), 0))
        return self._sum(seen, batch, bound)

    @abstractmethod
    def _sum(self, units: Units, batch: NDArray, bound: float) -> dict[str, NDArray]:
        """Return the sum of the numbered units' gradients, possibly none, each clipped to `bound`; as `summed`."""

    @abstractmethod
    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Prepare a round whose steps use this noise."""

    @abstractmethod
    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        """Take one step on the numbered units, possibly none, clipped to `bound`."""


class DescentTrainer(PrivateTrainer, Generic[D]):
    """Trainer by a `Descent`, of Keras or PyTorch, for each batch size of its plans.

    Args:
        recipe: of the run: its optimizer, its batch size, and the class weights.
        privacy, group_cap: as in `PrivateTrainer`.
        losses: of the model, by name or as functions.

    Raises:
        ConfigError: a loss is `rmse`. The root of a batch's mean is not a sum over examples.
    """

    def __init__(self, recipe: Recipe, privacy: PrivacyConfig, group_cap: int, losses: Iterable[object]) -> None:
        if "rmse" in losses:
            raise ConfigError(
                "privacy.client = 'dp-sgd' needs a loss of each example, and 'rmse' is one of a whole batch; use 'mse'"
            )
        super().__init__(privacy, group_cap)
        self._recipe = recipe
        self._by_batch_size: dict[int, D] = {}

    @abstractmethod
    def _built(self, batch_size: int) -> D:
        """Return private steps of the model, of an expected batch size."""

    def _prepare(self, batch_size: int) -> None:
        """Build the steps of the run's batch size."""
        self._dp_sgd = self._by_batch_size[batch_size] = self._built(batch_size)
        self.method, self.why_in_turn = self._dp_sgd.method, self._dp_sgd.why_in_turn

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Choose the steps of the plan's batch size, and reset the masks of dropout.

        Masks are as secret as the noise, and repeat only with it: the server knows the plan's seed.

        Raises:
            ConfigError: the plan has another batch size.
        """
        size = plan.batch_size
        # With a sampling rate the expected batch of a client follows from its own size.
        if self.privacy.dp_sgd.sampling_rate and size not in self._by_batch_size:
            self._by_batch_size[size] = self._built(size)
        if size not in self._by_batch_size:
            raise ConfigError(f"client.batch-size = {size} must be {self._dp_sgd.batch_size} in this run")
        self._dp_sgd = self._by_batch_size[size]
        self._dp_sgd.noise = noise
        self._dp_sgd.reseed(plan.seed if noise.seeded else None)

    def _weights(self, chosen: Examples) -> NDArray:
        """Return the weight of each example in its loss."""
        factors = self._recipe.weights(chosen)
        return np.ones(len(chosen), np.float32) if factors is None else factors


def weighted_loss(
    targets: Iterable[Target],
    losses: Callable[[list[Tensor], Tensor], Iterable[Tensor]],
    cast: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[list[Tensor], Tensor], Tensor]:
    """Build the loss of an example before clipping: its weight times the sum over all targets.

    The last of the labels is the weight. It is a function of the example alone: of its class, or its own.

    Args:
        targets: of the model, each with its weight in the sum.
        losses: of each target, from the labels and the model's outputs.
        cast: converts a tensor to a dtype.
    """
    shares = [target.weight for target in targets]

    def weighted(y: list[Tensor], outputs: Tensor) -> Tensor:
        *labels, weights = y
        first, *rest = (share * each for share, each in zip(shares, losses(labels, outputs), strict=True))
        total = sum(rest, first)
        return total * cast(weights, total.dtype)

    return weighted


def probe_of(x: nested.Examples, targets: Iterable[Target]) -> nested.Probe:
    """Return a probe of a model with `weighted_loss`: the last of its labels are the weights of examples.

    Args:
        x: `MADE_UP` dummy inputs of the model.
        targets: of the model.
    """
    y = [np.zeros((nested.MADE_UP, *target.shape), target.dtype) for target in targets]
    return x, [*y, np.zeros(nested.MADE_UP, np.float32)]


class PrivateNumpyTrainer(PrivateTrainer):
    """Trainer with plain SGD on clipped and noised sums of the gradients of examples or groups.

    Args:
        model: trained in place; its gradient of a batch is the mean of those of its examples.
        recipe: of the run; its optimizer must be `sgd`.
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps` and `noisy_sum`.

    Raises:
        ConfigError: the recipe has another optimizer, or Keras callbacks.
    """

    def __init__(self, model: NumpyModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        refuse_what_needs_keras(recipe)
        super().__init__(privacy, group_cap)
        self.model, self._recipe = model, recipe

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        self._batch_size, self._noise = plan.batch_size, noise

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        gradients, like, shares = self._given(units, batch)
        total = noisy_sum(
            gradients,
            like,
            clipping_norm=bound,
            noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
            noise=self._noise,
            shares=shares,
        )
        # The weights may overflow, and depend on noised sums only.
        with np.errstate(all="ignore"):
            for weight, piece in zip(self.model.weights.values(), total, strict=True):
                weight -= (rate / self._batch_size * piece).reshape(weight.shape).astype(weight.dtype)

    def _sum(self, units: Units, batch: NDArray, bound: float) -> dict[str, NDArray]:
        model, alone = self.model, units.members is None
        # A subclass may have another gradient, or raise for one example: `clipped_sum` counts that one as zero.
        if alone and type(model) is SoftmaxRegression and len(model.weights["softmax/kernel"]) <= MAX_FEATURES:
            taken = units.of_batch(batch)
            with np.errstate(all="ignore"):  # what overflows is not finite, and counts as zero
                inputs, errors = model.factors_alone(taken.x, taken.y)
                if (weights := self._recipe.weights(taken)) is not None:
                    errors *= weights[:, None]
            sums = clipped_products(inputs, errors, bound, self._recipe.clip_shares(taken))
            return dict(zip(self.model.weights, sums, strict=True))
        gradients, like, shares = self._given(units, batch)
        found = clipped_sum(gradients, like, bound, shares)
        pairs = zip(self.model.weights.items(), found, strict=True)
        return {name: piece.reshape(weight.shape) for (name, weight), piece in pairs}

    def _given(self, units: Units, batch: NDArray) -> tuple[Iterator[Callable[[], Row]], Row, Iterator[float]]:
        """Return the gradients of the numbered units, arrays of their shapes, and the units' shares of S."""
        gradients = (partial(self._gradient, units.examples_of(number)) for number in batch)
        like = tuple(weight.reshape(-1) for weight in self.model.weights.values())
        shares = (float(self._recipe.clip_shares(units.examples_of(number)).mean()) for number in batch)
        return gradients, like, shares

    def _gradient(self, unit: Examples) -> Row:
        """Return the mean gradient of a unit's examples, weighted and flat."""
        _, gradients = weighted_gradients(self.model, unit, self._recipe)
        return tuple(gradients[name].reshape(-1) for name in self.model.weights)
