"""Pure releases: never below the truth, alone and beside Gaussian ones."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm
from support import failures
from test_accounting import ACCOUNTANTS, ROUNDING, SMALL, poisson

from cloister.privacy.accounting.account import FINE, Account
from cloister.privacy.accounting.accountants import pure_curve, pure_parameter
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.utils.errors import PrivacyError


def randomized_response(epsilon, count, at):
    """δ at an ε of `count` randomized responses, by adding up all outcomes: the worst of what is pure ε-DP."""
    truth = 1 / (1 + math.exp(-epsilon))
    found = 0.0
    for lies in range(count + 1):
        ways = math.comb(count, lies)
        p = truth ** (count - lies) * (1 - truth) ** lies
        q = truth**lies * (1 - truth) ** (count - lies)
        found += ways * max(0.0, p - math.exp(at) * q)
    return found


class TestPureReleases:
    def test_never_below_the_worst_there_is(self):
        def check(epsilon, count, share):
            at = share * epsilon * count
            truth, found = randomized_response(epsilon, count, at), Account().plus(Pure(epsilon), count)
            assert truth * (1 - ROUNDING) <= found.delta(at, "pld") <= truth + 1e-3
            for name in ("rdp", "published"):
                assert found.delta(at, name) >= truth * (1 - ROUNDING)

        cases = [
            (*one, other)
            for one, other in product([(0.1, 1), (0.1, 50), (1.0, 1), (1.0, 6), (4.0, 2)], [0.0, 0.3, 0.9])
        ]
        assert failures(cases, check) == []

    def test_of_its_rényi_curve(self):
        """The exact divergence of one randomized response, and no more than ε."""

        def check(epsilon):
            truth = 1 / (1 + math.exp(-epsilon))
            for order, found in zip(FINE, pure_curve(epsilon, FINE), strict=True):
                moment = np.logaddexp(
                    order * math.log(truth) + (1 - order) * math.log1p(-truth),
                    order * math.log1p(-truth) + (1 - order) * math.log(truth),
                )
                assert moment / (order - 1) * (1 - 1e-6) <= found <= epsilon

        assert failures([0.01, 0.5, 3.0, 20.0], check) == []

    def test_its_gaussian_lies_below_every_test_that_it_allows_and_touches_one(self):
        """G(α) ≤ max(1 - e^ε·α, e^-ε·(1 - α), 0) everywhere, with equality where α = β."""

        def check(epsilon):
            mu, kink = pure_parameter(epsilon), 1 / (1 + math.exp(epsilon))
            grid = np.concatenate([np.geomspace(1e-30, 1 - 1e-12, 4001), [kink]])
            gaussian = norm.cdf(norm.isf(grid) - mu)
            lines = np.maximum(1 - math.exp(epsilon) * grid, math.exp(-epsilon) * (1 - grid))
            assert (gaussian <= lines * (1 + 1e-9) + 1e-15).all()
            assert gaussian[-1] == pytest.approx(kink, rel=1e-6)
            smaller = norm.cdf(norm.isf(kink) - 0.99 * mu)
            assert smaller > kink, "no smaller μ would do"

        assert failures([1e-3, 0.3, 2.0, 9.0, 30.0], check) == []

    def test_a_huge_and_a_tiny_one_have_a_price(self):
        assert pure_parameter(2.4e6) == pytest.approx(2 * math.sqrt(2 * 2.4e6), rel=1e-3)
        assert 0 < pure_parameter(1e-9) == pure_parameter(1e-6) == pytest.approx(1e-6 * math.sqrt(math.pi / 2))
        huge = Account([Pure(1000.0)])
        assert not huge.has_pld and 1000 <= huge.epsilon(SMALL, "rdp") < 1001
        with pytest.raises(PrivacyError, match="pure ε above 500"):
            huge.epsilon(SMALL, "pld")

    def test_replacing_a_unit_is_removing_one_and_adding_another(self):
        def check(name):
            found, doubled = Account([Pure(0.4)] * 3, "replace-one"), Account([Pure(0.8)] * 3)
            assert (
                found.epsilon(SMALL, name)
                == doubled.epsilon(SMALL, name)
                > Account([Pure(0.4)] * 3).epsilon(SMALL, name)
            )

        assert failures(ACCOUNTANTS, check) == []

    def test_beside_gaussians_of_every_kind(self):
        events = [Pure(0.5), Gaussian(3.0), Pure(0.5), Gaussian(2.0, poisson(0.1)), Pure(0.2)]
        found, alone = Account(events), Account([event for event in events if isinstance(event, Gaussian)])
        for name in ACCOUNTANTS:
            assert alone.epsilon(SMALL, name) < found.epsilon(SMALL, name)
            assert found.epsilon(SMALL, name) <= alone.epsilon(SMALL, name) + 1.2 + 1e-3

    def test_an_epsilon_out_of_range_is_refused(self):
        def check(epsilon):
            refused = r"^the ε of a pure release must be (a number$|finite and above 0, got )"
            with pytest.raises(PrivacyError, match=refused):
                Pure(epsilon)

        assert failures([0.0, -1.0, math.inf, math.nan, "1", True, None], check) == []
