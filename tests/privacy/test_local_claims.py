"""What is said about clients that noise their own updates."""

import json
import math

import pytest

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.claims.local import gaussian_claim, laplace_claim
from cloister.privacy.claims.record import record_clients
from cloister.privacy.claims.words import render_clients
from cloister.privacy.mechanisms.circumstances import Circumstances
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace


def circumstances(hypotheses, noise_seed=-1, choice="private", choice_epsilon=1.0):
    return Circumstances(noise_seed != -1, hypotheses, choice == "private", choice_epsilon)


def claim_of_laplace(
    hypotheses=1, radius=0.0, client_noise_multiplier=5.0, per_layer=False, max_leakage=0.0, **settings
):
    mechanism = PublishedLaplace(client_noise_multiplier, per_layer)
    if radius:
        mechanism = LocalLaplace(radius, client_noise_multiplier, per_layer)
    return laplace_claim(mechanism, 20, 10, circumstances(hypotheses, **settings), max_leakage)


def claim_of_gaussian(hypotheses=1, client_noise_multiplier=4.0, target_delta=1e-5, **settings):
    mechanism = LocalGaussian(1.0, client_noise_multiplier)
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


class TestLaplace:
    def test_a_radius_is_sound_for_everything_that_a_client_holds(self):
        facts = laplace(radius=0.5)
        assert facts["status"] == "sound" and facts["unit"] == "client" and facts["leakage-of-a-release"] == 4
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
        assert facts["status"] == "sound"
        assert epsilons(facts) == {
            "add-or-remove": Account().plus(Gaussian(4.0), 10).epsilon(1e-6, "pld"),
            "replace-one": Account().plus(Gaussian(2.0), 10).epsilon(1e-6, "pld"),
        }
        assert all(claim["delta"] == 1e-6 and claim["accountant"] == "pld" for claim in facts["claims"])

    def test_private_choices_add_up(self):
        without, with_choice = epsilons(gaussian()), epsilons(gaussian(2, choice_epsilon=0.25))
        assert math.isclose(with_choice["add-or-remove"], without["add-or-remove"] + 2.5)
        assert math.isclose(with_choice["replace-one"], without["replace-one"] + 5)


@pytest.mark.parametrize("claim", [lambda **more: claim_of_laplace(radius=1.0, **more), claim_of_gaussian])
class TestBoth:
    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"noise_seed": 3}, "seeded"),
            ({"client_noise_multiplier": 0.0}, "no noise"),
            ({"choice": "exact", "hypotheses": 2}, "without noise"),
        ],
    )
    def test_what_is_not_sound_claims_nothing_and_says_why(self, claim, settings, reason):
        facts = record_clients(claim(**settings))
        assert facts["status"] == "heuristic" and facts["claims"] == []
        assert any(reason in line for line in render_clients(claim(**settings)))

    def test_the_server_is_an_adversary_unless_the_node_runs_its_code(self, claim):
        assert "the server" in claim().adversary and "its own code" in claim().adversary

    def test_an_epsilon_that_is_worth_nothing_is_called_so(self, claim):
        assert any("no protection" in line for line in render_clients(claim(client_noise_multiplier=0.5)))
        assert not any("no protection" in line for line in render_clients(claim(client_noise_multiplier=1e4)))
