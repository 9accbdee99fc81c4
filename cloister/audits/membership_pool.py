"""Examples of which some were in a run's training sets, and models trained on others of them."""

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
"""Examples of an overfitted model, and how often it sees each."""


@dataclass(frozen=True)
class Pool:
    """Examples that an attacker knows, without knowing which ones were trained on.

    Attributes:
        task: that they belong to.
        examples: n of them, in random order.
        owners: whose each is, or would have been, shape (n,).
        member: which ones the model under attack was trained on, shape (n,).
    """

    task: Task
    examples: Examples
    owners: NDArray[np.intp]
    member: Inside

    @classmethod
    def of(cls, run: FinishedRun, seed: int) -> "Pool":
        """What clients trained on and what they kept back; and the server's examples where all are dealt alike.

        Args:
            run: that is audited.
            seed: of the order, and of who would have had an example of the server.

        Raises:
            DataError: no example was kept back from training.
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
        everything, order = _joined(parts), rng.permutation(sum(map(len, parts)))
        member = np.arange(len(everything)) < sum(map(len, trained))
        if member.all():
            raise DataError(f"task {run.config.task.name!r} keeps no examples from training to tell members from")
        return cls(run.task, everything.take(order), np.concatenate(owners)[order], member[order])

    @classmethod
    def small(cls, pool: "Pool", seed: int) -> "Pool":
        """A few of the examples, for a model that learns them by heart; half of them are members.

        Args:
            pool: that they are taken from.
            seed: of the draw.
        """
        count = min(2 * FEW, len(pool.examples))
        chosen = np.random.default_rng(seed).choice(len(pool.examples), count, replace=False)
        member = np.arange(count) < count // 2
        return cls(pool.task, pool.examples.take(chosen), np.zeros(count, np.intp), member)

    def parts(self, inside: Inside) -> list[Examples]:
        """The examples inside, by their owners.

        Args:
            inside: shape (n,).
        """
        clients = range(int(self.owners.max()) + 1)
        return [self.examples.take(np.flatnonzero(inside & (self.owners == number))) for number in clients]

    def seen(
        self, target: Arrays, shadow: Shadow, start: Arrays | None, shadows: int, seed: int, progress: Progress
    ) -> Seen:
        """What the target and shadow models say of the examples.

        Args:
            target: the arrays of the model under attack.
            shadow: the federation that trains shadow models.
            start: the model that it begins with; None: one of its own.
            shadows: how many models to train.
            seed: of who is in which model, and of shuffles.
            progress: takes note of each round.
        """
        inside = drawn(int(self.member.sum()), len(self.examples), shadows, seed)
        seeds = np.random.SeedSequence(seed).generate_state(shadows) >> 1
        models = []
        for chosen, own in zip(inside, seeds, strict=True):
            models.append(self.trained(shadow, chosen, int(own), start))
            progress.step(shadow.config.num_rounds)
        return Seen(self.judged(shadow, target), np.stack([self.judged(shadow, model) for model in models]), inside)

    def trained(self, shadow: Shadow, inside: Inside, seed: int, start: Arrays | None) -> Arrays:
        """The last model of a federation on some of the examples.

        Args:
            shadow: the federation.
            inside: the examples, shape (n,).
            seed: of shuffles.
            start: the model that it begins with; None: one of the seed.
        """
        parts: Sequence[Examples | None] = [part if len(part) else None for part in self.parts(inside)]
        return shadow.run(parts, seed, start)[-1]

    def judged(self, shadow: Shadow, arrays: Arrays) -> Scores:
        """How sure a model is of each example.

        Args:
            shadow: whose model predicts.
            arrays: of the model.
        """
        model = shadow.model
        model.assign(arrays)
        return confidences(self.task, self.examples.y, model.predict(self.examples.x))


def by_heart(run: FinishedRun) -> Shadow:
    """A federation of one client without privacy that sees its few examples again and again.

    Args:
        run: whose task and model it has.
    """
    return one_client(run.config, epochs=EPOCHS)


def _joined(parts: Sequence[Examples]) -> Examples:
    return Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
