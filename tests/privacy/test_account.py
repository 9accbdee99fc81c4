"""An account: what it holds, what each accountant makes of that, and at its ends."""

import math

import numpy as np
import pytest
from support import failures
from test_accounting import ACCOUNTANTS, SMALL, account, cohorts, poisson

from cloister.privacy.accounting import account as accounting
from cloister.privacy.accounting import accountants
from cloister.privacy.accounting.account import (
    COARSE,
    FINE,
    LOSS_STEP,
    LOSS_STEPS,
    MAX_CURVES,
    MAX_PURE,
    Account,
    best_epsilon,
    by_accountant,
)
from cloister.privacy.accounting.accountants import pure_curve, pure_parameter, sampled_curve
from cloister.privacy.accounting.events import Gaussian, Pure, Unaccounted
from cloister.utils.errors import ConfigError, PrivacyError


class TestExactly:
    def test_which_accountant_is_the_tightest_that_is_quick(self):
        plain, drawn, pure = Account([Gaussian(3.0)]), Account([Gaussian(3.0, poisson(0.1))]), Account([Pure(0.1)])
        assert best_epsilon(plain, SMALL) == (plain.epsilon(SMALL, "pld"), "pld")
        assert best_epsilon(drawn, SMALL) == (drawn.epsilon(SMALL, "rdp"), "rdp")
        assert best_epsilon(pure, SMALL) == (pure.epsilon(SMALL, "rdp"), "rdp")

    def test_by_every_accountant_that_applies(self):
        plain = Account([Gaussian(3.0)])
        assert by_accountant(plain, SMALL) == {name: plain.epsilon(SMALL, name) for name in ("rdp", "pld")}
        drawn = account(3.0, cohorts(1, 100), relation="replace-one")
        assert by_accountant(drawn, SMALL) == {"rdp": drawn.epsilon(SMALL, "rdp")}

    def test_epsilon_and_delta_are_rényis_unless_asked(self):
        drawn = Account([Gaussian(3.0, poisson(0.1))])
        assert drawn.epsilon(SMALL) == drawn.epsilon(SMALL, "rdp") != drawn.epsilon(SMALL, "pld")
        assert drawn.delta(1.0) == drawn.delta(1.0, "rdp") != drawn.delta(1.0, "pld")

    def test_an_account_is_of_joining_or_leaving_and_of_outsiders_unless_asked(self):
        assert (Account().relation, Account().insiders) == ("add-or-remove", False)
        asked = Account([], "replace-one", True).plus(Gaussian(1.0))
        assert (asked.relation, asked.insiders) == ("replace-one", True)
        assert Account().plus(Gaussian(2.0)).mu_squared() == Account().plus(Gaussian(2.0), 1).mu_squared() == 0.25

    def test_the_divergence_of_everything_at_one_order(self):
        events = [Gaussian(2.0), Gaussian(2.0)]
        assert Account(events).renyi(6.0) == pytest.approx(6 * 2 / (2 * 4))
        assert Account(events, "replace-one").renyi(6.0) == pytest.approx(4 * 6 * 2 / (2 * 4))
        pure = float(pure_curve(0.5, (6.0,))[0])
        assert Account([Pure(0.5)] * 3).renyi(6.0) == pytest.approx(3 * pure)
        (drawn,) = sampled_curve(2.0, poisson(0.1), "add-or-remove", (6.0,))
        assert Account([Gaussian(2.0, poisson(0.1))] * 5).renyi(6.0) == pytest.approx(5 * drawn)
        together = Account([*events, Pure(0.5), Gaussian(2.0, poisson(0.1))])
        assert together.renyi(6.0) == pytest.approx(1.5 + pure + drawn)
        assert Account([Gaussian(2.0), Unaccounted("no noise")]).renyi(6.0) == math.inf
        assert Account().renyi(6.0) == 0

    def test_the_gaussian_of_everything(self):
        drawn, pure = Gaussian(2.0, poisson(0.1)), pure_parameter(0.5) ** 2
        assert Account([drawn] * 3).mu_squared() == pytest.approx(3 / 4)
        assert Account([Gaussian(2.0), drawn]).mu_squared() == pytest.approx(1 / 2)
        assert Account([Gaussian(2.0), drawn], "replace-one").mu_squared() == pytest.approx(2)
        assert Account([Pure(0.5)] * 2).mu_squared() == pytest.approx(2 * pure)
        assert Account([Gaussian(2.0), Pure(0.25)], "replace-one").mu_squared() == pytest.approx(1 + pure)
        assert Account([Gaussian(0.0)]).mu_squared() == math.inf and Account().mu_squared() == 0

    def test_what_is_empty_and_what_claims_nothing_from_a_draw(self):
        def check(events):
            assert Account().is_empty and Account().is_unsampled
            found = Account(events)
            assert not found.is_empty
            assert found.is_unsampled == (events[0] in (Gaussian(2.0), Gaussian(0.0)))

        assert failures([[Gaussian(2.0)], [Gaussian(2.0, poisson(0.1))], [Pure(0.5)], [Gaussian(0.0)]], check) == []

    def test_up_to_how_many_different_releases_there_are_loss_distributions(self, monkeypatch):
        monkeypatch.setattr(Account, "_loss_step", lambda _: LOSS_STEP)
        most = Account(Gaussian(1.0 + number, poisson(0.1)) for number in range(MAX_CURVES))
        assert most.has_pld and not most.plus(Pure(0.1)).has_pld
        assert not most.plus(Gaussian(99.0, poisson(0.1))).has_pld and most.plus(Gaussian(1.0, poisson(0.1))).has_pld
        assert Account([Pure(MAX_PURE)]).has_pld and not Account([Pure(MAX_PURE * 1.001)]).has_pld
        assert Account([Pure(MAX_PURE / 2)], "replace-one").has_pld
        assert not Account([Pure(MAX_PURE)], "replace-one").has_pld

    def test_up_to_how_many_each_has_its_own_curve(self, monkeypatch):
        """One more, and multipliers are rounded down to 1/128 of a doubling and orders are fewer."""
        monkeypatch.setattr(Account, "_divergences", lambda self, choice: np.array(choice))
        exact = [Gaussian(1.0 + number, poisson(0.1)) for number in range(MAX_CURVES)]
        assert Account(exact)._curve()[0].tolist() == list(FINE)
        more = Account([*exact, Gaussian(99.0, poisson(0.1))])
        assert more._curve()[0].tolist() == list(COARSE)
        assert set(Account(exact)._grouped()) == set(exact)
        for event in more._grouped():
            steps = 128 * math.log2(event.noise_multiplier)
            assert steps == pytest.approx(round(steps), abs=1e-9) and event.sampling == poisson(0.1)

    def test_releases_of_nearly_the_same_noise_are_counted_together(self):
        events = [Gaussian(2.0 + number * 1e-6, poisson(0.1)) for number in range(MAX_CURVES + 1)]
        grouped = Account([*events, events[0], Gaussian(2.0, poisson(0.2))])._grouped()
        assert grouped == {Gaussian(2.0, poisson(0.1)): MAX_CURVES + 2, Gaussian(2.0, poisson(0.2)): 1}

    def test_what_has_no_loss_distribution_says_why(self):
        with pytest.raises(PrivacyError) as refused:
            Account([Pure(501.0)]).epsilon(SMALL, "pld")
        assert str(refused.value) == (
            "pld covers neither draws without replacement, nor very many different sampled releases, nor a pure ε "
            "above 500, nor sampled releases with an ε above 7e+07"
        )

    @pytest.mark.parametrize("z", [3.0, 0.05])
    def test_the_steps_of_a_loss_distribution_reach_the_largest_loss(self, monkeypatch, z):
        asked = []

        class Losses:
            def composed_losses(self, *given):
                asked.append(given)
                return self

            def get_epsilon_for_delta(self, delta):
                return 7.0

            def rdp_epsilon(self, *given):
                return accountants.rdp_epsilon(*given)

            def sampled_curve(self, *given):
                return accountants.sampled_curve(*given)

        found = Account([Gaussian(z, poisson(0.1)), Gaussian(5.0), Gaussian(5.0)])
        largest = found.epsilon(1e-15, "rdp")
        monkeypatch.setattr(accounting, "accountants", Losses)
        assert found.epsilon(SMALL, "pld") == 7.0
        ((unsampled, others, relation, step),) = asked
        assert unsampled == pytest.approx(5 / math.sqrt(2)) and others == {Gaussian(z, poisson(0.1)): 1}
        assert relation == "add-or-remove" and step == pytest.approx(max(LOSS_STEP, largest / LOSS_STEPS))
        assert (step > LOSS_STEP) == (z < 1)

    def test_no_epsilon_is_negative_and_no_delta_above_one(self):
        weak, strong = Account([Gaussian(1e4)]), Account([Gaussian(1e-2)])
        for name in ACCOUNTANTS:
            assert weak.epsilon(0.5, name) >= 0 and strong.delta(0.0, name) <= 1
        assert weak.epsilon(0.5, "rdp") == 0

    def test_an_accountant_that_is_none(self):
        def check(name):
            for change in (account(1.0).epsilon, account(1.0).delta):
                with pytest.raises(ConfigError, match=r"^accountant must be one of pld, published, rdp; got "):
                    change(0.5, name)

        assert failures(["zcdp", None], check) == []

    def test_the_texts(self):
        with pytest.raises(PrivacyError) as refused:
            Account().plus("nothing")
        assert str(refused.value) == "no accountant has a price for an event of type str"
        for delta in (0.0, 1.0):
            with pytest.raises(ConfigError) as refused:
                account(1.0).epsilon(delta)
            assert str(refused.value) == f"delta must be above 0 and below 1, got {delta}"

    def test_a_share_of_one_is_no_draw(self):
        def check(sampling):
            found = account(3.0, sampling, relation="replace-one")
            assert found.is_unsampled and found.mu_squared() == pytest.approx(4 / 9)

        assert failures([poisson(1.0), cohorts(8, 8)], check) == []
