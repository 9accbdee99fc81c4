"""Membership inference audit of a finished model: its training examples, and its clients.

The attacker has the examples (members and others, mixed), the configuration and the model. It trains shadow models on
random parts of the examples by the same federation. Scores of single examples have unit `example`. Scores of unit
`client` are means over a tenth of a client's examples, as evidence that this client's data was used.

Higher scores support a member. Each attack receives the outputs of the target model and of s shadow models on n
examples. Each shadow model is trained on some of these examples.

Sources: Yeom et al. (2018), arXiv:1709.01604, for the loss threshold; Carlini et al. (2022), arXiv:2112.03570,
Algorithms 1 and 2 with §IV for logit-scaled confidences and one variance for all examples where shadow models are
few; Zarifzadeh et al. (2024), arXiv:2312.03262, §3 for RMIA with online reference models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cloister.audits.audit import OF_SHADOWS, Effort, FinishedRun, Progress
from cloister.audits.client_inference import SHARE
from cloister.audits.findings import Finding, roc_picture
from cloister.audits.scores import Evidence, Scores
from cloister.simulation.shadow import Shadow, dealt, one_client, outsiders
from cloister.tasks.base import Examples, Task
from cloister.utils.errors import DataError

Inside = NDArray[np.bool_]
FLOOR = 1e-7
"""Smallest probability, as in the losses of tasks."""
SMALLEST = 1e-9
"""Smallest variance."""


@dataclass(frozen=True)
class Seen:
    """Confidences of models in the right answers for examples.

    Attributes:
        target: confidence of the attacked model in the right answer, shape (n,): any real number.
        shadows: confidences of the shadow models, shape (s, n).
        inside: True for the training examples of each shadow model, shape (s, n). Every example is in the training sets
            of at least two models, and absent from those of at least two.
    """

    target: Scores
    shadows: Scores
    inside: Inside

    def loss_threshold(self) -> Scores:
        """Return the target's own confidence: that of a member is high."""
        return self.target

    def lira_online(self) -> Scores:
        """Compute ln N(confidence; fit to models with the example) - ln N(confidence; fit to models without it)."""
        return self._log_density(self.inside) - self._log_density(~self.inside)

    def lira_offline(self) -> Scores:
        """Compute the confidence's standardized distance above the absent models.

        The absent models are those without the example.
        """
        mean, variance = self._fit(~self.inside)
        found: Scores = (self.target - mean) / np.sqrt(variance)
        return found

    def rmia(self) -> Scores:
        """Compute the share of all examples z that x dominates: P(x | target)/P(x) ≥ P(z | target)/P(z).

        P of an example is the mean over models with it and models without it, each kind with weight one half. The
        threshold is γ = 1: a model that generalizes has no ratios of 2.
        """
        said, outside = _probability(self.shadows), ~self.inside
        with_it = (said * self.inside).sum(axis=0) / self.inside.sum(axis=0)
        without = (said * outside).sum(axis=0) / outside.sum(axis=0)
        ratio = _probability(self.target) / ((with_it + without) / 2)
        found: Scores = stats.rankdata(ratio, "max") / len(ratio)
        return found

    def _log_density(self, chosen: Inside) -> Scores:
        mean, variance = self._fit(chosen)
        found: Scores = stats.norm.logpdf(self.target, mean, np.sqrt(variance))
        return found

    def _fit(self, chosen: Inside) -> tuple[Scores, float]:
        """Return the mean of each example over its chosen models, and one variance.

        The variance is common to all examples, around these means.
        """
        count = chosen.sum(axis=0)
        mean = (self.shadows * chosen).sum(axis=0) / count
        freedom = float((count - 1).sum())
        return mean, max(float((np.square(self.shadows - mean) * chosen).sum() / freedom), SMALLEST)

    def against(self, number: int) -> "Seen":
        """Return one shadow model as the target, with the others as its shadow models.

        Args:
            number: of the shadow model.
        """
        others = np.arange(len(self.shadows)) != number
        return Seen(self.shadows[number], self.shadows[others], self.inside[others])


def confidences(task: Task, y: NDArray, outputs: NDArray) -> Scores:
    """Compute a model's confidence in the right answer.

    It is ln p/(1 - p) of a class, or -ln of the loss of a number.

    Args:
        task: that the model solves.
        y: n targets.
        outputs: of the model, shape (n, classes) or (n,).
    """
    if not task.classes:
        found: Scores = -np.log(task.losses(y, outputs).astype(np.float64) + FLOOR)
        return found
    said = np.clip(outputs.astype(np.float64), FLOOR, 1.0)
    right = np.take_along_axis(said, y.astype(np.int64)[:, None], axis=1)[:, 0]
    # The sum of the other classes, since 1 - p is 0 in single precision for a very confident model.
    found = np.log(right) - np.log(np.maximum(said.sum(axis=1) - right, FLOOR))
    return found


def _probability(confidence: Scores) -> Scores:
    found: Scores = 1 / (1 + np.exp(-confidence))
    return found


def drawn(members: int, pool: int, shadows: int, seed: int) -> Inside:
    """Draw the training examples of each shadow model.

    A model has about as many as the target. Each example is in equally many models.

    Args:
        members: number of training examples of the target.
        pool: n of all examples.
        shadows: s of the models, at least 4.
        seed: of the draw.

    Returns:
        Shape (s, n); every example is in at least two models and absent from at least two.
    """
    times = int(np.clip(round(shadows * members / pool), 2, shadows - 2))
    order = np.random.default_rng(seed).random((shadows, pool)).argsort(axis=0)
    return order < times


def grouped(scores: Scores, owners: NDArray, size: int) -> Scores:
    """Return the mean score of each set of `size` examples of one owner.

    An incomplete set is dropped.

    Args:
        scores: of n examples.
        owners: of each, shape (n,).
        size: of a set.
    """
    found = []
    for owner in np.unique(owners):
        own = scores[owners == owner]
        whole = len(own) // size * size
        found.append(own[:whole].reshape(-1, size).mean(axis=1))
    return np.concatenate(found) if found else np.zeros(0)


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
        everything = Examples.joined([replace(part, groups=None) for part in parts])
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


LOSS, ONLINE, OFFLINE, ROBUST = "loss threshold", "LiRA, online", "LiRA, offline", "RMIA"
OF_CLIENTS = "LiRA, online, on a tenth of a client"
PICTURE = "audit-membership.png"
ENOUGH = 4
"""Fewest sets of examples of each kind for figures about clients."""


def evidence(pool: Pool, seen: Seen, seed: int) -> Iterator[Evidence]:
    """Yield the evidence of each attack on an example, and of one on a tenth of a client if there are enough sets.

    Args:
        pool: of examples; the attacks must find its members.
        seen: the models' confidences in them.
        seed: of the bootstrap.
    """
    found = {LOSS: seen.loss_threshold(), ONLINE: seen.lira_online(), OFFLINE: seen.lira_offline()}
    if pool.task.classes:
        found[ROBUST] = seen.rmia()
    for name, scores in found.items():
        yield Evidence(name, "example", scores[pool.member], scores[~pool.member], seed)
    scores, inside = found[ONLINE], pool.member
    size = max(1, round(SHARE * inside.sum() / len(np.unique(pool.owners))))
    present, absent = (grouped(scores[kind], pool.owners[kind], size) for kind in (inside, ~inside))
    if min(len(present), len(absent)) >= ENOUGH:
        yield Evidence(OF_CLIENTS, "client", present, absent, seed)


class MembershipInference:
    """The membership inference audit: four attacks on single examples and one on clients, with their controls."""

    name = "membership-inference"

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why the run cannot be attacked; empty if it can.

        Args:
            run: audited run.
        """
        if run.config.task.group:
            return "it protects groups of examples, and this attack is about single ones"
        return run.without_examples

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the final model of the run.

        Args:
            run: audited run.
            effort: number of shadow models.
        """
        pool, shadow = Pool.of(run, effort.seed), Shadow(run.config)
        target = run.model().arrays()
        start = run.released().get(0) or shadow.initial(run.seed)
        # Each overfitted model takes one round, and their number is the same.
        effort.progress.expect(effort.shadows * (run.config.num_rounds + 1), OF_SHADOWS, run.seconds_a_round)
        seen = pool.seen(target, shadow, start, effort.shadows, effort.seed, effort.progress)
        attacks = list(evidence(pool, seen, effort.seed))
        measured = [figure for each in attacks for figure in each.figures()]
        few, overfitted = Pool.small(pool, effort.seed), one_client(run.config, epochs=EPOCHS)
        learnt = few.trained(overfitted, few.member, effort.seed, None)
        of_few = few.seen(learnt, overfitted, None, effort.shadows, effort.seed + 1, effort.progress)
        # A shadow model's members and others are drawn at random. If its scores for the run's members differ from those
        # for the others, members and others differ by more than their membership.
        blind = evidence(pool, seen.against(0), effort.seed)
        controls = (
            *(each.has_to_succeed("a model that learnt by heart") for each in evidence(few, of_few, effort.seed)),
            *(each.has_to_fail("members exchanged at random") for each in blind),
        )
        curves = {each.attack: each.curve() for each in attacks if each.unit == "example"}
        pictures = roc_picture(run.path / PICTURE, curves)
        details = {"members": len(attacks[0].present), "others": len(attacks[0].absent), "roc": curves}
        found = Finding(self.name, "", tuple(measured), controls, pictures, details)
        best = max(found.borne_out("auc"), key=lambda item: item.value, default=None)
        if best is None or not best.beats_chance:
            meaning = "These attacks could not tell the examples that the model was trained on from others; "
            meaning += "stronger ones might."
        else:
            whose = "an example was" if best.unit == "example" else "a client's examples were"
            meaning = (
                f"An attacker who has the model and trains others like it tells whether {whose} trained on in "
                f"{100 * best.value:.0f} of 100 pairs of one that was and one that was not (by {best.attack})."
            )
        return replace(found, meaning=meaning)


AUDIT = MembershipInference()
