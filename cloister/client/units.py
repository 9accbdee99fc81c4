"""Whom DP-SGD protects on a node, and how many of them it says there are.

A unit is an example, or with `task.group` a group of examples (a patient's, a writer's). How many there are shows in
the rate of batches and in the number of steps, so on a node with data of its own it is a constant that its operator
states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import UserConfig
from numpy.typing import NDArray

from cloister.client.data import DATA_PATH
from cloister.client.policy import policy_of
from cloister.config.privacy import PrivacyConfig
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.dpsgd.batches import rows_of, units_of
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.tasks.base import Examples
from cloister.tasks.training.plan import TrainingPlan

PUBLIC_SIZE = "public-size"
MAXIMUM_SIZE = 10**9


def public_size_of(node: UserConfig) -> int:
    """The number of units that a node states, by its policy or by its configuration; 0: it states none.

    Raises:
        ConfigError: the configuration's is no whole number of at least 0.
        PolicyError: the policy cannot be read.
    """
    policy, stated = policy_of(node), node.get(PUBLIC_SIZE, 0)
    if type(stated) is not int or not 0 <= stated <= MAXIMUM_SIZE:
        raise ConfigError(f"{PUBLIC_SIZE} = {stated!r} in the node configuration must be a whole number of at least 0")
    return (policy.public_size if policy else 0) or stated


def size_of(node: UserConfig) -> int:
    """The number of units that DP-SGD on this node is planned for; 0: as many as a simulation deals it.

    Raises:
        PrivacyError: the node has data of its own and does not state how much.
    """
    stated = public_size_of(node)
    if DATA_PATH in node and not stated:
        raise PrivacyError(
            f"this node has data of its own and states no {PUBLIC_SIZE}, in its policy or its configuration: the noise "
            "of dp-sgd would show how many examples it has"
        )
    return stated if DATA_PATH in node else 0


@dataclass(frozen=True)
class Units:
    """The examples that a client trains on, unit by unit.

    Attributes:
        examples: all of them.
        members: indices of each group's examples; None: every example is a unit.
    """

    examples: Examples
    members: Sequence[NDArray[np.intp]] | None

    @classmethod
    def of(cls, examples: Examples, cap: int, seed: int | None = None) -> "Units":
        """The units of some examples.

        Args:
            examples: of the client.
            cap: most examples of a group that count; which ones is drawn anew each time.
            seed: of that draw, for tests; None: the operating system draws.
        """
        if examples.groups is None:
            return cls(examples, None)
        return cls(examples, units_of(examples.groups, cap, seed))

    def __len__(self) -> int:
        return len(self.examples) if self.members is None else len(self.members)

    def steps(self, plan: TrainingPlan, privacy: PrivacyConfig) -> LocalSteps:
        """The private steps of a round, from the public size, which is the true one in a simulation alone.

        Args:
            plan: of the round.
            privacy: of the run.
        """
        return LocalSteps(
            plan.public_size or max(1, len(self)), plan.batch_size, plan.epochs, privacy.dp_sgd.batch_sampling
        )

    def examples_of(self, number: int) -> Examples:
        """The examples of one unit."""
        return self.examples.take(np.array([number]) if self.members is None else self.members[number])

    def of_batch(self, batch: NDArray[np.intp]) -> Examples:
        """The examples of a batch of units; `groups` numbers the units within the batch, where they are groups."""
        if self.members is None:
            return self.examples.take(batch)
        rows, groups = rows_of(self.members, batch)
        return Examples(self.examples.x[rows], self.examples.y[rows], groups)
