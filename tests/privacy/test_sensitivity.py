"""One client never moves a release further than its noise was calibrated for; Flower's wrapper shows the test bites."""

import functools
from itertools import cycle

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from support import failures, random_models, zeros

from cloister.audits.testing import leave_one_out
from cloister.config.run import parse
from cloister.server.build import named_strategy
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.strategies import STRATEGIES

CLIP = 0.5
ROBUST = ["fedmedian", "fedtrimmedavg", "krum"]
FINALIZED = [name for name in STRATEGIES.names() if name not in ROBUST]


def cohorts():
    """Twenty cohorts: random ones of several scales, and those an adversary would choose. (sent, models, counts)"""
    rng = np.random.default_rng(0)
    for number in range(10):
        sent, *models = random_models(int(rng.integers(4, 12)), 10.0 ** rng.integers(-3, 4), number, zeros(200))
        yield sent, models, rng.integers(1, 1000, len(models)).astype(float)
    sent, *base = random_models(8, 0.1, 99, zeros(200))
    direction = {name: np.ones_like(array) for name, array in sent.items()}

    def moved(by):
        return {name: sent[name] + np.float32(by) * direction[name] for name in sent}

    def sparse(index):
        model = {name: array.copy() for name, array in sent.items()}
        model["kernel"].flat[index] += 1e3
        return model

    adversarial = [
        [moved(1000), *base],
        [moved(-1000), *[moved(1000)] * 6],
        [moved(1e-6), *[moved(0)] * 5],
        [sent] * 4,
        [sparse(0), *base],
        [sparse(i) for i in range(7)],
        [moved(1e3), moved(-1e3)],
        [moved(1e10), *base],
        [base[0]] * 7,
        [moved(CLIP), moved(2 * CLIP), moved(4 * CLIP)],
    ]
    for models in adversarial:
        yield sent, models, np.array([1e9, *[1.0] * (len(models) - 1)])


COHORTS = list(cohorts())


def ours(kind, name, **options):
    config = parse({"strategy.name": name, "strategy.min-nodes": 1})
    return lambda: kind(named_strategy(config), noise_multiplier=0.0, clipping_norm=CLIP, **options)


@pytest.mark.parametrize("kind", [GlobalDP, MetricDP])
def test_one_client_moves_a_release_no_further_than_calibrated(kind):
    """Try all cohorts on one strategy and one on the others: a strategy sees the release alone."""

    def check(name, cohort):
        sent, models, counts = COHORTS[cohort]
        finding = leave_one_out(ours(kind, name), sent, models, counts, absent=0)
        assert finding.calibrated == CLIP / len(models)
        assert finding.sound, finding

    others = [(name, 10) for name in FINALIZED if name != "fedavg"]
    assert failures([*(("fedavg", cohort) for cohort in range(len(COHORTS))), *others], check) == []


RULES = {"fedmedian": lambda n: 2 - n % 2, "fedtrimmedavg": lambda n: n - 2 * int(0.2 * n)}
"""Number of kept values of n: one or two in the middle, or those that trimming leaves."""


@pytest.mark.parametrize(
    ("name", "kinds"), [("fedmedian", (GlobalDP, MetricDP)), ("fedtrimmedavg", (MetricDP, GlobalDP))]
)
def test_one_client_moves_a_rule_no_further_than_calibrated(name, kinds):
    """Try all cohorts on each rule, under one mechanism and the other in turn."""

    def check(cohort, kind):
        sent, models, counts = COHORTS[cohort]
        finding = leave_one_out(ours(kind, name, placement="rule"), sent, models, counts, absent=0)
        assert finding.calibrated == CLIP / RULES[name](len(models))
        assert finding.sound, finding

    assert failures(zip(range(len(COHORTS)), cycle(kinds)), check) == []


def test_a_median_calibrated_as_a_mean_is_found_out():
    sent, *_ = COHORTS[10][0], COHORTS[10][1]
    far = {name: array + np.float32(9) for name, array in sent.items()}
    divided = [far, far, far, sent, sent]
    finding = leave_one_out(ours(GlobalDP, "fedmedian", placement="rule"), sent, divided, np.ones(5), absent=0)
    assert finding.moved == pytest.approx(CLIP, rel=1e-3) and finding.sound
    assert finding.moved > 4 * CLIP / 5


def test_the_calibration_is_reached():
    """A bound nobody comes near would pass every test above: a far client moves the release by all of C/n."""
    sent, models, counts = COHORTS[10]
    finding = leave_one_out(ours(GlobalDP, "fedavg"), sent, models, counts, absent=0)
    assert finding.moved == pytest.approx(finding.calibrated, rel=1e-3)


def flowers_wrapper(inner, clients):
    """Flower's fixed clipping around a strategy, its noise too small to matter."""
    return flower.DifferentialPrivacyServerSideFixedClipping(
        inner(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0), 1e-12, CLIP, clients
    )


def test_the_audit_catches_noise_after_a_server_optimizer():
    """Positive control: Flower's wrapper around FedAdam noises FedAdam's output as if it were a mean."""
    caught = 0
    for sent, models, _ in COHORTS[:10]:
        wrapped = functools.partial(flowers_wrapper, flower.FedAdam, len(models))
        even = np.ones(len(models))
        caught += not leave_one_out(wrapped, sent, models, even, absent=0, calibrated=CLIP / len(models)).sound
    assert caught == 10


def test_the_audit_catches_weights_that_nobody_bounds():
    """Positive control: Flower's wrapper around FedAvg lets one client's example count take over the mean."""
    sent, models, counts = COHORTS[10]
    finding = leave_one_out(
        lambda: flowers_wrapper(flower.FedAvg, len(models)),
        sent,
        models,
        counts,
        absent=0,
        calibrated=CLIP / len(models),
    )
    assert not finding.sound
