"""Pool of examples, some from a run's training sets, and shadow models trained on parts of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.audits.membership import Inside, Seen, confidences, drawn
from cloister.audits.progress import Progress
from cloister.audits.scores import Scores
from cloister.audits.subject import FinishedRun
from cloister.core.errors import DataError
from cloister.local.shadow import Shadow, dealt, one_client, outsiders
from cloister.tasks.base import Examples, Task

Arrays = Mapping[str, NDArray]
FEW, EPOCHS = 60, 200
"""Training examples of an overfitted model, and its epochs."""


@dataclass(frozen=True)
class Pool:
    """Examples that the attacker has, without their membership.

    Attributes:
        task: of the examples.
        examples: n of them, in random order.
        owners: actual or hypothetical client of each, shape (n,).
        member: True for the training examples of the attacked model, shape (n,).
    """

    task: Task
    examples: Examples
    owners: NDArray[np.intp]
    member: Inside

    @classmethod
    def of(cls, run: FinishedRun, seed: int) -> "Pool":
        """Return the clients' training and test examples as a pool.

        The server's examples are added if the partition is iid, or if no client has test examples.

        Args:
            run: audited run.
            seed: of the order, and of the hypothetical owners of the server's examples.

        Raises:
            DataError: every example was used for training.
        """
        data = dealt(run.config, run.clients, run.seed)
        trained, kept = [each.train for each in data], [each.test for each in data]
        rng = np.random.default_rng(seed)
        owners = [np.full(len(part), number) for side in (trained, kept) for number, part in enumerate(side)]
        parts = [*trained, *kept]
        asked = run.config.task.partition
        if (asked if asked != "auto" else run.task.partition) == "iid" or not sum(map(len, kept)):
            parts.append(outsiders(run.config))
            owners.append(rng.integers(run.clients, size=len(parts[-1])))
        everything = Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
        order = rng.permutation(len(everything))
        member = np.arange(len(everything)) < sum(map(len, trained))
        if member.all():
            raise DataError(f"task {run.config.task.name!r} keeps no examples from training to tell members from")
        return cls(run.task, everything.take(order), np.concatenate(owners)[order], member[order])

    @classmethod
    def small(cls, pool: "Pool", seed: int) -> "Pool":
        """Return a few of the examples, half of them members, for a model that overfits them.

        Args:
            pool: source of the examples.
            seed: of the draw.
        """
        count = min(2 * FEW, len(pool.examples))
        chosen = np.random.default_rng(seed).choice(len(pool.examples), count, replace=False)
        member = np.arange(count) < count // 2
        return cls(pool.task, pool.examples.take(chosen), np.zeros(count, np.intp), member)

    def parts(self, inside: Inside) -> list[Examples]:
        """Return the chosen examples, by their owners.

        Args:
            inside: shape (n,).
        """
        clients = range(int(self.owners.max()) + 1)
        return [self.examples.take(np.flatnonzero(inside & (self.owners == number))) for number in clients]

    def seen(
        self, target: Arrays, shadow: Shadow, start: Arrays | None, shadows: int, seed: int, progress: Progress
    ) -> Seen:
        """Compute the confidences of the target and of newly trained shadow models.

        Args:
            target: the arrays of the attacked model.
            shadow: the federation that trains shadow models.
            start: its initial model; None: one drawn by the federation.
            shadows: number of models to train.
            seed: of the models' training sets, and of shuffles.
            progress: counts each round.
        """
        inside = drawn(int(self.member.sum()), len(self.examples), shadows, seed)
        seeds = np.random.SeedSequence(seed).generate_state(shadows) >> 1
        models = []
        for chosen, own in zip(inside, seeds, strict=True):
            models.append(self.trained(shadow, chosen, int(own), start))
            progress.step(shadow.config.num_rounds)
        return Seen(self.judged(shadow, target), np.stack([self.judged(shadow, model) for model in models]), inside)

    def trained(self, shadow: Shadow, inside: Inside, seed: int, start: Arrays | None) -> Arrays:
        """Train a federation on some of the examples, and return its last model.

        Args:
            shadow: the federation.
            inside: the examples, shape (n,).
            seed: of shuffles.
            start: the initial model; None: one of the seed.
        """
        parts: Sequence[Examples | None] = [part if len(part) else None for part in self.parts(inside)]
        return shadow.run(parts, seed, start)[-1]

    def judged(self, shadow: Shadow, arrays: Arrays) -> Scores:
        """Compute a model's confidence in the right answer for each example.

        Args:
            shadow: provides the model that predicts.
            arrays: of the model.
        """
        model = shadow.model
        model.assign(arrays)
        return confidences(self.task, self.examples.y, model.predict(self.examples.x))


def by_heart(run: FinishedRun) -> Shadow:
    """Return a federation of one client without privacy that overfits.

    It trains for `EPOCHS` epochs on its few examples.

    Args:
        run: with the task and model.
    """
    return one_client(run.config, epochs=EPOCHS)
