"""Every registered mechanism is what it says, and a broken twin of each is found out."""

import dataclasses
import math
from itertools import count

import numpy as np
import pytest
from support import failures

from cloister.audits import testing
from cloister.audits.testing import check_mechanism
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.premises import CRYPTOGRAPHY
from cloister.privacy.mechanisms import MECHANISMS
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.gaussian import GaussianMean
from cloister.privacy.mechanisms.mechanism import Mechanism, Released
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import StreamingAggregator
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.registry import MEAN, MEDIAN, OPTIMIZER, SELECTION

LAYOUT = Layout.of({"kernel": np.zeros(3)})
SOUND = {
    "global-dp": {"noise_multiplier": 1.0, "clipping_norm": 2.0},
    "metric": {"noise_multiplier": 4.0, "clipping_norm": 1.0, "release": "private", "distance_multiplier": 2.0},
}
"""Options of every built-in mechanism with which it has a guarantee."""
CASES = [
    *((name, options, MEAN) for name, options in SOUND.items()),
    ("global-dp", SOUND["global-dp"] | {"placement": "rule"}, MEDIAN),
    ("global-dp", SOUND["global-dp"] | {"clipping_norm": AdaptiveClip(1.0)}, MEAN),
    ("global-dp", SOUND["global-dp"] | {"examples_cap": 0.5}, OPTIMIZER),
]


@pytest.fixture(autouse=True)
def the_same_noise_in_every_test_run(monkeypatch):
    """Every release of the check asks for noise of its own; here these are the streams of 0, 1, 2 and so on."""

    def begin():
        seeds = count()
        monkeypatch.setattr(testing, "GaussianNoise", lambda: GaussianNoise(next(seeds)))

    begin()
    return begin


def made(name="global-dp", **options):
    return MECHANISMS.load(name)(**SOUND[name] | options)


def test_every_built_in_mechanism_is_under_test():
    assert set(MECHANISMS._builtin) == set(SOUND)
    assert {name for name, *_ in CASES} == set(SOUND)


FURTHER_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:]]


@pytest.mark.parametrize(("name", "options", "capabilities"), [CASES[0], *FURTHER_CASES])
def test_it_is_what_it_says(name, options, capabilities):
    check_mechanism(MECHANISMS.load(name)(**options), capabilities=capabilities, runs=200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin(GaussianMean):
    """A right mechanism for all replies together whose result is changed on the way out."""

    def intake(self, layout, sent, most):
        return None

    def release(self, contributions):
        return dataclasses.replace(super().release(contributions), **self.changed(contributions))

    def changed(self, contributions):
        return {}


class AThirdOfTheNoise(Twin):
    def release(self, contributions):
        less = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 3)
        return dataclasses.replace(GaussianMean.release(less, contributions), following=None)


class NoClip(Twin):
    def release(self, contributions):
        wide = dataclasses.replace(self.clip, bound=4 * self.clip.bound)
        calm = dataclasses.replace(self, clip=wide, noise_multiplier=self.multiplier / 4)
        return dataclasses.replace(GaussianMean.release(calm, contributions), following=None)


class Repeating(StreamingAggregator):
    def take(self, cohort, examples):
        for _ in range(4):
            super().take(cohort, examples)


class AddsRepeatedly(Twin):
    """Replies that come a few at a time."""

    def intake(self, layout, sent, most):
        return Repeating(**vars(GaussianMean.intake(self, layout, sent, most)))


class NothingWhenEmpty(Twin):
    def changed(self, contributions):
        return {} if len(contributions.cohort) else {"models": ()}


class OneParameterBare(Twin):
    def release(self, contributions):
        released = super().release(contributions)
        (kernel, _), (_, sent) = released.models[0], contributions.cohort.sent
        return dataclasses.replace(released, models=((kernel, sent),))


class ABareBias(Twin):
    """The clip sees everything, and what the bias says leaves beside the noise as well."""

    def changed(self, contributions):
        leak = sum((row[1] for row in contributions.cohort.rows), np.zeros(1))
        kernel, bias = GaussianMean.release(self, contributions).models[0]
        return {"models": ((kernel, bias + leak),)}


class FreeWeights(Twin):
    """Clients say how much they count."""

    def changed(self, contributions):
        (model,) = GaussianMean.release(self, contributions).models
        return {"models": (tuple(piece * (1 + sum(contributions.examples)) for piece in model),)}


class TellsTheNorm(Twin):
    def changed(self, contributions):
        return {"released_distance": float(contributions.cohort.norms.max(initial=0.0))}


class HandsTheNormOn(Twin):
    """The next clip follows the longest update, without noise."""

    def changed(self, contributions):
        longest = max(1e-3, float(contributions.cohort.norms.max(initial=0.0)))
        return {"following": dataclasses.replace(self, clip=dataclasses.replace(self.clip, bound=longest))}


class CheaperLater(Twin):
    def changed(self, contributions):
        return {"following": dataclasses.replace(self, noise_multiplier=self.multiplier / 100)}


class Skips(Twin):
    @property
    def skips_empty_rounds(self):
        return True


class CountsTheDrawTwice(Twin):
    def events(self, layout, sampling=UNSAMPLED):
        return (Gaussian(2.0, sampling), Gaussian(self.multiplier, sampling))


class Free(Twin):
    def events(self, layout, sampling=UNSAMPLED):
        return ()


class Undescribed(Twin):
    def parameters(self):
        return {}


class Unpriced(Twin):
    def events(self, layout, sampling=UNSAMPLED):
        return (Unaccounted("nothing"),)


class UnknownEvent(Twin):
    def events(self, layout, sampling=UNSAMPLED):
        return ("gaussian",)


class Thawed(Mechanism):
    name = "thawed"
    premises = (CRYPTOGRAPHY,)

    def events(self, layout, sampling):
        return (Gaussian(1.0),)

    def release(self, contributions):
        return Released((contributions.cohort.sent,), 0.0, 0.0)

    def parameters(self):
        return {"noise": 1.0}


BROKEN = {
    AThirdOfTheNoise: "an attack shows",
    NoClip: "an attack shows",
    AddsRepeatedly: "an attack shows",
    NothingWhenEmpty: "shown 0 models",
    OneParameterBare: "without noise",
    ABareBias: "an attack shows",
    FreeWeights: "an attack shows",
    TellsTheNorm: "an attack shows",
    HandsTheNormOn: "an attack shows",
    CheaperLater: "another price",
    Skips: "skips rounds without replies",
    CountsTheDrawTwice: "counts one draw for several",
    Free: "without events",
    Undescribed: "must be named",
    Unpriced: "knows no ε",
    UnknownEvent: "price",
}


def test_a_broken_twin_is_found_out(the_same_noise_in_every_test_run):
    def check(kind):
        the_same_noise_in_every_test_run()
        right = made()
        with pytest.raises(PrivacyError, match=BROKEN[kind]):
            made_of = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
            # So many show an ε of up to 1.9 of a whole leak, and 1.2 is claimed; a leak of three deviations takes 400.
            check_mechanism(
                made_of(noise_multiplier=1.0, clip=right.clip), runs=400 if kind is AThirdOfTheNoise else 200
            )

    assert failures(BROKEN, check) == []


def test_one_that_can_change_behind_its_claim_is_refused():
    with pytest.raises(PrivacyError, match="frozen dataclass"):
        check_mechanism(Thawed())


def test_one_that_claims_nothing_has_nothing_to_check():
    with pytest.raises(PrivacyError, match=r"claims nothing: .*there is no noise"):
        check_mechanism(made(noise_multiplier=0.0))


# --- calibration ---


def test_calibration_changes_nothing_but_what_it_returns():
    asked = made(noise_multiplier="auto")
    found = asked.calibrated(lambda mechanism: 1 / mechanism.multiplier**2, 0.25, "a budget")
    assert found.multiplier == pytest.approx(2.0, rel=2e-3) and found.multiplier >= 2.0
    assert asked.noise_multiplier == "auto" and not asked.is_calibrated and found.is_calibrated
    assert dataclasses.replace(found, noise_multiplier="auto") == asked


def test_one_that_is_not_calibrated_makes_no_claim_and_no_release():
    with pytest.raises(ConfigError, match="has not been calibrated"):
        made(noise_multiplier="auto").events(LAYOUT)


def test_a_budget_that_other_releases_pass_is_refused():
    with pytest.raises(ConfigError, match=r"passed for any privacy\.noise-multiplier.* 200 %"):
        made(noise_multiplier="auto").calibrated(lambda mechanism: 2.0, 1.0, "privacy.max-epsilon = 1")


def test_a_mechanism_without_a_knob_cannot_be_calibrated():
    with pytest.raises(ConfigError, match="'thawed' has no noise that could be calibrated to a budget"):
        Thawed().calibrated(lambda mechanism: 0.0, 1.0, "a budget")


# --- what a strategy must be able to do ---


def test_a_mean_refuses_what_means_nothing_on_one_reply():
    def check(capabilities):
        with pytest.raises(ConfigError, match=r"use privacy\.placement = .*'model' \(heuristic\)"):
            made().suited_to(capabilities, "X")

    assert failures([SELECTION, MEDIAN, None], check) == []


def test_a_rule_refuses_what_is_no_rank():
    def check(capabilities):
        with pytest.raises(ConfigError, match="X is none"):
            made(placement="rule").suited_to(capabilities, "X")

    assert failures([SELECTION, MEAN, None], check) == []


@pytest.mark.parametrize(("capabilities", "reason"), [(MEAN, "how many clients replied"), (None, "X is none")])
def test_noise_on_the_output_is_never_a_guarantee(capabilities, reason):
    (caveat,) = made(placement="model").suited_to(capabilities, "X").caveats()
    assert reason in caveat


def test_a_draw_is_counted_once_and_only_where_one_release_is_made_of_it():
    drawn = Sampling("poisson", probability=0.1)
    assert made().amplified and made().events(LAYOUT, drawn) == (Gaussian(1.0, drawn),)
    assert not made("metric").amplified
    distance, total = made("metric").events(LAYOUT)
    assert distance == Gaussian(2.0) and total.noise_multiplier == pytest.approx(4.0 / 2.0)


def test_more_noise_than_an_accountant_knows_is_counted_as_less():
    (event,) = made(noise_multiplier=1e9).events(LAYOUT)
    assert event == Gaussian(1e6) and math.isfinite(event.noise_multiplier)
