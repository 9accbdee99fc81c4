"""The private distance: one client moves it no further than its noise covers, and cannot switch the noise off."""

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import all_nodes, content, grid_of, one_round, random_models, zeros
from test_clipping import cohort_of

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.metric import DISTANCES, largest_distance
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.private_strategy import MetricDP
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError

CLIP = 0.7
SIZES = (4, 4, 4)


def model_of(vector, sizes):
    cuts = np.cumsum(sizes)[:-1]
    return {f"layer-{i}": piece.astype(np.float64) for i, piece in enumerate(np.split(np.asarray(vector), cuts))}


def distance_of(vectors, sizes, name):
    sent = model_of(np.zeros(sum(sizes)), sizes)
    bounded = clip(cohort_of([model_of(vector, sizes) for vector in vectors], sent), CLIP)
    return largest_distance(bounded, DISTANCES.load(name).pairwise)


@pytest.mark.parametrize("name", ["mean-layer-frobenius", "l2"])
def test_the_range_is_reached(name):
    """A bound two thirds as large, or one that forgets √L, would be passed: by one client against all others."""
    sizes = SIZES
    vector = np.ones(sum(sizes))
    moved = distance_of([vector, vector, -vector], sizes, name) - distance_of([vector, vector], sizes, name)
    limit = DISTANCES.load(name).largest(CLIP, len(sizes))
    assert moved == pytest.approx(limit, rel=1e-4)
    assert moved > limit / 1.5 and (name == "l2" or moved > limit / np.sqrt(len(sizes)))


def private(inner=None, **options):
    defaults = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "release": "private", "noise": GaussianNoise(3)}
    return MetricDP(inner or all_nodes(), **(defaults | options))


@pytest.mark.slow
def test_the_noise_on_the_distance():
    strategy = private(distance_multiplier=1.5)
    scale, bounded = strategy.mechanism.scale, clip(cohort_of([zeros()]), 1.0)
    sample = np.array([scale.noised(0.4, bounded, strategy.noise) for _ in range(100_000)]) - 0.4
    std = 1.5 * 2 / np.sqrt(2)
    assert std_is(sample, std) and is_normal(sample, std)
    assert not std_is(sample, std * 2 / 3) and not std_is(sample, std * 3 / 2)


@pytest.mark.parametrize("direction", ["divide", "multiply"])
def test_no_round_has_less_noise_than_the_worst_one_accounted_for(direction):
    strategy = private(direction=direction, min_distance=0.2)
    worst = strategy.events(Layout.of(zeros()))[1] if strategy.is_accounted else None
    assert worst is None  # seeded noise is not accounted for: ask an unseeded twin
    twin = private(direction=direction, min_distance=0.2, noise=GaussianNoise())
    _, least = twin.events(Layout.of(zeros()))
    models = random_models(3, 0.3)
    grid = grid_of(lambda node, _: content(models[node - 1]), 3)
    realised = []
    for _ in range(200):
        one_round(twin, grid, zeros())
        realised.append(twin.measured.noise_multiplier)
    assert min(realised) >= least.noise_multiplier * (1 - 1e-12)
    assert len(set(realised)) > 20


def test_one_distant_client_cannot_lower_the_noise_below_the_floor_of_the_configuration():
    """The published form, exact and before the clip, is the control: there it can."""
    models = random_models(4, 0.01)
    models[0] = {name: array + 1000 for name, array in models[0].items()}
    grid = grid_of(lambda node, _: content(models[node - 1]), 4)
    published = private(release="exact", measure="before")
    sound = private(noise=GaussianNoise())
    for _ in range(50):
        one_round(sound, grid, zeros())
        assert sound.measured.noise_multiplier >= 1.0 / (2 / np.sqrt(2)) - 1e-12
    one_round(published, grid, zeros())
    assert published.measured.noise_multiplier < 1e-2


def test_both_releases_are_in_the_ledger_in_their_order(tmp_path):
    budget = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "run")
    strategy = private(noise=GaussianNoise(), budget=budget, distance_multiplier=2.5)
    one_round(strategy, grid_of(lambda node, sent: content(sent), 3), zeros())
    distance, total = (entry.event for entry in budget.ledger.entries)
    assert distance == Gaussian(2.5)
    # The sum is recorded with the least noise that the round could have had, the one at the limit of the distance.
    assert total.noise_multiplier == pytest.approx(1.0 / (2 / np.sqrt(2)))
    assert total.noise_multiplier <= strategy.measured.noise_multiplier


@pytest.mark.parametrize(("options", "reason"), [({}, "seeded"), ({"noise_multiplier": 0.0}, "there is no noise")])
def test_neither_release_is_a_gaussian_to_an_accountant_where_nothing_is_claimed(tmp_path, options, reason):
    budget = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "run")
    one_round(private(budget=budget, **options), grid_of(lambda node, sent: content(sent), 3), zeros())
    assert len(budget.ledger.entries) == 2
    for entry in budget.ledger.entries:
        assert isinstance(entry.event, Unaccounted) and reason in entry.event.reason


def test_an_exact_distance_is_in_the_ledger_without_a_guarantee(tmp_path):
    budget = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "run")
    strategy = private(release="exact", noise=GaussianNoise(), budget=budget)
    one_round(strategy, grid_of(lambda node, sent: content(sent), 3), zeros())
    (entry,) = budget.ledger.entries
    assert isinstance(entry.event, Unaccounted) and "distance" in entry.event.reason
    assert strategy.measured.epsilon is None


class TestCappedWeights:
    def weighted(self, counts, cap=100.0):
        models = random_models(len(counts), 0.1)
        strategy = private(release="exact", examples_cap=cap, noise_multiplier=0.0)
        grid = grid_of(lambda node, _: content(models[node - 1], counts[node - 1]), len(counts))
        arrays, _ = one_round(strategy, grid, zeros())
        return models, np.concatenate([array.numpy().ravel() for array in arrays.values()])

    def test_updates_weigh_by_their_capped_counts(self):
        models, released = self.weighted([50, 100, 10**9])
        vectors = np.array([np.concatenate([a.ravel() for a in model.values()]) for model in models])
        np.testing.assert_allclose(released, (np.array([0.5, 1.0, 1.0]) @ vectors) / 3, atol=1e-6)

    def test_no_count_lets_one_client_pass_the_bound(self):
        from cloister.privacy.mechanisms.clipping import capped_weights

        bounded = clip(cohort_of(random_models(5, 100.0)), CLIP)
        capped = capped_weights(bounded, (1.0, 99.0, 100.0, 1e6, 1e9), 100.0)
        assert capped.l2_bound == CLIP
        assert (capped.factors * capped.norms <= CLIP).all()

    def test_a_placement_that_shows_every_reply_takes_none(self):
        with pytest.raises(ConfigError, match="uniform weights only"):
            private(release="exact", placement="model", examples_cap=10.0)
