"""Texts of refusals, each rule at its edge, and requests that once passed policies that looked strict."""

import numpy as np
import pytest
from asking import (
    CLUSTERED,
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    LAPLACE,
    METRIC,
    OPEN,
    SOFTMAX,
    answer,
    message_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
)
from policed import ANY, BUNDLE, CHOICE, REFUSED, ask, only, refused
from secure_runs import settings
from support import failures

from cloister.client.enforce import enforce_policy
from cloister.client.policy import CHECKED_BUNDLE
from cloister.client.request import EvaluateRequest, KeepRequest, ProtocolRequest, TrainRequest
from cloister.deploy.provision.scripts import policy_template
from cloister.utils.arrays import stacked
from cloister.utils.errors import PolicyError

TEXTS = [
    # run, message, promise, policy, what is said
    (METRIC, TrainRequest, [], {"tasks": ["mnist", "linear"]}, "task.name = 'digits', allowed: mnist, linear"),
    (
        METRIC,
        TrainRequest,
        [],
        ANY | {"allowed_fabs": [BUNDLE], "max_batch_size": 1},
        "allowed-fabs is enforced by `cloister warm-node` alone, and this message did not come through it",
    ),
    (METRIC, EvaluateRequest, [], {}, "scores of a model on its examples may not leave"),
    (DP_SGD, TrainRequest, [], only("dp-sgd", group="ward"), "task.group = '', demanded: 'ward'"),
    (OPEN, TrainRequest, [], ANY | {"min_rows": 1000}, "this node has fewer examples than it demands of itself"),
    (
        OPEN,
        TrainRequest,
        [],
        {"max_learning_rate": 1e-9},
        "none of global-dp, metric is on as demanded: privacy.server = 'none', not 'global-dp'; "
        "privacy.server = 'none', not 'metric'; client.learning-rate = 0.5, demanded: at most 1e-09",
    ),
    (
        GLOBAL | {"privacy.noise-multiplier": 0.0},
        TrainRequest,
        [],
        only("global-dp"),
        "privacy.noise-multiplier = 0 is no noise",
    ),
    (
        GLOBAL,
        TrainRequest,
        [0.98765],
        only("global-dp", min_server_noise_multiplier=1.0),
        "the server promises a noise multiplier of 0.9877, demanded: at least 1",
    ),
    (
        GAUSSIAN | {"privacy.noise-seed": 7},
        TrainRequest,
        [],
        only("gaussian"),
        "privacy.noise-seed = 7 is noise that a party with the seed can remove, demanded: -1",
    ),
    (
        CHOICE | {"privacy.choice": "exact", "privacy.choice-epsilon": 1.0},
        TrainRequest,
        [],
        only("gaussian"),
        "privacy.choice = 'exact' tells the server which hypothesis suits, demanded: 'private'",
    ),
    *[
        (
            settings | {f"privacy.{settings['privacy.client']}-noise-multiplier": 0.0},
            TrainRequest,
            [],
            only(settings["privacy.client"]),
            f"privacy.{settings['privacy.client']}-noise-multiplier = 0.0, demanded: a number above 0",
        )
        for settings in (DP_SGD, GAUSSIAN, LAPLACE)
    ],
    (
        LAPLACE | {"privacy.radius": 0.5},
        TrainRequest,
        [],
        only("laplace"),
        "privacy.radius = 0.5, demanded: 0, as this node has no min-radius",
    ),
    (
        LAPLACE | {"privacy.radius": 0.5},
        TrainRequest,
        [],
        only("laplace", min_radius=2.0),
        "privacy.radius = 0.5, demanded: at least 2",
    ),
    (
        LAPLACE,
        TrainRequest,
        [],
        only("laplace", min_laplace_noise_multiplier=6.0),
        "privacy.laplace-noise-multiplier = 5, demanded: at least 6",
    ),
    (
        LAPLACE,
        TrainRequest,
        [],
        only("laplace", max_leakage=0.5),
        "privacy.max-leakage = 0.0, demanded: above 0 and at most 0.5",
    ),
]


class TestEdges:
    @pytest.mark.parametrize(("settings", "kind", "promise", "policy", "says"), TEXTS)
    def test_a_refusal_says_what_was_found_and_what_is_demanded(
        self, tmp_path, monkeypatch, settings, kind, promise, policy, says
    ):
        monkeypatch.delenv(CHECKED_BUNDLE, raising=False)
        recipe = {"client.learning-rate": 0.5}
        assert refused(REFUSED, tmp_path, settings | recipe, kind, promise, **policy) == REFUSED + says

    def test_a_node_without_a_policy_refuses_nothing(self):
        enforce_policy(request_of_kind(settings=OPEN), node_at(OPEN))

    @pytest.mark.parametrize("kind", [TrainRequest, EvaluateRequest, KeepRequest])
    def test_rows_are_counted_only_where_they_matter(self, tmp_path, monkeypatch, kind):
        monkeypatch.setattr("cloister.client.enforce.local_data", lambda *_: pytest.fail("it was read"))
        rules = ANY | {"scores_may_leave": True}
        ask(tmp_path, OPEN, kind, **rules)
        if kind is not TrainRequest:
            ask(tmp_path, OPEN, kind, **rules, min_rows=10**6)

    def test_as_many_rows_as_demanded_are_enough(self, tmp_path):
        node, rules = own_node(tmp_path), ANY
        ask(tmp_path, OPEN, configured=node, **rules, min_rows=40)
        refused("fewer examples", tmp_path, OPEN, configured=node, **rules, min_rows=41)

    def test_rows_are_not_counted_for_a_run_that_a_limit_of_the_node_refuses(self, tmp_path):
        """By the share of test rows at which the answer changed, a server read which rows there are: uncharged."""

        def check(limit, fraction):
            policy = str(policy_file(tmp_path, **ANY, min_rows=20))
            node = own_node(tmp_path, policy=policy) | {limit.replace("_", "-"): 1.0}
            reply = answer(OPEN | {"task.test-fraction": fraction}, node)
            assert reply.error.reason.startswith("BudgetExhausted: "), "whatever there is"

        cases = [
            (limit, fraction)
            for limit in ["max_epsilon", "max_example_epsilon", "max_leakage"]
            for fraction in [0.0, 0.8]
        ]
        assert failures(cases, check) == []

    def test_the_rows_are_those_of_the_runs_seed(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(
            "cloister.client.enforce.local_data", lambda *given: asked.append(given) or pytest.fail("enough")
        )
        request = request_of_kind(settings=OPEN)
        node = {"policy": str(policy_file(tmp_path, **ANY, min_rows=1)), "partition-id": 2, "num-partitions": 4}
        with pytest.raises(pytest.fail.Exception, match="enough"):
            enforce_policy(request, node_at(OPEN, node))
        assert asked == [(request.config.task, node_at(OPEN, node).config, request.seed)]

    def test_dp_sgd_without_a_size_has_enough(self, tmp_path):
        """A simulated client: what it was dealt is public, and no minimum is about it."""
        ask(tmp_path, DP_SGD, **only("dp-sgd", min_rows=10**6))

    def test_a_leakage_is_a_word_of_laplace_alone(self, tmp_path):
        rules = only("laplace", max_leakage=0.5) | {"mechanisms": ["laplace", "gaussian"]}
        ask(tmp_path, GAUSSIAN, **rules)

    def test_a_min_clipping_norm_has_no_maximum(self, tmp_path):
        decaying = DP_SGD | {"privacy.clipping-decay": 0.5, "privacy.dp-sgd-clipping-norm": 9.0}
        ask(tmp_path, decaying | {"privacy.min-clipping-norm": 3.0}, **(ANY | {"min_client_clipping_norm": 0.1}))

    def test_without_decay_a_min_clipping_norm_is_none(self, tmp_path):
        ask(tmp_path, DP_SGD, **(ANY | {"min_client_clipping_norm": 0.1}))

    def test_a_choice_that_is_none_or_not_private_has_no_epsilon(self, tmp_path):
        def check(settings):
            ask(tmp_path, settings, **(ANY | {"max_choice_epsilon": 0.5, "max_hypotheses": 2}))

        cases = [
            (settings,)
            for settings in [
                CHOICE | {"privacy.clusters": 1, "privacy.choice-epsilon": 1.0},
                CLUSTERED | {"privacy.clusters": 2},
                CHOICE | {"privacy.choice": "exact", "privacy.choice-epsilon": 1.0},
                GAUSSIAN,
            ]
        ]
        assert failures(cases, check) == []

    def test_mechanisms_of_the_server_are_not_those_of_the_client(self, tmp_path):
        """Noise of a client that is too little is told so, and none of the server's is asked for."""
        weak = GAUSSIAN | {"privacy.gaussian-noise-multiplier": 1.0}
        rules = only("gaussian", min_gaussian_noise_multiplier=2.0) | {"mechanisms": ["global-dp", "gaussian"]}
        text = refused(REFUSED, tmp_path, weak, **rules, max_epsilon=1e6)
        assert text == (
            f"{REFUSED}none of global-dp, gaussian is on as demanded: privacy.server = 'none', not 'global-dp'; "
            "privacy.gaussian-noise-multiplier = 1, demanded: at least 2"
        )

    def test_a_policy_that_allows_bundles_goes_on_to_its_other_rules(self, tmp_path, monkeypatch):
        monkeypatch.setenv(CHECKED_BUNDLE, BUNDLE)
        refused("client.batch-size", tmp_path, METRIC, **ANY, allowed_fabs=[BUNDLE], max_batch_size=1)


class TestSums:
    """A step of a secure aggregation is held against the rules of sums, and the first one against all of training."""

    RULES = ANY | {"demands_secure_aggregation": True, "min_threshold": 3, "max_batch_size": 8}

    def ask(self, folder, kind, threshold=3, **more):
        sums = settings("out", clients=3, threshold=threshold) | {"client.batch-size": 9}
        node = {"policy": str(policy_file(folder, **self.RULES)), "partition-id": 0, "num-partitions": 3}
        request = request_of_kind(kind, sums, () if kind is ProtocolRequest else (SOFTMAX,), **more)
        enforce_policy(request, node_at(sums, node))

    def test_later_steps_are_not_about_training(self, tmp_path):
        def check(step):
            self.ask(tmp_path, ProtocolRequest, step=step, content=b"")

        assert failures(["share", "sign", "unmask"], check) == []

    @pytest.mark.parametrize("kind", [TrainRequest, ProtocolRequest])
    def test_training_is_refused_before_others_count_on_it(self, tmp_path, kind):
        more = {"step": "advertise", "content": b""} if kind is ProtocolRequest else {}
        with pytest.raises(PolicyError) as refusal:
            self.ask(tmp_path, kind, **more)
        assert str(refusal.value) == f"{REFUSED}client.batch-size = 9, demanded: at most 8"

    @pytest.mark.parametrize("step", ["advertise", "unmask"])
    def test_no_step_is_made_towards_a_sum_of_too_few(self, tmp_path, step):
        with pytest.raises(PolicyError) as refusal:
            self.ask(tmp_path, ProtocolRequest, threshold=2, step=step, content=b"")
        assert str(refusal.value) == f"{REFUSED}secure-aggregation.threshold = 2, demanded: at least 3"


class TestAttacks:
    """Requests that once passed policies that looked strict."""

    @pytest.fixture
    def node(self, tmp_path):
        (tmp_path / "policy.toml").write_text(policy_template())
        return own_node(tmp_path, policy=str(tmp_path / "policy.toml"))

    def refusal(self, node, settings, message=None):
        reply = answer(settings, node, message)
        assert reply.has_error()
        return reply.error.reason

    def test_the_template_lets_dp_sgd_in_as_it_means_to(self, node):
        assert not answer(DP_SGD, node).has_error()

    def test_noise_next_to_none_under_the_template(self, node):
        found = self.refusal(node, GLOBAL | {"privacy.noise-multiplier": 1e-12})
        assert "privacy.client = 'none', not 'dp-sgd'" in found

    def test_the_exact_distance_before_clipping_under_the_template(self, node):
        settings = METRIC | {"privacy.distance-clip": "before", "privacy.noise-multiplier": 1e-12}
        assert "refused by the policy" in self.refusal(node, settings)

    @pytest.mark.parametrize("settings", [DP_SGD, GAUSSIAN])
    def test_less_noise_on_the_client_than_the_template_has(self, node, settings):
        key = f"privacy.{settings['privacy.client']}-noise-multiplier"
        found = self.refusal(node, settings | {key: 0.49})
        assert f"{key} = 0.49, demanded: at least 0.5" in found

    def test_laplace_noise_next_to_none(self, tmp_path, node):
        with pytest.raises(PolicyError, match="cannot be read"):
            ask(tmp_path, LAPLACE, mechanisms=["laplace"], min_server_noise_multiplier=None, min_radius=1.0)
        policy = only("laplace", min_radius=1.0, max_example_epsilon=8.0)
        policy_file(tmp_path, **policy)
        found = self.refusal(node, LAPLACE | {"privacy.laplace-noise-multiplier": 1e-3, "privacy.radius": 1.0})
        assert found.startswith("BudgetExhausted")

    @pytest.mark.parametrize("settings", [DP_SGD, CLUSTERED | {"privacy.client": "dp-sgd"}])
    def test_two_hypotheses(self, node, settings):
        two = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])
        found = self.refusal(node, settings, message_of(two, hypotheses=2))
        assert "hypotheses = '2'" in found or "privacy.clusters = 2, demanded: at most 1" in found

    def test_clipping_norms_whose_squares_underflow(self, node):
        for norm in (1e-33, 1e-46, 1e-7):
            assert "demanded: at least 1e-06" in self.refusal(node, DP_SGD | {"privacy.dp-sgd-clipping-norm": norm})

    def test_scores(self, node):
        settings = DP_SGD | {"task.test-fraction": 0.2, "evaluation.federated": "on"}
        assert "may not leave" in self.refusal(node, settings, message_of(kind="evaluate"))

    def test_a_refusal_is_the_same_whatever_the_data(self, tmp_path):
        reasons = set()
        for number, count in enumerate((40, 3)):
            folder = tmp_path / str(number)
            node = own_node(folder, policy=str(policy_file(folder, **only("dp-sgd", max_steps=1))))
            rng = np.random.default_rng(number)
            np.savez(folder / "data.npz", x=rng.random((count, 64)), y=np.full(count, number))
            reasons.add(self.refusal(node, DP_SGD))
        assert len(reasons) == 1

    def test_a_refusal_counts_no_rows(self, tmp_path):
        """A run without noise is refused for that, and not told on how many rows a split leaves."""

        def check(spoilt, count):
            policy = policy_file(tmp_path, **only("dp-sgd", min_rows=30, public_size=40))
            rows = np.full((count, 64), np.nan if spoilt else 0.5)
            np.savez(tmp_path / "own.npz", x=rows, y=np.zeros(count, np.int64))
            node = own_node(tmp_path, tmp_path / "own.npz", policy=str(policy))
            found = self.refusal(node, OPEN | {"task.test-fraction": 0.4})
            assert found == "PolicyError: refused by the policy of this node: privacy.client = 'none', not 'dp-sgd'"

        assert failures([(spoilt, count) for spoilt in [False, True] for count in [3, 30, 40]], check) == []
