"""Client inference game: one target, in federations that run with it and without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cloister.audits.scores import Scores
from cloister.audits.shadow_sets import blurred, most_unlike, shadow_set
from cloister.audits.subject import FinishedRun
from cloister.local.shadow import Shadow, dealt, outsiders, without_noise
from cloister.tasks.base import Examples, Task

Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class Game:
    """One target in one federation.

    Attributes:
        shadow: the federation.
        task: of the run.
        parts: training examples of each client.
        tests: test examples of each client, for the published aggregated loss; if no client has any, only the
            server's.
        target: number of the attacked client.
        start: initial model of the runs.
        seed: of the attacker's draws.
    """

    shadow: Shadow
    task: Task
    parts: Sequence[Examples]
    tests: Sequence[Examples]
    target: int
    start: Arrays
    seed: int

    @classmethod
    def of(cls, run: FinishedRun, seed: int) -> "Game":
        """Return the game about the client whose data differ most from the others'.

        Args:
            run: audited run.
            seed: of the attacker's draws.
        """
        data, shadow = dealt(run.config, run.clients, run.seed), Shadow(run.config)
        parts, kept = [each.train for each in data], [each.test for each in data]
        tests = kept if sum(map(len, kept)) else [outsiders(run.config)]
        target = most_unlike(parts, run.task.classes)
        start = run.released().get(0) or shadow.initial(run.seed)
        return cls(shadow, run.task, parts, tests, target, start, seed)

    @cached_property
    def direction(self) -> Scores:
        """Return the direction of the target's effect on the first release, of length 1.

        It is the difference of two rounds without noise, with the target and without it. If the mean is over a public
        number of clients, this is the direction of the target's own clipped update.
        """
        silent = Shadow(without_noise(self.shadow.config))
        with_it, without = (silent.run(self.parts_of(inside), self.seed, self.start, 1)[-1] for inside in (True, False))
        change = flat(with_it) - flat(without)
        return change / max(float(np.linalg.norm(change)), float(np.finfo(np.float64).tiny))

    def parts_of(self, inside: bool) -> list[Examples | None]:
        """Return the examples of each client; None for an absent target.

        Args:
            inside: True if the target takes part.
        """
        return [None if number == self.target and not inside else part for number, part in enumerate(self.parts)]

    def released(self, inside: bool, seed: int, rounds: int) -> list[Arrays]:
        """Run a federation and return the models that it releases after its rounds.

        Args:
            inside: True if the target takes part.
            seed: of shuffles.
            rounds: number of rounds; 0: all.
        """
        return self.shadow.run(self.parts_of(inside), seed, self.start, rounds)[1:]

    def published(self, arrays: Arrays, inside: bool) -> float:
        """Compute 100·(loss_shadow - loss_aggregated)/loss_shadow.

        The aggregated loss is over all participants.

        Args:
            arrays: of a global model.
            inside: True if the target takes part.
        """
        public = inside or len(self.tests) < len(self.parts)  # these are the server's
        tests = [test for number, test in enumerate(self.tests) if public or number != self.target]
        aggregated = np.concatenate([self.losses(arrays, test) for test in tests if len(test)]).mean()
        own = self.losses(arrays, shadow_set(self.parts[self.target], self.seed)).mean()
        return float(100 * (own - aggregated) / own)

    def confidence(self, arrays: Arrays) -> float:
        """Compute -loss of a global model on the blurred shadow set.

        Args:
            arrays: of the model.
        """
        held = blurred(shadow_set(self.parts[self.target], self.seed), self.seed)
        return -float(self.losses(arrays, held).mean())

    def projection(self, arrays: Arrays) -> float:
        """Project the change of a released model since the start on the target's direction.

        Args:
            arrays: of the model.
        """
        return float((flat(arrays) - flat(self.start)) @ self.direction)

    def losses(self, arrays: Arrays, examples: Examples) -> Scores:
        """Compute the loss of each example under a model, shape (n,).

        Args:
            arrays: of the model.
            examples: n of them.
        """
        model = self.shadow.model
        model.assign(arrays)
        return self.task.losses(examples.y, model.predict(examples.x)).astype(np.float64)


def flat(arrays: Arrays) -> Scores:
    """Return all parameters of a model as one vector in double precision.

    Args:
        arrays: of the model.
    """
    return np.concatenate([array.ravel() for array in arrays.values()], dtype=np.float64)
