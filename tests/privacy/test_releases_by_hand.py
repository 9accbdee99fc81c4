"""Results of the Gaussian mechanisms: bound, noise and public figures of a round, and each refusal in full."""

import dataclasses

import numpy as np
import pytest
from support import failures
from test_mechanisms import Thawed
from test_noise_scale import BOUNDED, RAW, given

from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.gaussian import global_dp
from cloister.privacy.mechanisms.mechanism import Diagnostics
from cloister.privacy.mechanisms.metric import Constant, Scaling
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import bounded_models, noisy_mean, noisy_trimmed_mean
from cloister.utils.errors import ConfigError
from cloister.utils.registry import MEAN, MEDIAN, SELECTION


@dataclasses.dataclass(frozen=True)
class Halved(Constant):
    """Half of the noise, which is private: it could have been three times as much."""

    def widest(self, bound, layout):
        assert (bound, layout) == (1.5, RAW.layout)
        return 3.0

    def of(self, contributions, bounded):
        assert contributions.cohort is RAW and bounded.l2_bound == 1.5
        return Scaling(0.5, 0.25, Diagnostics(distance=7.0, clip_calibration=8.0))


def halved(placement, **options):
    options = {"noise_multiplier": 4.0, "clipping_norm": 1.5, "scale": Halved()} | options
    return global_dp(placement=placement, **options).suited_to(MEDIAN if placement == "rule" else MEAN, "X")


def contributions(examples=(1.0, 2.0, 9.0)):
    return dataclasses.replace(given(noise=GaussianNoise(5)), examples=examples, asked=6, expected=4.5)


def test_a_release_by_hand():
    """On the grid of the widest noise, from the source of the round, over the public number of clients."""

    def check(placement):
        found, noise = halved(placement).release(contributions()), GaussianNoise(5)
        if placement == "model":
            models, std, sensitivity = bounded_models(BOUNDED), 2.0 * 1.5 / 3, 1.5 / 3
        else:
            made = (
                noisy_mean(BOUNDED, 2.0, 4.5, noise, 12.0)
                if placement == "update"
                else noisy_trimmed_mean(BOUNDED, 2.0, 6, 2, noise, 12.0)
            )
            models, std, sensitivity = [made.model], made.noise_std, made.sensitivity
        assert len(found.models) == len(models)
        for one, other in zip(found.models, models, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
        assert dataclasses.replace(found, models=()) == dataclasses.replace(
            found,
            models=(),
            noise_std=std,
            sensitivity=sensitivity,
            noise_multiplier=2.0,
            clipping_norm=1.5,
            released_distance=0.25,
            diagnostics=Diagnostics(clipped_fraction=1.0, clip_calibration=8.0, distance=7.0),
            following=halved(placement),
            widest_std=12.0 * sensitivity if placement == "model" else 0.0,
        )

    assert failures(["update", "rule", "model"], check) == []


def test_a_clip_follows_the_updates_as_they_arrived():
    adaptive = AdaptiveClip(1.5, quantile=0.3, bits_multiplier=0.01)
    found = global_dp(noise_multiplier=2.0, clipping_norm=adaptive).release(contributions())
    source = GaussianNoise(5)
    noisy_mean(BOUNDED, 2.0, 4.5, source)
    assert found.following.clip == adaptive.followed(RAW, 4.5, source) and found.following.clip.bound > 1.5


AUTO = global_dp(noise_multiplier="auto", clipping_norm=1.5)
ADDED = (
    "scores of canaries are read off the noised mean of clipped updates; use 'update', or 0 canaries",
    "scores of canaries are read off the noised mean of clipped updates; use 'global-dp', or 0 canaries",
)
BESIDE = (
    "a budget is passed for any privacy.noise-multiplier: what the ledger holds and what is released beside the "
    "sum in all rounds (a distance, with privacy.distance-noise-multiplier; the share of an adaptive clip, with "
    "privacy.clipping-count-noise-multiplier) already take 133.3 % of it"
)
ON_ONE = (
    "strategy X declares no capabilities, so it is not known whether it means anything on one reply, the release; "
    "declare them in its class (capabilities = cloister.Capabilities(...)), or use privacy.placement = 'model' "
    "(heuristic)"
)
SHOWS = "privacy.placement = 'update' shows strategy X one reply, the release, and it needs every reply; use "


def test_what_a_mechanism_refuses():
    def check(refuse, says):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value) == says

    cases = [
        (
            lambda: AUTO.multiplier,
            "privacy.noise-multiplier = 'auto' has not been calibrated to privacy.max-epsilon yet",
        ),
        (lambda: AUTO.calibrated(lambda _: 4.0, 3.0, "a budget"), BESIDE),
        (
            lambda: AUTO.calibrated(lambda _: 3.0, 3.0, "a budget"),
            "no noise multiplier up to 1e+06 stays within a budget",
        ),
        (
            lambda: halved("rule").refuse_canaries(),
            f"privacy.canaries contradicts privacy.placement = 'rule': {ADDED[0]}",
        ),
        (
            lambda: halved("model").refuse_canaries(),
            f"privacy.canaries contradicts privacy.placement = 'model': {ADDED[0]}",
        ),
        (
            lambda: Thawed().refuse_canaries(),
            f"privacy.canaries has no meaning with privacy.server = 'thawed': {ADDED[1]}",
        ),
        (
            lambda: Thawed().calibrated(lambda _: 0.0, 1.0, "a budget"),
            "privacy.server = 'thawed' has no noise that could be calibrated to a budget",
        ),
        (lambda: Thawed().suited_to(None, "X"), ON_ONE),
        (lambda: Thawed().suited_to(SELECTION, "X"), f"{SHOWS}another strategy"),
        (lambda: AUTO.suited_to(None, "X"), ON_ONE),
        (
            lambda: AUTO.suited_to(MEDIAN, "X"),
            f"{SHOWS}privacy.placement = 'rule' (sound), or 'model' (heuristic)",
        ),
        (lambda: AUTO.suited_to(SELECTION, "X"), f"{SHOWS}privacy.placement = 'model' (heuristic)"),
        (
            lambda: global_dp(noise_multiplier=1.0, clipping_norm=1.0, placement="rule").suited_to(None, "X"),
            "privacy.placement = 'rule' is for a coordinate-wise median or trimmed mean, and strategy X is none; "
            "use privacy.placement = 'update'",
        ),
        (
            lambda: global_dp(noise_multiplier=1.0, clipping_norm=1.0, placement="rule", examples_cap=2.5),
            "privacy.examples-cap = 2.5 has no meaning with privacy.placement = 'rule': a rank knows no weights; "
            "remove it",
        ),
        *(
            (
                lambda options=options: global_dp(**{"noise_multiplier": 1.0, "clipping_norm": 1.0} | options),
                "privacy.placement = 'model' goes with a fixed clip and uniform weights only; use privacy.placement = "
                "'update'",
            )
            for options in (
                {"placement": "model", "examples_cap": 2.5},
                {"placement": "model", "clipping_norm": AdaptiveClip(1.0)},
            )
        ),
        (
            lambda: global_dp(noise_multiplier=1.0, clipping_norm=1.0, placement="end"),
            "placement must be one of model, rule, update; got 'end'",
        ),
        (lambda: global_dp(noise_multiplier=-1.0, clipping_norm=1.0), "noise_multiplier must be >= 0, got -1.0"),
        (
            lambda: global_dp(noise_multiplier=1.0, clipping_norm=1.0, examples_cap=-1.0),
            "examples_cap must be >= 0, got -1.0",
        ),
    ]
    assert failures(cases, check) == []


def test_calibration_asks_first_what_the_most_noise_costs():
    """No more than an accountant knows."""
    asked = []
    found = AUTO.calibrated(lambda each: asked.append(each.multiplier) or each.multiplier**-2, 0.25, "a budget")
    assert asked[0] == max(asked) == 1e6 and found.multiplier == pytest.approx(2.0, rel=2e-3)
    assert dataclasses.replace(found, noise_multiplier="auto") == AUTO


def test_a_mechanism_goes_on_as_it_was_saved():
    adaptive = dataclasses.replace(AUTO, clip=AdaptiveClip(1.5))
    later = dataclasses.replace(adaptive, noise_multiplier=2.5, clip=dataclasses.replace(adaptive.clip, bound=9.0))
    state = later.state_dict()
    assert {name: array.tolist() for name, array in state.items()} == {
        "noise-multiplier": 2.5,
        "clip/bound": 9.0,
        "clip/initial": 0.0,
    }
    for asked in (adaptive, dataclasses.replace(adaptive, noise_multiplier=2.5)):
        restored = asked.restored(state)
        assert restored == later and type(restored.noise_multiplier) is float
    with pytest.raises(ValueError, match="was asked for") as refused:
        dataclasses.replace(adaptive, noise_multiplier=2.0).restored(state)
    assert str(refused.value) == "2.0 was asked for, and 2.5 was saved"
    thawed = Thawed()
    assert thawed.state_dict() == {} and thawed.suited_to(MEAN, "X") is thawed
