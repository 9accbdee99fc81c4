"""Whom DP-SGD protects on a node, and how many of them it says there are.

A unit is an example, or with `task.group` a group of examples (a patient's, a writer's). How many there are shows in
the rate of batches and in the number of steps, so on a node with data of its own it is a constant that its operator
states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cloister.client.node import NodeConfig
from cloister.config.privacy import PrivacyConfig
from cloister.core.errors import PrivacyError
from cloister.privacy.dpsgd.batches import rows_of, units_of
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.tasks.base import Examples
from cloister.tasks.training.augmentation import Augmentation
from cloister.tasks.training.plan import TrainingPlan


def size_of(node: NodeConfig) -> int:
    """The number of units that DP-SGD on this node is planned for; 0: as many as a simulation deals it.

    Raises:
        PrivacyError: the node has data of its own and does not state how much.
    """
    if node.data_path and not node.public_size:
        raise PrivacyError(
            "this node has data of its own and states no public-size, in its policy or its configuration: the noise "
            "of dp-sgd would show how many examples it has"
        )
    return node.public_size if node.data_path else 0


@dataclass(frozen=True)
class Units:
    """The examples that a client trains on, unit by unit.

    Attributes:
        examples: all of them.
        members: indices of each group's examples; None: every example is a unit.
        augmentation: how an example is changed at random when it is taken; None: it is not.
        key: of these changes.
    """

    examples: Examples
    members: Sequence[NDArray[np.intp]] | None
    augmentation: Augmentation | None = None
    key: bytes = b""

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

    def changed_by(self, augmentation: Augmentation | None, key: bytes) -> "Units":
        """The same units, whose examples are changed at random.

        Args:
            augmentation: None: they are as they are.
            key: of one step.
        """
        return replace(self, augmentation=augmentation, key=key) if augmentation else self

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
        return self._taken(np.array([number]) if self.members is None else self.members[number])

    def of_batch(self, batch: NDArray[np.intp]) -> Examples:
        """The examples of a batch of units; `groups` numbers the units within the batch, where they are groups."""
        if self.members is None:
            return self._taken(batch)
        rows, groups = rows_of(self.members, batch)
        return replace(self._taken(rows), groups=groups)

    def _taken(self, rows: NDArray[np.intp]) -> Examples:
        """The examples of these rows, each changed by itself."""
        taken = self.examples.take(rows)
        if self.augmentation is None:
            return taken
        return replace(taken, x=self.augmentation.changed_or_lost(taken.x, self.key))
