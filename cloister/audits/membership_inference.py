"""Membership inference audit of a finished model: its training examples, and its clients.

The attacker has the examples (members and others, mixed), the configuration and the model. It trains shadow models on
random parts of the examples by the same federation. Scores of single examples have unit `example`. Scores of unit
`client` are means over a tenth of a client's examples, as evidence that this client's data was used.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cloister.audits.finding import Finding
from cloister.audits.membership import Seen, grouped
from cloister.audits.membership_pool import Pool, by_heart
from cloister.audits.pictures import roc_picture
from cloister.audits.scores import Evidence
from cloister.audits.shadow_sets import SHARE
from cloister.audits.subject import FinishedRun
from cloister.audits.table import OF_SHADOWS, Effort
from cloister.local.shadow import Shadow

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
        few, overfitted = Pool.small(pool, effort.seed), by_heart(run)
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
