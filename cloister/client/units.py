"""Privacy units of DP-SGD on a node, and their public number.

A unit is an example, or with `task.group` a group of examples (a patient's, a writer's). The rate of batches and the
number of steps reveal the number of units. A node with data of its own therefore uses a constant that its operator
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
        return LocalSteps(
            plan.public_size or max(1, len(self)), plan.batch_size, plan.epochs, privacy.dp_sgd.batch_sampling
        )

    def examples_of(self, number: int) -> Examples:
        """Return the examples of one unit."""
        return self._taken(np.array([number]) if self.members is None else self.members[number])

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
