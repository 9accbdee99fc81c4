"""The thesis' figures to the printed digit, and the sound ones beside them, recomputed by other means."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles
import pytest
from scipy import stats
from support import failures

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER, Sampling
from cloister.privacy.claims.claim import EVERYBODY, DpSgdClaim, Figure, OfSize
from cloister.privacy.claims.client import (
    CLIENTS_ARE_NEIGHBOURS,
    PUBLISHED_CLIENT_REASONS,
    UNITS_ARE_NEIGHBOURS,
    UNPROTECTED,
    client_multiplier,
    costliest_of,
    dp_sgd_claim,
    recovered_multiplier,
    sound_client,
    sound_unit,
    standing_for_all,
)
from cloister.privacy.claims.premises import BUNDLE, CARRIED, CRYPTOGRAPHY, KERNELS, TIME
from cloister.privacy.claims.to_json import record_clients
from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps
from cloister.privacy.mechanisms.local import no_noise
from cloister.privacy.mechanisms.selection import SEEDED, ReleaseContext
from cloister.utils.errors import ConfigError

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "experiments")
    from published import Setting, published_client, published_example

DELTA = 1e-5
SETTINGS = [
    Setting(4.0, 100, 600, 1, 0.1, 640),
    Setting(3.0, 100, 600, 1, 0.1, 288),
    Setting(2.0, 100, 600, 1, 0.1, 54),
    Setting(4.0, 100, 600, 1, 0.05, 1740),
    Setting(1.85, 100, 600, 1, 0.005, 15000),
]
OF_AN_EXAMPLE = [("9.2e-06", "9e-06"), ("8.9e-07", "9e-07"), ("1.2e-11", "1e-11"), ("2.7e-08", "3e-08")]
"""δ at ε = 1.31, and how it is printed; of the last setting another figure is printed, which these formulas miss."""
OF_A_CLIENT = [
    ("1.04e-03", "1e-03"),
    ("9.7e-04", "1e-03"),
    ("4.2e-04", "1e-03"),
    ("9.7e-06", "1e-05"),
    ("8.9e-06", "1e-05"),
]
"""δ at ε = 8, and the δ that is printed: the one that rounds were trained up to, rounded."""


def written(number, like):
    digits = len(like.split("e")[0].replace(".", "")) - 1
    return f"{number:.{digits}e}"


class TestPublished:
    @pytest.mark.parametrize(("setting", "found"), zip(SETTINGS, OF_AN_EXAMPLE, strict=False))
    def test_of_an_example(self, setting, found):
        delta = published_example(setting).delta(1.31, "published")
        assert tuple(written(delta, figure) for figure in found) == found

    @pytest.mark.parametrize(("setting", "found"), zip(SETTINGS, OF_A_CLIENT, strict=True))
    def test_of_a_client(self, setting, found):
        delta = published_client(setting).delta(8, "published")
        assert written(delta, found[0]) == found[0]
        assert delta <= 1.05 * float(found[1])

    def test_multipliers(self):
        # Printed, cut off and not rounded, for six local steps.
        assert math.floor(1e4 * recovered_multiplier(4.0, 6)) == 16329
        assert math.floor(1e4 * recovered_multiplier(1.85, 6)) == 7552
        assert recovered_multiplier(3.0, 0.25) == 6.0
        with pytest.raises(ConfigError, match=r"^local_steps must be > 0, got 0$"):
            recovered_multiplier(4.0, 0)

    def test_several_epochs_are_as_many_times_the_steps(self):
        twice = Setting(4.0, 100, 600, 2, 0.1, 5)
        assert twice.local_steps == 12
        example = Account().plus(Gaussian(4.0, Sampling("poisson", 0.1 * 100 / 600)), 60)
        client = Account().plus(Gaussian(4.0 / math.sqrt(12), Sampling("poisson", 0.1)), 5)
        assert published_example(twice).epsilon(DELTA) == example.epsilon(DELTA)
        assert published_client(twice).epsilon(DELTA) == client.epsilon(DELTA)


class TestClient:
    def test_the_multiplier_is_a_batch_size_smaller_than_the_published_one(self):
        assert recovered_multiplier(4.0, 6) / client_multiplier(4.0, 100, 6) == pytest.approx(100)

    def test_it_is_what_two_clients_worst_updates_are_apart(self):
        """k steps on sums that one client moves by b·S each: the likelihood ratio of what is released, as it is."""
        sigma, batch, steps, clip, runs = 40.0, 10, 6, 0.7, 4000
        rng = np.random.default_rng(1)
        noise = rng.standard_normal((runs, steps)) * sigma * clip
        # log p(x | gradients count) - log p(x | they do not), at x drawn without them.
        losses = ((noise**2 - (noise - batch * clip) ** 2) / (2 * (sigma * clip) ** 2)).sum(axis=1)
        mu = 1 / client_multiplier(sigma, batch, steps)
        # N(-μ²/2, μ²); four standard errors.
        assert losses.mean() == pytest.approx(-(mu**2) / 2, abs=4 * mu / math.sqrt(runs))
        assert losses.std() == pytest.approx(mu, rel=4 / math.sqrt(2 * runs))

    def test_shuffled_batches_are_of_the_configured_size(self):
        steps = LocalSteps(600, 100, 1, "shuffle")
        epsilon, multiplier = sound_client(steps, 4.0, 64, DELTA)
        assert multiplier == client_multiplier(4.0, 100, 6)
        assert epsilon == pytest.approx(Account([Gaussian(multiplier / 8)]).epsilon(DELTA, "pld"))

    def test_poisson_batches_are_counted_with_a_size_that_they_pass_with_less_than_half_of_delta(self):
        steps = LocalSteps(600, 100, 1)
        _, multiplier = sound_client(steps, 4.0, 64, DELTA)
        size = round(4.0 / (multiplier * math.sqrt(6)))
        tail = [64 * 6 * stats.binom.sf(b, 600, 1 / 6) for b in (size - 1, size)]
        assert tail[1] <= DELTA / 2 < tail[0]

    @pytest.mark.parametrize(("examples", "batch"), [(600, 100), (60, 30), (5000, 20)])
    @pytest.mark.parametrize("rounds", [1, 64])
    @pytest.mark.parametrize("delta", [1e-2, 1e-5])
    def test_a_batch_that_is_too_large_and_noise_that_is_too_little_share_delta(self, examples, batch, rounds, delta):
        """P(some batch is larger than is counted on) plus the exact δ of the Gaussians, both recomputed."""
        sigma = 20.0 * batch  # so that ε is small, and δ not lost in rounding
        steps = LocalSteps(examples, batch, 1)
        epsilon, multiplier = sound_client(steps, sigma, rounds, delta)
        counted_on = round(sigma / multiplier / math.sqrt(steps.count))
        too_large = rounds * steps.count * stats.binom.sf(counted_on, examples, batch / examples)
        too_little = oracles.gaussian_delta(epsilon, multiplier / math.sqrt(rounds))
        assert 0.5 * delta < too_large + too_little <= delta * (1 + 1e-9)

    def test_without_rounds_nothing_is_spent(self):
        assert sound_client(LocalSteps(600, 100, 1), 4.0, 0, DELTA)[0] == 0
        assert sound_client(LocalSteps(8, 8, 2), 4.0, 0, DELTA) == (0.0, client_multiplier(4.0, 8, 2))

    def test_a_batch_whose_size_is_certain_leaves_all_of_delta_to_the_noise(self):
        def check(steps, batch):
            multiplier = client_multiplier(900.0, batch, 2)
            rounds = Account([Gaussian(multiplier)] * 9)
            assert sound_client(steps, 900.0, 9, DELTA) == (rounds.epsilon(DELTA, "pld"), multiplier)

        cases = [
            (LocalSteps(60, 100, 2), 60),
            (LocalSteps(100, 100, 2), 100),
            (LocalSteps(60, 100, 2, "shuffle"), 60),
            (LocalSteps(250, 100, 1, "shuffle"), 100),
        ]
        assert failures(cases, check) == []

    def test_before_any_round_a_poisson_batch_is_bounded_as_in_one_step(self):
        _, multiplier = sound_client(LocalSteps(600, 100, 1), 4.0, 0, DELTA)
        largest = int(stats.binom.isf(DELTA / 2, 600, 1 / 6))
        assert multiplier == client_multiplier(4.0, largest, 6)

    def test_noise_below_the_least_that_is_accounted_for_is_worth_nothing(self):
        steps = LocalSteps(1, 1, 1)
        assert math.isfinite(sound_client(steps, MIN_MULTIPLIER, 1, DELTA)[0])
        less = math.nextafter(MIN_MULTIPLIER, 0)
        assert sound_client(steps, less, 1, DELTA) == (math.inf, less)

    def test_a_batch_and_steps_there_must_be(self):
        def check(wrong, name):
            with pytest.raises(ConfigError, match=rf"^{name} must be > 0, got 0$"):
                client_multiplier(4.0, *wrong)
            assert client_multiplier(4.0, 1, 1) == 4.0

        assert failures([((0, 6), "batch"), ((100, 0), "local_steps")], check) == []

    def test_far_more_is_spent_than_was_published(self):
        # ε = 8 is claimed for 640 rounds; a client that took part in its 64 of them is at hundreds of thousands.
        assert sound_client(LocalSteps(600, 100, 1), 4.0, 64, 1e-3)[0] > 1e5


class TestWhoStandsForAll:
    def sizes(self, *units):
        return [LocalSteps(size, 64, 1) for size in units]

    def test_the_smallest_the_middle_the_largest_and_the_costliest(self):
        def check(units, standing):
            found = standing_for_all(self.sizes(*units), LocalDpSgd(1.0, 1.0), 3, DELTA)
            assert found == tuple(self.sizes(*standing))

        cases = [
            ((500, 40, 9, 65, 300, 128, 200, 9), (9, 65, 128, 500)),
            ((200, 128, 65, 9), (9, 65, 128, 200)),
            ((65, 64), (64, 65)),
            ((9,), (9,)),
        ]
        assert failures(cases, check) == []

    def test_the_costliest_has_one_more_step_than_its_examples_fill(self):
        sizes = self.sizes(9, 40, 65, 128, 200)
        assert costliest_of(sizes, LocalDpSgd(1.0, 1.0), 3, DELTA) == LocalSteps(65, 64, 1)


LARGE, SMALL = LocalSteps(640, 100, 2), LocalSteps(50, 100, 2)


class TestStatement:
    def of(self, rounds=64, delta=DELTA, noise_multiplier=4.0, batch_sampling="poisson", noise_seed=-1):
        mechanism = LocalDpSgd(noise_multiplier, 1.0, sampling=batch_sampling)
        steps = LocalSteps(600, 100, 1, batch_sampling)
        facts = record_clients(dp_sgd_claim(mechanism, [steps], rounds, delta, ReleaseContext(noise_seed != -1)))
        (size,) = facts["by-examples"]
        return facts | size

    def test_each_figure_says_whom_it_is_against_for_how_many_releases_and_how_it_was_computed(self):
        mechanism, steps = LocalDpSgd(4.0, 1.0), LocalSteps(600, 100, 1, "poisson")
        (size,) = dp_sgd_claim(mechanism, [steps], 64, DELTA, ReleaseContext()).sizes
        (_, client), (published,) = size.figures, size.heuristic
        assert client.adversary == EVERYBODY and client.releases == published.releases == 64
        assert published.formula == "σ/√k" and published.accountant == "published"
        rounds = Account().plus(Gaussian(published.noise_multiplier), 64)
        assert published.epsilon == rounds.epsilon(DELTA, "published") != rounds.epsilon(DELTA)

    def test_everything_that_is_said_of_a_size(self):
        def check(steps, group_cap, circumstances, sampling, batch):
            mechanism = LocalDpSgd(4.0, 1.0, sampling=steps.sampling, group_cap=group_cap)
            choices = 3 * 0.25 if circumstances.chooses_privately else 0.0
            account = Account().plus(steps.event(4.0), 3)
            if choices:
                account = account.plus(Pure(0.25), 3)
            found = {name: account.epsilon(1e-6, name) for name in ("rdp", "pld")}
            rest = 1e-6 if batch else 1e-6 / 2
            batch = batch or int(stats.binom.isf(1e-6 / 2 / (3 * steps.count), steps.examples, steps.rate))
            multiplier = client_multiplier(4.0, batch, steps.count)
            unit = Figure(
                mechanism.unit,
                "add-or-remove",
                UNITS_ARE_NEIGHBOURS[mechanism.unit].format(mechanism.unit),
                EVERYBODY,
                epsilon=min(found.values()),
                delta=1e-6,
                accountant="pld",
                by_accountant=found,
                noise_multiplier=4.0,
                steps=3 * steps.count,
                sampling=sampling,
            )
            client = Figure(
                "client",
                "add-or-remove",
                CLIENTS_ARE_NEIGHBOURS,
                EVERYBODY,
                epsilon=Account([Gaussian(multiplier)] * 3).epsilon(rest, "pld") + choices * steps.examples,
                delta=1e-6,
                accountant="pld",
                noise_multiplier=multiplier,
                releases=3,
            )
            recovered = recovered_multiplier(4.0, 2 * steps.examples / 100)
            published = Figure(
                "client",
                status="heuristic",
                reasons=PUBLISHED_CLIENT_REASONS,
                formula="σ/√k",
                epsilon=Account([Gaussian(recovered)] * 3).epsilon(1e-6, "published"),
                delta=1e-6,
                accountant="published",
                noise_multiplier=recovered,
                releases=3,
            )
            claim = dp_sgd_claim(mechanism, [steps], 3, 1e-6, circumstances)
            assert claim == DpSgdClaim(
                "dp-sgd",
                premises=(BUNDLE, CRYPTOGRAPHY, KERNELS, TIME, *CARRIED),
                unit=mechanism.unit,
                parameters=mechanism.parameters(),
                unprotected=(UNPROTECTED,),
                sizes=(OfSize(steps.examples, 3, (unit, client), (published,)),),
            )

        cases = [
            (LocalSteps(640, 100, 2), 0, ReleaseContext(), "poisson, 0.1562", None),
            (LocalSteps(50, 100, 2), 3, ReleaseContext(), "poisson, 1", 50),
            (LocalSteps(640, 100, 2, "shuffle"), 0, ReleaseContext(), "shuffle, no amplification claimed", 100),
            (LocalSteps(50, 100, 2), 3, ReleaseContext(False, 2, True, 0.25), "poisson, 1", 50),
            (LocalSteps(50, 100, 2), 0, ReleaseContext(False, 1, True, 0.25), "poisson, 1", 50),
        ]
        assert failures(cases, check) == []

    def test_each_size_has_its_own_figures_and_every_reason_is_said(self):
        sizes = [LocalSteps(8, 8, 1), LocalSteps(16, 8, 1)]
        seeded = dp_sgd_claim(LocalDpSgd(4.0, 1.0), sizes, 2, DELTA, ReleaseContext(True))
        assert (seeded.reasons, seeded.seeded) == ((SEEDED,), True)
        assert [(size.size, size.figures, len(size.heuristic)) for size in seeded.sizes] == [(8, (), 1), (16, (), 1)]
        silent = dp_sgd_claim(LocalDpSgd(0.0, 1.0), sizes, 2, DELTA, ReleaseContext(True))
        assert silent.reasons == (no_noise("dp-sgd"), SEEDED) and silent.sizes == (OfSize(8, 2), OfSize(16, 2))
        sound = dp_sgd_claim(LocalDpSgd(4.0, 1.0), sizes, 2, DELTA, ReleaseContext())
        alone = [dp_sgd_claim(LocalDpSgd(4.0, 1.0), [steps], 2, DELTA, ReleaseContext()).sizes for steps in sizes]
        assert sound.sizes == alone[0] + alone[1] and not sound.seeded
        assert replace(sound, sizes=()) == DpSgdClaim(
            "dp-sgd",
            premises=sound.premises,
            unit="example",
            parameters=LocalDpSgd(4.0, 1.0).parameters(),
            unprotected=(UNPROTECTED,),
        )

    def of_shared(self, shared, group_cap=0, circumstances=None):
        """The figure of one unit of the client with 640 units, and σ = 4 in 3 rounds."""
        mechanism = LocalDpSgd(4.0, 1.0, group_cap=group_cap)
        claim = dp_sgd_claim(mechanism, [LARGE], 3, DELTA, circumstances or ReleaseContext(), shared)
        return claim.sizes[0].figures[0]

    def test_what_several_clients_hold_of_one_unit_is_counted_together(self):
        """A patient of three hospitals loses what each of them releases."""
        found = self.of_shared([(SMALL, SMALL, LARGE)], group_cap=3)
        account = Account().plus(SMALL.event(4.0), 6).plus(LARGE.event(4.0), 3)
        assert found.by_accountant == {name: account.epsilon(DELTA, name) for name in ("rdp", "pld")}
        assert found.holders == 3 and found.steps == 3 * (2 * SMALL.count + LARGE.count)
        assert found.sampling == "poisson, 1, 0.1562" and "all clients that hold data of it" in found.neighbours

    def test_a_private_choice_of_each_of_them_counts(self):
        choosing = ReleaseContext(False, 2, True, 0.25)
        account = Account().plus(LARGE.event(4.0), 6).plus(Pure(0.25), 6)
        assert self.of_shared([(LARGE, LARGE)], circumstances=choosing).by_accountant["rdp"] == account.epsilon(DELTA)

    def test_of_several_combinations_of_clients_the_costliest_counts(self):
        pairs = [(SMALL, LARGE), (LARGE, LARGE), (SMALL, SMALL, SMALL)]
        found = self.of_shared(pairs)
        costs = [sound_unit(holders, 4.0, 3).epsilon(DELTA) for holders in pairs[:2]]
        assert found.by_accountant["rdp"] == max(costs) and found.holders == 3

    def test_a_client_that_shares_no_unit_is_counted_by_itself(self):
        def check(shared, holders):
            found = self.of_shared(shared)
            assert found.by_accountant["rdp"] == Account().plus(LARGE.event(4.0), 3).epsilon(DELTA)
            assert found.holders == holders and found.neighbours == UNITS_ARE_NEIGHBOURS["example"].format("example")

        assert failures([((), 1), (None, None), ([(SMALL, SMALL)], 2)], check) == []

    def test_the_client_with_the_costliest_shared_unit_stands_for_all(self):
        sizes = [LocalSteps(units, 100, 1) for units in (300, 400, 500, 600, 700)]
        shared = [(sizes[1], sizes[1])]
        assert sizes[1] not in standing_for_all(sizes, LocalDpSgd(4.0, 1.0), 3, DELTA)
        assert sizes[1] in standing_for_all(sizes, LocalDpSgd(4.0, 1.0), 3, DELTA, shared)

    def test_the_claim_for_an_example_is_that_of_its_steps(self):
        facts = self.of()
        claim = facts["claims"][0]
        independent = Account().plus(Gaussian(4.0, Sampling("bounded-poisson", 1 / 6)), 6 * 64)
        assert facts["status"] == "conditional" and claim["unit"] == "example" and claim["steps"] == 384
        assert claim["by-accountant"] == {name: independent.epsilon(DELTA, name) for name in ("rdp", "pld")}
        assert claim["epsilon"] == min(claim["by-accountant"].values()) == pytest.approx(3.594, abs=1e-3)
        assert "the server" in claim["adversary"]

    def test_shuffled_batches_cost_more_and_claim_no_amplification(self):
        shuffled = self.of(batch_sampling="shuffle")["claims"][0]
        assert shuffled["epsilon"] == pytest.approx(Account([Gaussian(4.0 / 8)]).epsilon(DELTA, "pld"))
        assert "no amplification" in shuffled["sampling"]
        assert shuffled["epsilon"] > 2.5 * self.of()["claims"][0]["epsilon"]

    def test_the_published_figure_is_no_claim(self):
        facts = self.of()
        (published,) = facts["heuristic"]
        assert published["status"] == "heuristic" and published["reasons"] and published["delta"] == DELTA
        assert published["epsilon"] < 1e-3 * facts["claims"][1]["epsilon"]
        assert {claim["unit"] for claim in facts["claims"]} == {"example", "client"}

    def test_more_rounds_cost_more(self):
        epsilons = [self.of(rounds)["claims"][0]["epsilon"] for rounds in (0, 1, 10)]
        assert epsilons[0] == 0 and epsilons == sorted(epsilons) and epsilons[1] > 0

    def test_without_secret_noise_nothing_is_claimed(self):
        def check(broken):
            facts = self.of(**broken)
            assert facts["status"] == "heuristic" and facts["reasons"] and facts["claims"] == []

        assert failures([{"noise_multiplier": 0.0}, {"noise_seed": 1}], check) == []

    def test_is_json(self):
        import json

        assert json.loads(json.dumps(self.of(rounds=1))) == self.of(rounds=1)


def test_an_example_of_a_client_that_is_always_drawn_pays_for_all_rounds():
    steps = LocalSteps(600, 100, 1)
    assert sound_unit([steps], 4.0, 640).epsilon(DELTA) > 3 * sound_unit([steps], 4.0, 64).epsilon(DELTA)
