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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cloister.audits.client_game import Arrays, Game
from cloister.audits.epsilon import Trials
from cloister.audits.finding import Finding, Measured
from cloister.audits.likelihood import cross_fitted
from cloister.audits.scores import Evidence, Scores
from cloister.audits.subject import FinishedRun
from cloister.audits.table import OF_SHADOWS, Effort
from cloister.local.shadow import Shadow, without_privacy

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
