"""Adaptive clipping: the bound goes to the quantile, noises with what it clipped with, and its bits are paid for."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from statistics_of_noise import std_is
from support import all_nodes, content, flat, grid_of, one_round, zeros
from test_clipping import cohort_of

from cloister.core.arrays import to_record
from cloister.core.errors import ConfigError
from cloister.privacy.books import Books
from cloister.privacy.clipping import AdaptiveClip
from cloister.privacy.decorators import GlobalDP
from cloister.privacy.ledger import Ledger
from cloister.privacy.noise import GaussianNoise

CLIENTS = 100


def models_of_norms(norms, width=50):
    """Updates of given L2 norms, from a model of zeros."""
    rng = np.random.default_rng(4)
    models = []
    for norm in norms:
        vector = rng.standard_normal(2 * width + 3)
        vector *= norm / np.linalg.norm(vector)
        models.append(
            {"kernel": vector[:-3].reshape(width, 2).astype(np.float32), "bias": vector[-3:].astype(np.float32)}
        )
    return models


def following(start, quantile, rounds, norms, rate=0.2, multiplier=10.0):
    clip, noise = AdaptiveClip(start, quantile=quantile, rate=rate, bits_multiplier=multiplier), GaussianNoise(1)
    cohort = cohort_of(models_of_norms(norms))
    bounds = []
    for _ in range(rounds):
        clip.follow(cohort, len(norms), noise)
        bounds.append(clip.bound)
    return bounds


@pytest.mark.parametrize("start", [0.1, 10.0])
@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_it_converges_to_the_quantile_of_the_norms(start, quantile):
    norms = np.random.default_rng(2).lognormal(0.0, 0.5, CLIENTS)
    bounds = following(start, quantile, 200, norms)
    assert np.mean(bounds[-80:]) == pytest.approx(np.quantile(norms, quantile), rel=0.08)


@pytest.mark.parametrize("start", [0.1, 5.0])
def test_flowers_own_runs_away(start):
    """The control: it counts the clipped where the rule wants the unclipped. All norms are 1."""
    inner = flower.FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    wrapper = flower.DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 20, initial_clipping_norm=start)
    models = models_of_norms(np.ones(20))
    grid = grid_of(lambda node, _: content(models[node - 1]), 20)
    for number in range(1, 31):
        messages = list(wrapper.configure_train(number, to_record(zeros(50)), ConfigRecord(), grid))
        replies = [_unchanged(message, models) for message in messages]
        wrapper.aggregate_train(number, replies)
    assert wrapper.clipping_norm < 0.05 if start < 1 else wrapper.clipping_norm > 20


def _unchanged(message, models):
    model = models[message.metadata.dst_node_id - 1]
    record = RecordDict({"arrays": to_record(model), "metrics": MetricRecord({"num-examples": 1})})
    return Message(record, reply_to=message)


def test_the_share_below_the_bound_is_what_counts():
    """With every norm below the bound the bound falls, with every norm above it rises."""
    assert following(2.0, 0.5, 1, np.ones(CLIENTS), multiplier=0.1)[0] < 2.0
    assert following(0.5, 0.5, 1, np.ones(CLIENTS), multiplier=0.1)[0] > 0.5


def test_the_bound_that_clipped_is_the_bound_that_noises():
    models = models_of_norms([3.0] * 4, width=100_000)
    clip = AdaptiveClip(1.0, rate=5.0, bits_multiplier=0.01)
    noisy = GlobalDP(all_nodes(), noise_multiplier=2.0, clipping_norm=clip, noise=GaussianNoise(1))
    calm = GlobalDP(all_nodes(), noise_multiplier=0.0, clipping_norm=1.0, noise=GaussianNoise(1))
    grid = grid_of(lambda node, _: content(models[node - 1]), 4)
    released, silent = (one_round(strategy, grid, zeros(100_000))[0] for strategy in (noisy, calm))
    noise = flat(released) - flat(silent)
    assert clip.bound > 5 and noisy.measured.clipping_norm == 1.0
    assert std_is(noise, 2.0 * 1.0 / 4) and not std_is(noise, 2.0 * clip.bound / 4)


@pytest.mark.parametrize("multiplier", [2.0, 10.0])
def test_the_noise_of_the_bits(multiplier):
    """ln C moves by -η·(share - γ): its deviation over many draws is η·(z_b/2)/n. Shares are far from 0 and 1."""
    cohort, noise = cohort_of(models_of_norms(np.linspace(0.5, 1.5, CLIENTS), width=2)), GaussianNoise(6)
    moves = []
    for _ in range(100_000):
        clip = AdaptiveClip(1.0, rate=1.0, bits_multiplier=multiplier)
        clip.follow(cohort, 1000, noise)
        moves.append(np.log(clip.bound))
    sample = np.array(moves) - np.mean(moves)
    std = multiplier / 2 / 1000
    assert std_is(sample, std) and not std_is(sample, std * 2 / 3) and not std_is(sample, std * 3 / 2)


def test_one_client_moves_the_sum_of_bits_by_half():
    class Recorder(GaussianNoise):
        def add(self, target, std):
            self.seen = float(target[0])

    sums = []
    for norms in ([1.0, 1.0, 9.0], [1.0, 1.0], [1.0, 9.0]):
        noise = Recorder(1)
        AdaptiveClip(2.0).follow(cohort_of(models_of_norms(norms)), 3, noise)
        sums.append(noise.seen)
    everyone, without_large, without_small = sums
    assert abs(everyone - without_large) == 0.5 and abs(everyone - without_small) == 0.5


def test_sum_and_bits_are_one_gaussian():
    """Whitened by their noise, a sum that moves by C and bits that move by ½ move together by 1/z."""
    z, z_b, bound = 1.3, 4.0, 2.5
    whitened = np.hypot(bound / (z * bound), 0.5 / (z_b / 2))
    assert AdaptiveClip(bound, bits_multiplier=z_b).joint_multiplier(z) == pytest.approx(1 / whitened)
    assert AdaptiveClip(bound).joint_multiplier(0.0) == 0.0


def test_the_ledger_has_the_joint_release(tmp_path):
    books = Books(Ledger(tmp_path / "ledger.jsonl"), "run")
    clip = AdaptiveClip(1.0, bits_multiplier=4.0)
    strategy = GlobalDP(all_nodes(), noise_multiplier=1.3, clipping_norm=clip, books=books)
    one_round(strategy, grid_of(lambda node, sent: content(sent), 2), zeros())
    (entry,) = books.ledger.entries
    assert entry.event.noise_multiplier == pytest.approx(clip.joint_multiplier(1.3)) and entry.done


@pytest.mark.parametrize("bad", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"bits_multiplier": 0.0}])
def test_parameters_out_of_range(bad):
    with pytest.raises(ConfigError):
        AdaptiveClip(1.0, **bad)
