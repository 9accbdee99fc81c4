"""Client inference audit: does a given client take part? Two published attacks and a likelihood ratio.

The attacker repeats the federation with the target (IN) and without it (OUT). In an OUT run the target stays on the
roster and contributes nothing, as in a claim for a client. The attacker has all other clients' examples, as
differential privacy assumes. It computes three scores from a run's releases:

- single shot, after round 1: -100·(loss_shadow - loss_aggregated)/loss_shadow, on a tenth of the target's examples;
- multi-round: -loss of each round's model, on a tenth of the target's examples with noise on them;
- likelihood ratio: the projection of round 1's release on the target's direction, under Gaussians fitted to other IN
  and OUT runs. The projections give a lower bound on ε by `Trials`, for every distribution.

Source of the first two: Sáinz-Pardo Díaz et al. (2026), Knowledge-Based Systems 343, 115993, §5 and §7.4.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cloister.audits.audit import OF_SHADOWS, Effort, FinishedRun
from cloister.audits.findings import Finding, Measured
from cloister.audits.scores import Evidence, Scores
from cloister.audits.testing import Trials, flat
from cloister.simulation.shadow import Shadow, dealt, outsiders, without_noise, without_privacy
from cloister.tasks.base import Examples, Task
from cloister.utils.rows import each_field

SHARE = 0.1
"""Share of the target's examples that the attacker has, as published."""
BLUR = 0.2
"""Standard deviation of the noise on a blurred shadow set, in units of its largest input, as published."""


def shadow_set(examples: Examples, seed: int) -> Examples:
    """Draw a tenth of the examples, at least one.

    Args:
        examples: of the target.
        seed: of the draw.
    """
    count = max(1, round(SHARE * len(examples)))
    return examples.take(np.sort(np.random.default_rng(seed).choice(len(examples), count, replace=False)))


def blurred(examples: Examples, seed: int) -> Examples:
    """Add Gaussian noise to the inputs, for an attacker with inexact data of the target.

    Args:
        examples: of the shadow set.
        seed: of the noise.
    """
    rng = np.random.default_rng(seed)

    def noised(_: str, x: NDArray) -> NDArray:
        return (x + rng.normal(0, BLUR * np.abs(x).max(), x.shape)).astype(x.dtype)

    return replace(examples, x=each_field(noised, examples.x))


def most_unlike(parts: Sequence[Examples], classes: int) -> int:
    """Return the client whose class shares differ most from those of all clients.

    Of equal ones, the largest client is returned.

    Args:
        parts: the examples of each client.
        classes: number of classes; 0: targets are numbers, and the largest client is returned.
    """

    def shares(y: np.ndarray) -> np.ndarray:
        return np.bincount(y.astype(np.int64), minlength=classes) / max(1, len(y))

    if not classes:
        return int(np.argmax([len(part) for part in parts]))
    everybody = shares(np.concatenate([part.y for part in parts]))
    apart = [(round(float(np.abs(shares(part.y) - everybody).sum()), 6), len(part)) for part in parts]
    return max(range(len(parts)), key=lambda number: apart[number])


SMALLEST = 1e-12
"""Smallest standard deviation, in units of the values' own size: exactly repeated runs would have 0."""


def cross_fitted(present: Scores, absent: Scores) -> tuple[Scores, Scores]:
    """Compute the log likelihood ratio of each value.

    The Gaussians are fitted to the other half of the values.

    Args:
        present: values of one kind, shape (m,), m > 1.
        absent: values of the other kind, shape (n,), n > 1.

    Returns:
        Ratios of shapes (m,) and (n,): positive where a value supports `present`.
    """
    found = np.empty(len(present)), np.empty(len(absent))
    for half in (0, 1):
        fitted = present[1 - half :: 2], absent[1 - half :: 2]
        for values, into in zip((present, absent), found, strict=True):
            into[half::2] = ratios(values[half::2], *fitted)
    return found


def ratios(values: Scores, present: Scores, absent: Scores) -> Scores:
    """Compute ln N(value; fit of `present`) - ln N(value; fit of `absent`).

    Args:
        values: scored values.
        present, absent: values to which the Gaussians are fitted.
    """
    return log_density(values, present) - log_density(values, absent)


def log_density(values: Scores, fitted: Scores) -> Scores:
    """Compute the logarithm of a Gaussian's density.

    Args:
        values: points of evaluation.
        fitted: values to which the Gaussian is fitted.
    """
    size = float(np.abs(fitted).max()) or 1.0
    found: Scores = stats.norm.logpdf(values, fitted.mean(), max(float(fitted.std()), SMALLEST * size))
    return found


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


SINGLE, SEVERAL, RATIO = "single shot, as published", "multi-round, as published", "likelihood ratio, round 1"
CONFIDENCE = 0.95
REPEATS, PAIRS = 3, 4
"""First rounds of each kind per permitted shadow run, and shadow runs per complete run of each kind."""


@dataclass(frozen=True)
class Played:
    """Scores of runs with the target, or of runs without it.

    Attributes:
        published: the single-shot score of each repetition.
        projections: of each repetition's release on the target's direction.
        confidences: the multi-round score of each round, shape (complete runs, rounds).
    """

    published: Scores
    projections: Scores
    confidences: Scores

    def half(self, number: int) -> "Played":
        """Return every other repetition, and every other complete run.

        Args:
            number: 0, or 1 for the other half.
        """
        return Played(self.published[number::2], self.projections[number::2], self.confidences[number::2])


def play(game: Game, inside: bool, effort: Effort) -> Played:
    """Repeat the federation and score its releases.

    Args:
        game: about the target.
        inside: True if the target takes part.
        effort: number of repetitions.
    """
    seeds = np.random.SeedSequence([effort.seed, inside]).generate_state(REPEATS * effort.shadows) >> 1
    first = [_released(game, inside, int(seed), effort, 1)[0] for seed in seeds]
    whole = [_released(game, inside, int(seed), effort, 0) for seed in seeds[: max(2, effort.shadows // PAIRS)]]
    return Played(
        np.array([game.published(arrays, inside) for arrays in first]),
        np.array([game.projection(arrays) for arrays in first]),
        np.array([[game.confidence(arrays) for arrays in run] for run in whole]),
    )


def _released(game: Game, inside: bool, seed: int, effort: Effort, rounds: int) -> list[Arrays]:
    """Run a federation as `Game.released`, and count its rounds as done."""
    models = game.released(inside, seed, rounds)
    effort.progress.step(len(models))
    return models


def evidence(present: Played, absent: Played, seed: int) -> Iterator[Evidence]:
    """Yield the evidence of the three attacks.

    Args:
        present: with the target.
        absent: without it.
        seed: of the bootstrap.
    """
    # The published score is small if the model has learnt the target: its loss is below the aggregated loss.
    yield Evidence(SINGLE, "client", -present.published, -absent.published, seed)
    yield Evidence(SEVERAL, "client", present.confidences, absent.confidences, seed)
    yield Evidence(RATIO, "client", *cross_fitted(present.projections, absent.projections), seed)


class ClientInference:
    """The client inference audit: three attacks on one client, each with its controls."""

    name = "client-inference"

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why the run cannot be attacked; empty if it can.

        Args:
            run: audited run.
        """
        return run.without_examples or ("a run of one client has no other to tell it from" if run.clients < 2 else "")

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the client whose data differ most from the others'.

        Args:
            run: audited run.
            effort: number of repetitions of the federation.
        """
        game = Game.of(run, effort.seed)
        rounds = REPEATS * effort.shadows + max(2, effort.shadows // PAIRS) * run.config.num_rounds
        # Of each kind, and for a private run as many for the controls.
        rounds *= 4 if run.config.is_private else 2
        effort.progress.expect(rounds, OF_SHADOWS, run.seconds_a_round)
        present, absent = (play(game, inside, effort) for inside in (True, False))
        attacks = list(evidence(present, absent, effort.seed))
        bound = Trials(present.projections, absent.projections).epsilon(run.delta, CONFIDENCE)
        epsilon = Measured(RATIO, "epsilon", bound, "client", delta=run.delta, confidence=CONFIDENCE)
        published = Measured("score of " + SINGLE, "score", float(present.published.mean()), "client")
        measured = (*(each.auc() for each in attacks), epsilon, published)
        unprotected = attacks
        if run.config.is_private:
            open_game = replace(game, shadow=Shadow(without_privacy(run.config)))
            unprotected = list(evidence(play(open_game, True, effort), play(open_game, False, effort), effort.seed))
        in_neither = evidence(absent.half(0), absent.half(1), effort.seed)
        controls = (
            *(each.has_to_succeed("without privacy") for each in unprotected),
            *(each.has_to_fail("the target in neither") for each in in_neither),
        )
        found = Finding(self.name, "", measured, controls)
        telling = [item for item in found.borne_out("auc") if item.beats_chance]
        if not telling:
            meaning = (
                "An attacker who sees the released models could not tell by these attacks whether client "
                f"{game.target} takes part; a stronger attack might."
            )
        else:
            best = max(telling, key=lambda item: item.value)
            meaning = (
                "An attacker who knows the other clients' examples and sees the released models tells whether client "
                f"{game.target} takes part in {100 * best.value:.0f} of 100 pairs of a run with it and one without "
                f"(by {best.attack})."
            )
        return replace(found, meaning=meaning)


AUDIT = ClientInference()
