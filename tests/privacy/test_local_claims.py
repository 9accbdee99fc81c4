"""Statements about clients that noise their own updates."""

import json
import math

import pytest
from support import failures

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.claims.claim import EVERYBODY, Figure, LocalClaim
from cloister.privacy.claims.client import NEIGHBOURS, UNPROTECTED, gaussian_claim, laplace_claim
from cloister.privacy.claims.premises import BUNDLE, CARRIED, CRYPTOGRAPHY
from cloister.privacy.claims.render import render_clients
from cloister.privacy.claims.to_json import record_clients
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace, no_noise
from cloister.privacy.mechanisms.selection import SEEDED, ReleaseContext


def circumstances(hypotheses, noise_seed=-1, choice="private", choice_epsilon=1.0):
    return ReleaseContext(noise_seed != -1, hypotheses, choice == "private", choice_epsilon)


def claim_of_laplace(hypotheses=1, radius=0.0, noise_multiplier=5.0, per_layer=False, max_leakage=0.0, **settings):
    mechanism = PublishedLaplace(noise_multiplier, per_layer)
    if radius:
        mechanism = LocalLaplace(radius, noise_multiplier, per_layer)
    return laplace_claim(mechanism, 20, 10, circumstances(hypotheses, **settings), max_leakage)


def claim_of_gaussian(hypotheses=1, noise_multiplier=4.0, target_delta=1e-5, **settings):
    mechanism = LocalGaussian(1.0, noise_multiplier)
    return gaussian_claim(mechanism, 10, target_delta, circumstances(hypotheses, **settings))


def laplace(*hypotheses, **settings):
    return record_clients(claim_of_laplace(*hypotheses, **settings))


def gaussian(*hypotheses, **settings):
    return record_clients(claim_of_gaussian(*hypotheses, **settings))


def epsilons(facts):
    return {claim["relation"]: claim["epsilon"] for claim in facts["claims"] if "epsilon" in claim}


def test_what_every_figure_counts_is_said_with_it():
    for claim in (claim_of_laplace(radius=0.5), claim_of_gaussian()):
        assert {figure.counts for figure in claim.counting("all planned rounds").figures} == {"all planned rounds"}


PREMISES = (BUNDLE, CRYPTOGRAPHY, *CARRIED)


def claimed(relation, epsilon, delta, accountant):
    scope = "a client that took part in all 10 rounds of this run"
    return Figure("client", relation, NEIGHBOURS[relation], EVERYBODY, scope, epsilon, delta, accountant)


def test_everything_that_is_said_under_laplace_noise():
    assert claim_of_laplace(radius=0.5, max_leakage=6.0) == LocalClaim(
        "laplace",
        unprotected=(UNPROTECTED,),
        parameters=LocalLaplace(0.5, 5.0).parameters() | {"privacy.max-leakage": 6.0},
        figures=(
            claimed("add-or-remove", 6.0, 0.0, "pure"),
            claimed("replace-one", 12.0, 0.0, "pure"),
            Figure(
                "neighbourhood",
                adversary=EVERYBODY,
                scope="a client that took part in all 10 rounds of this run",
                guarantee="d-privacy, Euclidean distance of models",
                radius=0.5,
                leakage=6.0,
            ),
        ),
        premises=PREMISES,
        adversary=EVERYBODY,
        leakage_of_a_release=4.0,
    )
    # A choice is a release too, within the limit of leakage.
    added, replaced, near = claim_of_laplace(3, radius=0.5, max_leakage=6.0, choice_epsilon=0.3).figures
    assert (added.epsilon, replaced.epsilon, near.leakage) == (6.0, 12.0, 6.0)
    added, replaced, near = claim_of_laplace(3, radius=0.5, choice_epsilon=0.3).figures
    assert (added.epsilon, replaced.epsilon, near.leakage) == (43.0, 86.0, 43.0)


def test_everything_that_is_said_under_gaussian_noise():
    rounds = {"add-or-remove": Gaussian(4.0), "replace-one": Gaussian(2.0)}
    assert claim_of_gaussian(2, target_delta=1e-6, choice_epsilon=0.25) == LocalClaim(
        "gaussian",
        unprotected=(UNPROTECTED,),
        parameters=LocalGaussian(1.0, 4.0).parameters() | {"privacy.choice": "private", "privacy.choice-epsilon": 0.25},
        figures=tuple(
            claimed(relation, Account([event] * 10).epsilon(1e-6, "pld") + choices, 1e-6, "pld")
            for (relation, event), choices in zip(rounds.items(), (2.5, 5.0), strict=True)
        ),
        premises=PREMISES,
        adversary=EVERYBODY,
    )


def test_every_reason_is_said_that_of_the_mechanism_first():
    def check(claim_of, settings, reasons, leakage):
        claim = claim_of(noise_seed=1, **settings)
        assert claim.reasons == reasons and claim.seeded
        assert (claim.figures, claim.adversary, claim.unprotected) == ((), EVERYBODY, (UNPROTECTED,))
        assert claim.leakage_of_a_release == leakage

    cases = [
        (claim_of_laplace, {"radius": 0.5}, (SEEDED,), 4.0),
        (claim_of_laplace, {"radius": 0.5, "noise_multiplier": 0.0}, (no_noise("laplace"), SEEDED), None),
        (claim_of_gaussian, {}, (SEEDED,), None),
        (claim_of_gaussian, {"noise_multiplier": 0.0}, (no_noise("gaussian"), SEEDED), None),
    ]
    assert failures(cases, check) == []


def test_a_limit_that_is_met_exactly_and_more_beginnings_than_rounds_change_nothing():
    without = laplace_claim(LocalLaplace(0.5, 5.0), 20, 10, circumstances(1))
    assert without.parameters["privacy.max-leakage"] == 0.0 and without.figures[2].leakage == 40.0
    for limit, counts in ((40.0, 1), (6.0, 7), (0.0, 3)):
        limited = laplace_claim(LocalLaplace(0.5, 5.0), 20, 10, circumstances(1), limit, counts)
        assert limited.figures == without.figures


class TestLaplace:
    def test_a_radius_is_sound_for_everything_that_a_client_holds(self):
        facts = laplace(radius=0.5)
        assert facts["status"] == "conditional" and facts["unit"] == "client" and facts["leakage-of-a-release"] == 4
        assert epsilons(facts) == {"add-or-remove": 40, "replace-one": 80}
        assert all(claim["delta"] == 0 for claim in facts["claims"] if "delta" in claim)
        assert {claim["accountant"] for claim in facts["claims"] if "epsilon" in claim} == {"pure"}
        json.dumps(facts, allow_nan=False)

    def test_the_view_of_d_privacy_stays_beside_it(self):
        (view,) = [claim for claim in laplace(radius=0.5)["claims"] if "leakage" in claim]
        assert view["leakage"] == 40 and view["radius"] == 0.5 and view["unit"] == "neighbourhood"

    def test_arrays_with_balls_of_their_own_cost_the_same(self):
        assert epsilons(laplace(radius=0.5, per_layer=True)) == {"add-or-remove": 40, "replace-one": 80}

    def test_a_limit_bounds_it(self):
        assert epsilons(laplace(radius=0.5, max_leakage=6.0)) == {"add-or-remove": 6, "replace-one": 12}
        # A node without a ledger takes a run that is resumed for a new one.
        twice = laplace_claim(LocalLaplace(0.5, 5.0), 20, 10, circumstances(1), 6.0, counts=2)
        assert epsilons(record_clients(twice)) == {"add-or-remove": 12, "replace-one": 24}
        assert epsilons(laplace(radius=0.5, max_leakage=60.0)) == {"add-or-remove": 40, "replace-one": 80}

    def test_private_choices_add_up(self):
        facts = laplace(3, radius=0.5, choice_epsilon=0.3)
        assert epsilons(facts) == {"add-or-remove": 43, "replace-one": 86}
        assert facts["parameters"]["privacy.choice-epsilon"] == 0.3
        assert epsilons(laplace(1, radius=0.5, choice_epsilon=0.3))["add-or-remove"] == 40

    def test_as_published_nothing_is_claimed(self):
        assert (
            laplace()["status"] == "heuristic" and "radius is 0" in laplace()["reasons"][0] and not laplace()["claims"]
        )


class TestGaussian:
    def test_the_accountants_numbers_under_both_relations(self):
        facts = gaussian(target_delta=1e-6)
        assert facts["status"] == "conditional"
        assert epsilons(facts) == {
            "add-or-remove": Account().plus(Gaussian(4.0), 10).epsilon(1e-6, "pld"),
            "replace-one": Account().plus(Gaussian(2.0), 10).epsilon(1e-6, "pld"),
        }
        assert all(claim["delta"] == 1e-6 and claim["accountant"] == "pld" for claim in facts["claims"])

    def test_private_choices_add_up(self):
        without, with_choice = epsilons(gaussian()), epsilons(gaussian(2, choice_epsilon=0.25))
        assert math.isclose(with_choice["add-or-remove"], without["add-or-remove"] + 2.5)
        assert math.isclose(with_choice["replace-one"], without["replace-one"] + 5)

    def test_an_epsilon_is_shown_at_its_own_delta(self):
        lines = [line for line in render_clients(claim_of_gaussian(target_delta=2e-6)) if "ε = " in line]
        assert len(lines) == 2 and all(" at δ = 2e-06 for everything" in line for line in lines)


@pytest.mark.parametrize("claim", [lambda **more: claim_of_laplace(radius=1.0, **more), claim_of_gaussian])
class TestBoth:
    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"noise_seed": 3}, "seeded"),
            ({"noise_multiplier": 0.0}, "no noise"),
            ({"choice": "exact", "hypotheses": 2}, "without noise"),
        ],
    )
    def test_what_is_not_sound_claims_nothing_and_says_why(self, claim, settings, reason):
        facts = record_clients(claim(**settings))
        assert facts["status"] == "heuristic" and facts["claims"] == []
        assert any(reason in line for line in render_clients(claim(**settings)))

    def test_the_server_is_an_adversary_if_the_node_runs_its_code(self, claim):
        assert "the server" in claim().adversary and BUNDLE in claim().premises

    def test_an_epsilon_that_is_worth_nothing_is_called_so(self, claim):
        assert any(", weak" in line for line in render_clients(claim(noise_multiplier=0.5)))
        assert not any("weak" in line for line in render_clients(claim(noise_multiplier=1e4)))
