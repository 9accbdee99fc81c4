"""Weights by example counts under privacy: capped, so that a count is worth nothing beyond what the noise is for."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from flwr.app import RecordDict
from support import all_nodes, content, failures, flat, grid_of, one_round, random_models, zeros
from test_clipping import cohort_of, true_norms

from cloister.audits.testing import leave_one_out
from cloister.client.app import only_what_is_agreed
from cloister.client.request import Reply, TrainRequest
from cloister.config.run import parse
from cloister.privacy.mechanisms import gaussian
from cloister.privacy.mechanisms.clipping import capped_weights, clip
from cloister.server.build import build
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.utils.arrays import to_record
from cloister.utils.errors import ConfigError

CLIP = 0.5
CAP = 100.0
HOSTILE = [1e9, 1e9 - 1, 100.0001, 100, 99.999, 1, 1e-9, 1e-300]
"""Counts above and below the cap; screening takes no others."""


def weighted(kind=GlobalDP, cap=CAP, **options):
    return kind(all_nodes(), noise_multiplier=0.0, clipping_norm=CLIP, examples_cap=cap, **options)


def released(strategy, models, counts, sent):
    grid = grid_of(lambda node, _: content(models[node - 1], counts[node - 1]), len(models))
    return flat(one_round(strategy, grid, sent)[0])


def flattened(model):
    return np.concatenate([array.ravel() for array in model.values()]).astype(np.float64)


def test_against_brute_force():
    """Σ min(n/cap, 1)·clip(Δ) over the clients that were asked, not over the sum of their weights."""

    def check(scale):
        sent, *models = random_models(9, scale, seed=4)
        origin = flattened(sent)
        total = np.zeros_like(origin)
        for model, count in zip(models, HOSTILE):
            update = flattened(model) - origin
            total += min(count / CAP, 1) * min(1, CLIP / np.linalg.norm(update)) * update
        expected = origin + total / len(models)
        np.testing.assert_allclose(released(weighted(), models, HOSTILE, sent), expected, rtol=1e-5, atol=1e-6 * scale)

    assert failures([1e-3, 1.0, 1e3], check) == []


def cohort_with_a_far_client():
    sent, *others = random_models(6, 0.1, 3, zeros(200))
    return sent, [{name: array + np.float32(1000) for name, array in sent.items()}, *others]


def test_no_count_moves_a_release_further_than_calibrated():
    def check(kind, count):
        sent, models = cohort_with_a_far_client()
        for others in (1.0, 1e9):
            finding = leave_one_out(lambda: weighted(kind), sent, models, [count, *[others] * 5], absent=0)
            assert finding.calibrated == CLIP / 6
            assert finding.sound, finding

    assert failures(product([GlobalDP, MetricDP], HOSTILE), check) == []


def test_the_calibration_is_reached():
    sent, models = cohort_with_a_far_client()
    finding = leave_one_out(weighted, sent, models, [1e9, *[1.0] * 5], absent=0)
    assert finding.moved == pytest.approx(finding.calibrated, rel=1e-3)


def test_weights_that_nobody_caps_are_found_out(monkeypatch, unverified):
    """The control: n/cap as it is."""
    monkeypatch.setattr(
        gaussian,
        "capped_weights",
        lambda cohort, examples, cap: replace(cohort, factors=cohort.factors * np.array(examples) / cap),
    )
    sent, models = cohort_with_a_far_client()
    assert not leave_one_out(weighted, sent, models, [150.0, *[1.0] * 5], absent=0).sound
    assert leave_one_out(weighted, sent, models, [100.0, *[1.0] * 5], absent=0).sound


def test_weights_only_ever_shrink_an_update():
    cohort = clip(cohort_of(random_models(8, 10.0)), CLIP)
    capped = capped_weights(cohort, tuple(HOSTILE), CAP)
    assert (capped.factors <= cohort.factors).all() and (true_norms(capped) <= CLIP).all()
    assert capped.l2_bound == CLIP


def test_a_count_that_is_none_takes_its_reply_with_it():
    def check(bad):
        sent, *models = random_models(4)
        strategy = weighted()
        with_bad = released(strategy, models, [bad, 50.0, 1e9], sent)
        assert [rejection.code for rejection in strategy.measured.rejected] == ["weight"]
        without = [{name: np.full_like(array, np.nan) for name, array in models[0].items()}, *models[1:]]
        np.testing.assert_array_equal(with_bad, released(weighted(), without, [50.0, 50.0, 1e9], sent))

    assert failures([0, -1, -1e9, math.nan, math.inf, 1e10, [1.0, 2.0]], check) == []


def test_a_reply_without_a_count_counts_as_one_example():
    sent, model = random_models(2, 0.01)
    grid = grid_of(lambda node, _: RecordDict({"arrays": to_record(model)}), 1)
    found = flat(one_round(weighted(), grid, sent)[0])
    np.testing.assert_allclose(
        found - flattened(sent), (flattened(model) - flattened(sent)) / CAP, rtol=1e-4, atol=1e-8
    )


# --- the configuration ---

CAPPED = {"strategy.weighting": "examples", "privacy.examples-cap": CAP}
SERVERS = {"global-dp": {"privacy.server": "global-dp"}, "metric": {"privacy.server": "metric"}}


def left(settings):
    """The metrics that leave a node with a training reply."""
    request = TrainRequest(parse({"task.model": "softmax"} | settings), "1", 1, 0, (zeros(),))
    reply = Reply(zeros(), {"num-examples": 17, "train-loss": 0.5})
    return only_what_is_agreed(reply, request).metrics


@pytest.mark.parametrize("server", SERVERS)
def test_counts_leave_a_client_only_where_they_weigh(server):
    assert left(SERVERS[server]) == {}
    assert left(SERVERS[server] | CAPPED) == {"num-examples": 17}


@pytest.mark.parametrize("server", SERVERS)
def test_the_run_says_that_counts_leave(server, tmp_path):
    def unprotected(settings):
        base = {"task.model": "softmax", "output-dir": str(tmp_path)}
        return " ".join(build(parse(base | SERVERS[server] | settings)).claim.unprotected)

    assert "example count" in unprotected(CAPPED)
    assert "example count" not in unprotected({})


def test_combinations_that_contradict_themselves():
    def check(server, settings, reason):
        with pytest.raises(ConfigError, match=reason):
            parse(SERVERS[server] | settings)

    cases = [
        (one, *other)
        for one, other in product(
            SERVERS,
            [
                ({"strategy.weighting": "examples"}, "one client's weight would be unbounded"),
                ({"privacy.examples-cap": CAP}, "privacy.examples-cap = 100.0 has no effect"),
                (
                    {"privacy.examples-cap": CAP, "strategy.weighting": "uniform"},
                    "privacy.examples-cap = 100.0 has no effect",
                ),
                (CAPPED | {"privacy.examples-cap": -1.0}, "privacy.examples-cap = -1.0 is not valid"),
                (CAPPED | {"privacy.examples-cap": 0.0}, "one client's weight would be unbounded"),
            ],
        )
    ]
    assert failures(cases, check) == []


def test_without_privacy_a_cap_has_no_effect():
    with pytest.raises(ConfigError, match=r"privacy\.examples-cap = 100\.0 has no effect"):
        parse(CAPPED | {"privacy.server": "none"})


def test_the_published_placement_has_uniform_weights():
    with pytest.raises(ConfigError, match="uniform weights only"):
        weighted(placement="model")


def test_a_cap_out_of_range():
    def check(cap):
        with pytest.raises(ConfigError, match="examples_cap"):
            weighted(cap=cap)

    assert failures([-1.0, math.nan, math.inf], check) == []


def test_nothing_is_capped_at_nothing():
    with pytest.raises(ConfigError, match="examples_cap must be > 0"):
        capped_weights(cohort_of([zeros()]), (1.0,), 0.0)
