"""Events as objects, and what is said of those that are none."""

import math
from functools import partial

import pytest
from support import failures

from cloister.privacy.accounting.events import (
    MAX_PURE_EPSILON,
    DistributedGaussian,
    Gaussian,
    Laplace,
    Pure,
    Repeated,
    Unaccounted,
    from_json,
    to_json,
)
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.utils.errors import PrivacyError


class TestEvents:
    JSON = (
        (UNSAMPLED, {"kind": "none", "probability": 1.0, "cohort": 0, "population": 0}),
        (Sampling("poisson", 0.5), {"kind": "poisson", "probability": 0.5, "cohort": 0, "population": 0}),
        (
            Sampling("without-replacement", cohort=2, population=3),
            {"kind": "without-replacement", "probability": 1.0, "cohort": 2, "population": 3},
        ),
    )

    @pytest.mark.parametrize(("sampling", "content"), JSON)
    def test_as_objects(self, sampling, content):
        gaussian = {"kind": "gaussian", "noise_multiplier": 2.0, "sampling": content}
        assert to_json(Gaussian(2.0, sampling)) == gaussian
        assert to_json(Repeated(Gaussian(2.0, sampling), 3)) == {"kind": "repeated", "event": gaussian, "count": 3}
        assert from_json(gaussian) == Gaussian(2.0, sampling)

    def test_others_as_objects(self):
        assert to_json(Pure(0.5)) == {"kind": "pure", "epsilon": 0.5}
        assert to_json(Laplace(0.5, 2.0)) == {"kind": "laplace", "epsilon": 0.5, "radius": 2.0}
        assert to_json(Unaccounted("why")) == {"kind": "unaccounted", "reason": "why"}
        assert from_json({"kind": "gaussian", "noise_multiplier": 2.0}) == Gaussian(2.0)

    def test_what_is_no_event_is_named(self):
        def check(content, says):
            with pytest.raises(PrivacyError) as refused:
                from_json(content)
            assert str(refused.value).startswith(says), "other packages may have kinds of their own"

        cases = [
            (5, "an event must be a JSON object"),
            ({}, "unknown event kind None; known: gaussian, repeated, pure, unaccounted, laplace"),
            (
                {"kind": ["pure"]},
                "unknown event kind ['pure']; known: gaussian, repeated, pure, unaccounted, laplace",
            ),
        ]
        assert failures(cases, check) == []

    def test_what_is_out_of_range_is_named(self):
        cases = [
            (
                partial(Sampling, "shuffled"),
                "unknown kind of sampling 'shuffled'; known: none, poisson, bounded-poisson, without-replacement",
            ),
            (
                partial(Sampling, "poisson", 0.0),
                "a Poisson sampling probability must be above 0 and at most 1, got 0.0",
            ),
            (
                partial(Sampling, "poisson", 1.01),
                "a Poisson sampling probability must be above 0 and at most 1, got 1.01",
            ),
            (
                partial(Sampling, "without-replacement", cohort=3, population=2),
                "a cohort of 3 cannot be drawn from a population of 2",
            ),
            (
                partial(Sampling, "without-replacement", cohort=0, population=2),
                "a cohort of 0 cannot be drawn from a population of 2",
            ),
            (partial(Gaussian, "1"), "a noise multiplier must be a number"),
            (partial(Gaussian, True), "a noise multiplier must be a number"),
            (partial(Gaussian, 9e-7), "a noise multiplier must be 0 or between 1e-06 and 1e+06, got 9e-07"),
            (partial(Gaussian, 1.1e6), "a noise multiplier must be 0 or between 1e-06 and 1e+06, got 1100000.0"),
            (partial(Repeated, Pure(1.0), 2), "what is repeated must be a gaussian event"),
            (
                partial(Repeated, Gaussian(1.0), 0),
                "a count of releases must be a whole number from 1 to 1000000000, got 0",
            ),
            (
                partial(Repeated, Gaussian(1.0), 10**9 + 1),
                "a count of releases must be a whole number from 1 to 1000000000, got 1000000001",
            ),
            (partial(Pure, "1"), "the ε of a pure release must be a number"),
            (partial(Pure, True), "the ε of a pure release must be a number"),
            (partial(Pure, 0.0), "the ε of a pure release must be finite and above 0, got 0.0"),
            (partial(Pure, math.inf), "the ε of a pure release must be finite and above 0, got inf"),
            (partial(Pure, 1.1e100), "the ε of a pure release must be at most 1e+100"),
            *[
                (
                    partial(Laplace, *numbers),
                    "a Laplace release has a finite ε above 0 and a finite radius of at least 0",
                )
                for numbers in ((0.0, 1.0), (math.inf, 1.0), (1.0, -0.1), (1.0, math.inf), (math.nan, 1.0))
            ],
        ]

        def check(make, says):
            with pytest.raises(PrivacyError) as refused:
                make()
            assert str(refused.value) == says

        assert failures(cases, check) == []

    def test_the_ends_of_each_range(self):
        assert Gaussian(1e-6).noise_multiplier == 1e-6 and Gaussian(1e6).noise_multiplier == 1e6
        assert Gaussian(0.0).noise_multiplier == 0 and Gaussian(2).noise_multiplier == 2
        assert Repeated(Gaussian(1.0), 1).count == 1 and Repeated(Gaussian(1.0), 10**9).count == 10**9
        assert Sampling("poisson", 1.0).probability == 1 and Pure(5).epsilon == 5 and Pure(1e-9).epsilon == 1e-9
        assert Sampling("without-replacement", cohort=1, population=1).cohort == 1
        assert Pure(MAX_PURE_EPSILON).epsilon == 1e100
        assert Laplace(1e-9, 0.0).leakage == 0 and Laplace(0.5, 3.0).leakage == 1.5
        assert Sampling() == Sampling("none", 1.0, 0, 0) == UNSAMPLED == Gaussian(1.0).sampling
        assert Sampling("none", probability=5.0, cohort=9).probability == 5, "no claim is made about it"

    def test_in_words_and_what_it_costs_an_example(self):
        """Noise is rounded down and ε up; an example is protected by half of the noise, whoever was drawn."""

        def check(event, words, replaced):
            assert str(event) == words and event.replaced() == (replaced or event)

        cases = [
            (Gaussian(1.5), "gaussian, z = 1.5", Gaussian(0.75)),
            (Gaussian(0.7, Sampling("poisson", 0.1)), "gaussian, z = 0.7, poisson 0.1", Gaussian(0.35)),
            (
                Gaussian(2.0, Sampling("without-replacement", cohort=3, population=9)),
                "gaussian, z = 2, 3 of 9",
                Gaussian(1.0),
            ),
            (
                Repeated(Gaussian(1.2345678, Sampling("poisson", 0.0123456789)), 40),
                "40 times gaussian, z = 1.234, poisson 0.0123457",
                Repeated(Gaussian(0.6172839), 40),
            ),
            (Pure(1 / 3), "pure, ε = 0.3334", Pure(2 / 3)),
            (Unaccounted("the noise is seeded"), "no guarantee: the noise is seeded", None),
            (Laplace(0.5, 1 / 3), "laplace, ε = 0.5 per unit, leakage 0.1667 within 0.3333", None),
            (
                DistributedGaussian(12, 2.0**20, 2.0**18, 100, 7, 512.0),
                "distributed gaussian, 12 shares, z = 0.866",
                DistributedGaussian(12, 2.0**21, 2.0**18, 100, 7, 512.0),
            ),
        ]
        assert failures(cases, check) == []

    def test_what_has_no_bound_has_no_loss_distribution(self):
        for event in (Unaccounted("x"), Laplace(0.5, 1.0)):
            with pytest.raises(PrivacyError) as refused:
                event.losses("add-or-remove", 1e-3)
            assert str(refused.value) == "a release without a bound has no loss distribution"
