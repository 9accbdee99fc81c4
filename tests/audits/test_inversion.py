"""Gradient inversion: similarity, what becomes of a step on its way, and the attacks."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from support import failures

from cloister.audits import gradient_inversion
from cloister.audits.audit import Effort, FinishedRun, Progress
from cloister.audits.findings import Measured
from cloister.audits.gradient_inversion import (
    AUDIT,
    DROWNED,
    INVERTING,
    LEAKAGE,
    RELEASED,
    SENT,
    UNPROTECTED,
    Step,
    _controls,
    _meaning,
    attacked,
    channels_of,
    open_channel,
    published_laplace,
    released_by,
    ssim,
)
from cloister.config.run import parse
from cloister.privacy.dpsgd import descent
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.datasets.characters import Digits

SMOOTH = np.outer(np.hanning(12), np.hanning(12))


@pytest.fixture(autouse=True)
def the_same_noise_in_every_test_run(monkeypatch):
    """Every channel asks for noise of its own; here these are the streams of 0, 1, 2 and so on."""
    seeds = count()
    for module in (gradient_inversion, descent):
        monkeypatch.setattr(module, "GaussianNoise", lambda: GaussianNoise(next(seeds)))


class TestSimilarity:
    def test_an_image_is_like_itself_and_unlike_noise(self):
        assert ssim(SMOOTH, SMOOTH) == pytest.approx(1)
        found = [ssim(np.random.default_rng(seed).random((12, 12)), SMOOTH) for seed in range(50)]
        assert abs(np.mean(found)) < 0.1

    def test_one_window_by_hand(self):
        one, other = np.random.default_rng(0).random((2, 7, 7))
        covariance = np.cov(one.ravel(), other.ravel())
        light = (2 * one.mean() * other.mean() + 1e-4) / (one.mean() ** 2 + other.mean() ** 2 + 1e-4)
        structure = (2 * covariance[0, 1] + 9e-4) / (covariance[0, 0] + covariance[1, 1] + 9e-4)
        assert ssim(one, other) == pytest.approx(light * structure)

    def test_the_negative_is_as_unlike_as_can_be(self):
        assert ssim(SMOOTH, 1 - SMOOTH) < 0 and ssim(SMOOTH, 1 - SMOOTH) == pytest.approx(ssim(1 - SMOOTH, SMOOTH))


@pytest.fixture
def step():
    rng = np.random.default_rng(0)
    start = {"kernel": rng.normal(size=(50, 40)).astype(np.float32), "bias": np.zeros(40, np.float32)}
    gradient = {name: rng.normal(size=array.shape) for name, array in start.items()}
    return Step(start, gradient, SMOOTH, 1, rate=0.1)


def length(arrays):
    return float(np.sqrt(sum(np.square(array).sum() for array in arrays.values())))


def apart(one, other):
    return length({name: one[name] - other[name] for name in one})


class TestChannels:
    def test_an_open_one_shows_the_gradient(self, step):
        assert apart(open_channel(step), step.gradient) < 1e-4 * length(step.gradient)

    def test_laplace_noise_is_as_long_as_it_says(self, step):
        for multiplier in (1e-3, 1.0, 30.0):
            noise = apart(published_laplace(multiplier)(step), step.gradient)
            assert noise == pytest.approx(multiplier * length(step.gradient), rel=0.15)

    def test_per_layer_each_array_has_its_own(self, step):
        seen = published_laplace(1.0, per_layer=True)(step)
        for name, array in step.gradient.items():
            assert length({"": seen[name] - array}) == pytest.approx(length({"": array}), rel=0.6)

    def test_what_the_others_sent_is_taken_away(self, step):
        """Clipped to C and noised with z·C: the attacker sees these, and nothing of a division by n."""
        config = parse({"privacy.server": "global-dp", "privacy.noise-multiplier": 0.001, "privacy.clipping-norm": 0.5})
        seen = released_by(config.privacy.server.mechanism(), 10)(step)
        assert length(seen) == pytest.approx(0.5 / step.rate, rel=0.01)
        cosine = sum((seen[name] * array).sum() for name, array in step.gradient.items())
        assert cosine == pytest.approx(length(seen) * length(step.gradient), rel=1e-2)

    def test_who_sees_what(self):
        def check(settings, expected):
            assert set(channels_of(parse(settings), 4, None)) == expected

        auto = {"privacy.server": "global-dp", "privacy.noise-multiplier": "auto", "privacy.max-epsilon": 1.0}
        cases = [
            ({"privacy.server": "none"}, {SENT}),
            ({"privacy.server": "none", "privacy.client": "gaussian"}, {SENT}),
            ({"privacy.server": "global-dp"}, {SENT, RELEASED}),
            ({"privacy.server": "metric"}, {SENT, RELEASED}),
            ({"privacy.server": "global-dp", "privacy.placement": "model"}, {SENT}),
            (auto, {SENT}),
        ]
        assert failures(cases, check) == []

    def test_what_a_client_sends_carries_its_own_noise(self, step):
        private = {"privacy.server": "none", "privacy.client": "gaussian", "privacy.gaussian-clipping-norm": 0.01}
        seen = channels_of(parse(private), 4, None)[SENT](step)
        expected = 0.01 / step.rate * np.sqrt(sum(array.size for array in step.start.values()))
        assert length(seen) == pytest.approx(expected, rel=0.1)


class TestVerdicts:
    def test_controls_are_judged_by_similarity(self):
        results = {LEAKAGE: {UNPROTECTED: [(0.95, None), (0.97, None)], DROWNED: [(0.1, None)]}}
        assert [(control.expected, control.met) for control in _controls(results)] == [
            ("succeeds", True),
            ("fails", True),
        ]
        swapped = {LEAKAGE: {UNPROTECTED: [(0.1, None)], DROWNED: [(0.95, None)]}}
        assert [control.met for control in _controls(swapped)] == [False, False]

    def test_the_meaning_follows_the_best_attack(self):
        low = Measured(LEAKAGE, "similarity", 0.0, assumption="on x")
        for value, said in ((0.95, "can be read from"), (0.7, "in part"), (0.1, "read no image")):
            assert said in _meaning([low, replace(low, value=value)])


@pytest.mark.slow
def test_a_digit_is_recovered_from_little_noise_and_lost_under_dp_sgd(monkeypatch):
    """`test_the_audit_of_a_run` attacks what is sent without privacy and under much noise: they are its controls."""
    from cloister.audits.keras_inversion import Victim

    victim = Victim((8, 8), 10, 0)
    train = Digits(parse({}).task).load().train
    image, label = train.x[0].reshape(8, 8).astype(np.float64), int(train.y[0])
    step = Step(victim.arrays, victim.gradient(image, label), image, label, 0.3)
    private = parse({"privacy.server": "none", "privacy.client": "dp-sgd", "client.batch-size": 1})
    channels = {
        "little, per layer": published_laplace(1e-3, per_layer=True),
        SENT: channels_of(private, 4, victim.model)[SENT],
    }
    told = []
    monkeypatch.setattr(Progress, "expect", lambda self, *said: told.append(said))
    results = attacked(victim, [step], channels, Effort())
    ((searches, _, each),) = told
    assert searches == 4 and each > 0, "an estimate before the first search"
    for attack in (LEAKAGE, INVERTING):
        found = {channel: results[attack][channel][0][0] for channel in channels}
        assert found["little, per layer"] > 0.9 and found[SENT] < 0.5
    # The gradient of another image leads to that one: what is recovered comes from what was seen.
    other = train.x[1].reshape(8, 8).astype(np.float64)
    recovered = victim.inverting(victim.gradient(other, int(train.y[1])), 0).image
    assert ssim(other, recovered) > 0.9 > 0.5 > ssim(image, recovered)
    # DP-SGD trained on the victim's weights, and put them back.
    assert all((victim.arrays[path] == array).all() for path, array in step.start.items())


@pytest.mark.slow
def test_the_audit_of_a_run(run_of, seeded_noise, monkeypatch):
    monkeypatch.setattr(gradient_inversion, "IMAGES", 1)
    run = FinishedRun.read(run_of(**{"privacy.server": "global-dp", "privacy.noise-multiplier": 1.0}))
    found = AUDIT.conduct(run, Effort())
    assert {item.attack for item in found.borne_out("similarity")} == {LEAKAGE, INVERTING}
    by_channel = {(item.attack, item.assumption): item.value for item in found.measured}
    assert by_channel[INVERTING, f"on {SENT}"] > 0.9 and by_channel[INVERTING, f"on {RELEASED}"] < 0.5
    assert "An image can be read from what a client sends" in found.meaning
    assert all((run.path / picture).stat().st_size > 1000 for picture in found.pictures)
    json.dumps(found.facts())
