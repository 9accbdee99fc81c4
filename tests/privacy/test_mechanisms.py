"""Every registered mechanism is what it says, and a broken twin of each is found out."""

import dataclasses
import math

import numpy as np
import pytest

from cloister.audits.conformance import check_mechanism
from cloister.core.arrays import Layout
from cloister.core.capabilities import MEAN, MEDIAN, OPTIMIZER, SELECTION, trimmed_mean
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.events import UNSAMPLED, Gaussian, Sampling, Unaccounted
from cloister.privacy.mechanisms import MECHANISMS
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.gaussian import GaussianMean
from cloister.privacy.mechanisms.mechanism import Mechanism, Released

LAYOUT = Layout.of({"kernel": np.zeros(3)})
SOUND = {
    "global-dp": {"noise_multiplier": 1.0, "clipping_norm": 2.0},
    "metric": {"noise_multiplier": 4.0, "clipping_norm": 1.0, "release": "private", "distance_multiplier": 2.0},
}
"""Options of every built-in mechanism with which it has a guarantee."""
CASES = [
    *((name, options, MEAN) for name, options in SOUND.items()),
    ("global-dp", SOUND["global-dp"] | {"placement": "rule"}, MEDIAN),
    ("global-dp", SOUND["global-dp"] | {"placement": "rule"}, trimmed_mean(0.25)),
    ("global-dp", SOUND["global-dp"] | {"clipping_norm": AdaptiveClip(1.0)}, MEAN),
    ("global-dp", SOUND["global-dp"] | {"examples_cap": 0.5}, OPTIMIZER),
]


def made(name="global-dp", **options):
    return MECHANISMS.load(name)(**SOUND[name] | options)


def test_every_built_in_mechanism_is_under_test():
    assert set(MECHANISMS.names()) >= set(SOUND)
    assert {name for name, *_ in CASES} == set(SOUND)


@pytest.mark.parametrize(("name", "options", "capabilities"), CASES)
def test_it_is_what_it_says(name, options, capabilities):
    check_mechanism(MECHANISMS.load(name)(**options), capabilities=capabilities, runs=600)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin(GaussianMean):
    """What a right mechanism makes, changed on the way out."""

    def release(self, contributions):
        return dataclasses.replace(super().release(contributions), **self.changed(contributions))

    def changed(self, contributions):
        return {}


class HalfTheNoise(Twin):
    def release(self, contributions):
        less = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 3)
        return GaussianMean.release(less, contributions)


class NoClip(Twin):
    def release(self, contributions):
        wide = dataclasses.replace(self.clip, bound=4 * self.clip.bound)
        return GaussianMean.release(
            dataclasses.replace(self, clip=wide, noise_multiplier=self.multiplier / 4), contributions
        )


class NothingWhenEmpty(Twin):
    def changed(self, contributions):
        return {} if len(contributions.cohort) else {"models": ()}


class OneParameterBare(Twin):
    def release(self, contributions):
        released = super().release(contributions)
        (kernel, _), (_, sent) = released.models[0], contributions.cohort.sent
        return dataclasses.replace(released, models=((kernel, sent),))


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

    def events(self, layout, sampling):
        return (Gaussian(1.0),)

    def release(self, contributions):
        return Released((contributions.cohort.sent,), 0.0, 0.0)

    def parameters(self):
        return {"noise": 1.0}


BROKEN = {
    HalfTheNoise: "an attack shows",
    NoClip: "an attack shows",
    NothingWhenEmpty: "shown 0 models",
    OneParameterBare: "without noise",
    Free: "without events",
    Undescribed: "must be named",
    Unpriced: "knows no ε",
    UnknownEvent: "no accountant has a price|price",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_twin_is_found_out(kind):
    right = made()
    with pytest.raises(PrivacyError, match=BROKEN[kind]):
        check_mechanism(kind(noise_multiplier=1.0, clip=right.clip), runs=600)


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
    with pytest.raises(ConfigError, match=r"passed whatever privacy\.noise-multiplier is.* 200 %"):
        made(noise_multiplier="auto").calibrated(lambda mechanism: 2.0, 1.0, "privacy.max-epsilon = 1")


def test_a_mechanism_without_a_knob_cannot_be_calibrated():
    with pytest.raises(ConfigError, match="'thawed' has no noise that could be calibrated to a budget"):
        Thawed().calibrated(lambda mechanism: 0.0, 1.0, "a budget")


# --- what a strategy must be able to do ---


@pytest.mark.parametrize("capabilities", [SELECTION, MEDIAN, None])
def test_a_mean_refuses_what_means_nothing_on_one_reply(capabilities):
    with pytest.raises(ConfigError, match=r"use privacy\.placement = .*'model' \(heuristic\)"):
        made().suited_to(capabilities, "X")


@pytest.mark.parametrize("capabilities", [SELECTION, MEAN, None])
def test_a_rule_refuses_what_is_no_rank(capabilities):
    with pytest.raises(ConfigError, match="X is none"):
        made(placement="rule").suited_to(capabilities, "X")


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
