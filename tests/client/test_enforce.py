"""Refusals of a policy: each rule at its minimum and its maximum."""

from contextlib import suppress
from itertools import product
from types import SimpleNamespace

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
    answer,
    entries_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
    write_data,
)
from policed import ANY, BUNDLE, CHOICE, REFUSED, ask, only, refused
from support import failures

from cloister.client.enforce import about_secure_sums, enforce_policy
from cloister.client.policy import CHECKED_BUNDLE, read_policy
from cloister.client.request import EvaluateRequest, KeepRequest, TrainRequest
from cloister.client.trainers import requested_plan
from cloister.privacy.accounting.budget import multiplier_of
from cloister.privacy.accounting.events import Gaussian, Pure, Unaccounted
from cloister.utils.errors import PolicyError


class TestMechanisms:
    @pytest.mark.parametrize("settings", [GLOBAL, METRIC])
    def test_one_of_the_list_is_enough(self, tmp_path, settings):
        ask(tmp_path, settings, promise=[1.0])

    def test_a_run_without_any_is_refused(self, tmp_path):
        refused(r"privacy.server = 'none', not 'global-dp'; privacy.server = 'none', not 'metric'", tmp_path, OPEN)

    def test_unless_none_is_insisted_on(self, tmp_path):
        ask(tmp_path, OPEN, **ANY)

    def test_a_mechanism_of_another_package_is_none_of_the_list(self, tmp_path):
        """The node need not have it to refuse it, nor to take part by noise of its own."""
        other = {"privacy.server": "mine", "privacy.options": "radius=1.0"}
        refused(r"privacy.server = 'mine', not 'global-dp'; .* not 'metric'", tmp_path, OPEN | other, promise=[9.0])
        ask(tmp_path, DP_SGD | other, **only("dp-sgd"))

    def test_a_mechanism_without_noise_is_off(self, tmp_path):
        refused("privacy.noise-multiplier = 0 is no noise", tmp_path, GLOBAL | {"privacy.noise-multiplier": 0.0})
        for name, settings in {"dp-sgd": DP_SGD, "gaussian": GAUSSIAN, "laplace": LAPLACE}.items():
            silent = settings | {f"privacy.{name}-noise-multiplier": 0.0}
            refused(f"{name}-noise-multiplier = 0.0, demanded: a number above 0", tmp_path, silent, **only(name))

    def test_the_minimum_is_of_all_promised_releases_together(self, tmp_path):
        def check(promise, enough):
            if enough:
                ask(tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0)
            else:
                refused("demanded: at least 1", tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0)

        cases = [([1.0], True), ([0.99], False), ([1.2, 1.2], False), ([], False), ([1.5, 1.5], True)]
        assert failures(cases, check) == []

    @pytest.mark.parametrize(
        ("epsilon", "enough"), [(0.5, True), (5.0, False)], ids=["little is released", "much is released"]
    )
    def test_a_mechanism_of_another_package_is_judged_by_what_it_promises(self, tmp_path, epsilon, enough):
        theirs = OPEN | {"privacy.server": "euclidean-laplace"}
        rules = only("server:euclidean-laplace") | {"min_server_noise_multiplier": 1.0}
        if enough:
            ask(tmp_path, theirs, promise=[Pure(epsilon)], **rules)
        else:
            refused("demanded: at least 1", tmp_path, theirs, promise=[Pure(epsilon)], **rules)
        refused("privacy.server = 'none', not 'server:euclidean-laplace'", tmp_path, OPEN, **rules)

    def test_releases_add_up_as_gaussians_do(self):
        def total(*events):
            return multiplier_of(events)

        assert total(Gaussian(3.0), Gaussian(4.0)) == pytest.approx(12 / 5)
        assert total() == total(Unaccounted("nothing")) == 0.0

    @pytest.mark.parametrize("name", ["dp-sgd", "gaussian"])
    def test_noise_of_the_client_that_the_run_does_not_have(self, tmp_path, name):
        for found, settings in (("none", METRIC), ("laplace", LAPLACE)):
            refused(rf"privacy.client = '{found}', not '{name}'", tmp_path, settings, **only(name))

    @pytest.mark.parametrize("kind", ["dp-sgd", "gaussian", "laplace", "global-dp", "metric"])
    def test_noise_that_a_seed_takes_away_again(self, tmp_path, kind):
        run = {"dp-sgd": DP_SGD, "gaussian": GAUSSIAN, "laplace": LAPLACE, "global-dp": GLOBAL, "metric": METRIC}[kind]
        ask(tmp_path, run, promise=[1.0], **only(kind))
        seeded = run | {"privacy.noise-seed": 7}
        refused("is noise that a party with the seed can remove, demanded: -1", tmp_path, seeded, **only(kind))

    @pytest.mark.parametrize("name", ["gaussian", "laplace"])
    def test_a_choice_that_is_told(self, tmp_path, name):
        noised = CLUSTERED | {"privacy.client": name, f"privacy.{name}-noise-multiplier": 5.0}
        ask(tmp_path, noised, **only(name))
        exact = noised | {"privacy.choice": "exact"}
        refused("privacy.choice = 'exact' tells the server which hypothesis suits", tmp_path, exact, **only(name))

    def test_the_minimum_of_a_client(self, tmp_path):
        def check(settings, key):
            name = settings["privacy.client"]
            noise, policy = f"privacy.{name}-noise-multiplier", only(name, **{key: 2.0})
            ask(tmp_path, settings | {noise: 2.0}, **policy)
            less = settings | {noise: 1.99}
            refused(f"{noise} = 1.99, demanded: at least 2", tmp_path, less, **policy)

        cases = [
            (DP_SGD, "min_dp_sgd_noise_multiplier"),
            (GAUSSIAN, "min_gaussian_noise_multiplier"),
            (LAPLACE, "min_laplace_noise_multiplier"),
        ]
        assert failures(cases, check) == []

    def test_a_radius_next_to_none_is_noise_next_to_none(self, tmp_path):
        def check(per_layer, radius, bounds, demanded):
            asked = LAPLACE | {"privacy.radius": radius, "privacy.per-layer": per_layer}
            if demanded:
                refused(rf"privacy.radius = .*, demanded: {demanded}", tmp_path, asked, **only("laplace", **bounds))
            else:
                ask(tmp_path, asked, **only("laplace", **bounds))

        cases = [
            (per_layer, radius, bounds, demanded)
            for per_layer in [False, True]
            for radius, bounds, demanded in [
                (0.0, {}, ""),
                (1e-9, {}, "0, as this node has no min-radius"),
                (9.0, {"max_radius": 10.0}, "0, as this node has no min-radius"),
                (0.0, {"min_radius": 0.5}, "at least 0.5"),
                (0.5, {"min_radius": 0.5}, ""),
                (0.4, {"min_radius": 0.5}, "at least 0.5"),
                (2.0, {"min_radius": 0.5, "max_radius": 2.0}, ""),
                (2.1, {"min_radius": 0.5, "max_radius": 2.0}, "at most 2"),
            ]
        ]
        assert failures(cases, check) == []


BOUNDS = [
    # run, its key, the policy's rule, a number within it, one outside, how it is called
    (DP_SGD, "privacy.dp-sgd-clipping-norm", {"min_client_clipping_norm": 0.5}, 0.5, 0.4, ""),
    (DP_SGD, "privacy.dp-sgd-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 2.1, ""),
    (GAUSSIAN, "privacy.gaussian-clipping-norm", {"min_client_clipping_norm": 0.5}, 0.5, 0.4, ""),
    (GAUSSIAN, "privacy.gaussian-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 2.1, ""),
    (
        DP_SGD | {"privacy.clipping-decay": 0.5},
        "privacy.min-clipping-norm",
        {"min_client_clipping_norm": 0.1},
        0.1,
        0.09,
        "",
    ),
    (DP_SGD, "privacy.min-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 1e30, ""),
    (OPEN, "client.learning-rate", {"max_learning_rate": 0.5}, 0.5, 0.6, ""),
    (OPEN, "client.batch-size", {"min_batch_size": 8}, 8, 7, ""),
    (OPEN, "client.batch-size", {"max_batch_size": 8}, 8, 9, ""),
    (OPEN, "client.local-epochs", {"max_local_epochs": 4}, 4, 5, ""),
    (OPEN, "task.test-fraction", {"max_test_fraction": 0.25}, 0.25, 0.26, ""),
    (CHOICE, "privacy.clusters", {"max_hypotheses": 2, "max_choice_epsilon": 0.5}, 2, 3, ""),
    (DP_SGD, "client.local-epochs", {"max_steps": 72, "public_size": 40}, 2, 3, "steps of training"),
    (OPEN, "client.local-epochs", {"max_steps": 72, "public_size": 40}, 2, 3, "steps of training"),
]


class TestLimits:
    def test_a_number_at_its_limit_and_past_it(self, tmp_path):
        def check(settings, key, rule, within, outside, called):
            ask(tmp_path, settings | {key: within}, **(ANY | rule))
            name, limit = next(iter(rule.items()))
            side, found = "least" if name.startswith("min") else "most", 108 if called else outside
            text = refused("demanded: ", tmp_path, settings | {key: outside}, **(ANY | rule))
            assert text == f"{REFUSED}{called or key} = {found:g}, demanded: at {side} {limit:g}"

        assert failures(BOUNDS, check) == []

    def test_without_the_rule_either_will_do(self, tmp_path):
        def check(settings, key, rule, within, outside, called):
            needed = {"max_choice_epsilon": 1.0} if settings is CHOICE else {}
            for value in (within, outside):
                ask(tmp_path, settings | {key: value}, **(ANY | needed))

        assert failures(BOUNDS, check) == []

    def test_a_choice_costs_at_most_what_the_policy_says(self, tmp_path):
        ask(tmp_path, CHOICE, **(ANY | {"max_choice_epsilon": 0.5}))
        rule = "privacy.choice-epsilon = 0.6, demanded: at most 0.5"
        refused(rule, tmp_path, CHOICE | {"privacy.choice-epsilon": 0.6}, **(ANY | {"max_choice_epsilon": 0.5}))

    def test_a_policy_without_a_limit_on_choices_allows_none(self, tmp_path):
        refused("privacy.clusters = 2: a choice among hypotheses is a release", tmp_path, CHOICE, **ANY)
        ask(tmp_path, CHOICE, **(ANY | {"max_epsilon": 8.0}))

    def test_what_the_recipe_says_counts_as_what_the_run_says(self, tmp_path):
        recipe = {key: value for key, value in METRIC.items() if not key.startswith("client.")}
        ask(tmp_path, recipe, **(ANY | {"max_local_epochs": 5}))
        refused("client.local-epochs = 5, demanded: at most 4", tmp_path, recipe, **(ANY | {"max_local_epochs": 4}))

    def test_no_clip_of_any_round_is_past_its_limits(self, tmp_path):
        rules = ANY | {"min_client_clipping_norm": 0.5, "max_client_clipping_norm": 2.0}
        node = {"policy": str(policy_file(tmp_path, **rules)), "partition-id": 0, "num-partitions": 4}
        passed = 0
        for norm, least, decay, number in product((0.1, 1.0, 9.0), (0.1, 0.5, 9.0), (0.0, 0.5), (0, 1, 2, 9)):
            settings = DP_SGD | {
                "privacy.dp-sgd-clipping-norm": norm,
                "privacy.min-clipping-norm": least,
                "privacy.clipping-decay": decay,
            }
            request = request_of_kind(settings=settings, number=number)
            with suppress(PolicyError):
                enforce_policy(request, node_at(settings, node))
                passed += 1
                assert 0.5 <= request.config.privacy.dp_sgd.mechanism().clipping_norm_in(number) <= 2.0
        assert passed

    def test_no_epoch_of_any_round_is_at_a_rate_past_the_limit(self, tmp_path):
        """A schedule gives shares of the rate, whatever rounds and warm-ups a server makes up."""

        def check(base):
            rules, tenth = ANY | {"max_learning_rate": 0.5}, {"client.learning-rate": 0.5, "client.local-epochs": 3}
            node = {"policy": str(policy_file(tmp_path, **rules)), "partition-id": 0, "num-partitions": 4}
            faster = base | tenth | {"num-rounds": 100, "client.learning-rate": 0.6}
            for schedule, warmup, final, number in product(
                ("auto", "linear", "cosine"), (0, 99), (0.0, 1.0), (0, 1, 9, 2**31)
            ):
                more = {"client.final-rate-share": final, "client.warmup-rounds": warmup, "client.schedule": schedule}
                settings = base | tenth | more | {"num-rounds": 100}
                request = request_of_kind(settings=settings, number=number)
                enforce_policy(request, node_at(settings, node))
                plan = requested_plan(request, 0)
                assert all(0 <= plan.rate(epoch) <= 0.5 for epoch in range(3))
                if number == 9:
                    refused("client.learning-rate = 0.6, demanded: at most 0.5", tmp_path, faster | more, **rules)

        assert failures([(base,) for base in [OPEN, GAUSSIAN, DP_SGD]], check) == []

    def test_what_multiplies_losses_multiplies_the_rate(self, tmp_path):
        """Unless gradients are clipped after it: then a step is as long as the clip and the rate let it be."""

        def check(more, found):
            rules, slow = ANY | {"max_learning_rate": 0.5}, {"client.learning-rate": 0.1}
            for base in (OPEN, GAUSSIAN):
                text = refused("demanded: at most 0.5", tmp_path, base | slow | more, **rules)
                what = "client.learning-rate times the largest of client.class-weights and client.loss-scale"
                assert text == f"{REFUSED}{what} = {found:g}, demanded: at most 0.5"
            ask(tmp_path, DP_SGD | slow | more, **rules)
            ask(tmp_path, OPEN | slow | {"client.class-weights": "0.1,1,1,1,1,1,1,1,1,5"}, **rules)

        cases = [
            ({"client.loss-scale": 6.0}, 0.6),
            ({"client.class-weights": "1,1,1,1,1,1,1,1,1,6"}, 0.6),
            ({"client.class-weights": "1,1,1,1,1,1,1,1,1,3", "client.loss-scale": 2.0}, 0.6),
        ]
        assert failures(cases, check) == []

    def test_how_many_examples_of_a_group_a_run_may_take(self, tmp_path):
        grouped, rules = DP_SGD | {"task.group": "who"}, ANY | {"group": "who"}
        ask(tmp_path, grouped | {"privacy.group-cap": 10**6}, **rules)
        ask(tmp_path, grouped | {"privacy.group-cap": 20}, **rules, max_group_cap=20)
        past = grouped | {"privacy.group-cap": 21}
        refused("privacy.group-cap = 21, demanded: at most 20", tmp_path, past, **rules, max_group_cap=20)
        ask(tmp_path, DP_SGD, **ANY, max_group_cap=2)

    def test_steps_that_cannot_be_counted_are_too_many(self, tmp_path):
        def check(settings):
            node = own_node(tmp_path)
            rules = ANY | {"max_steps": 4}
            ask(tmp_path, settings, configured=node, **rules)
            refused(
                "max-steps = 4 is counted from public-size, which this node does not state",
                tmp_path,
                settings,
                configured=node | {"public-size": 0},
                **rules,
            )

        assert failures([(settings,) for settings in [DP_SGD, GAUSSIAN, OPEN]], check) == []

    def test_steps_on_what_a_simulation_deals_are_counted(self, tmp_path):
        ask(tmp_path, OPEN, **(ANY | {"max_steps": 1000}))
        refused("steps of training = .*, demanded: at most 10", tmp_path, OPEN, **(ANY | {"max_steps": 10}))

    def test_test_fractions_and_hypotheses_of_other_messages_too(self, tmp_path):
        settings = OPEN | {"task.test-fraction": 0.3}
        for kind in (EvaluateRequest, KeepRequest):
            changes = ANY | {"max_test_fraction": 0.2, "scores_may_leave": True}
            refused("task.test-fraction = 0.3, demanded: at most 0.2", tmp_path, settings, kind, **changes)
            refused(
                "privacy.clusters = 2, demanded: at most 1", tmp_path, CHOICE, kind, **(ANY | {"max_hypotheses": 1})
            )

    def test_a_task_that_is_not_allowed(self, tmp_path):
        for kind in (TrainRequest, EvaluateRequest, KeepRequest):
            says = r"task.name = 'digits', allowed: breast-cancer, mnist"
            refused(says, tmp_path, METRIC, kind, tasks=["breast-cancer", "mnist"])

    def test_groups_that_a_run_does_not_protect(self, tmp_path):
        grouped = DP_SGD | {"task.group": "patient"}
        ask(tmp_path, grouped, **only("dp-sgd", group="patient"))
        refused("task.group = '', demanded: 'patient'", tmp_path, DP_SGD, **only("dp-sgd", group="patient"))
        refused(
            "task.group = 'patient', demanded: '', as this node names no group of its own",
            tmp_path,
            grouped,
            **only("dp-sgd"),
        )

    @pytest.mark.parametrize(("own", "named"), [("", "patient"), ("visit", "patient"), ("patient", "")])
    def test_groups_that_a_server_chooses_for_a_budget_of_the_site(self, tmp_path, own, named):
        """Rows were counted where patients were meant, or a patient's rows in groups of the server's choice."""
        node = own_node(tmp_path, write_data(tmp_path, patient=np.arange(40) // 5), max_example_epsilon=50.0, group=own)
        assert not answer(DP_SGD | {"task.group": own}, node).has_error()
        reply = answer(DP_SGD | {"task.group": named}, node)
        demanded = repr(own) if own else "'', as this node names no group of its own"
        assert reply.error.reason == f"PolicyError: refused by this node: task.group = {named!r}, demanded: {demanded}"
        assert len(entries_of(node, "client")) == 1

    def test_a_site_that_names_groups_and_has_no_budget_means_them_too(self, tmp_path):
        node = own_node(tmp_path, write_data(tmp_path, patient=np.arange(40) // 5), group="patient")
        assert answer(DP_SGD, node).error.reason.endswith("task.group = '', demanded: 'patient'")
        silent = policy_file(tmp_path, **only("dp-sgd"))
        assert "demanded: 'patient'" in answer(DP_SGD, node | {"policy": str(silent)}).error.reason
        assert not answer(DP_SGD | {"task.group": "patient"}, node | {"policy": str(silent)}).has_error()
        assert not answer(DP_SGD | {"task.group": "patient"}, own_node(tmp_path / "open")).has_error()

    def test_a_group_is_no_word_of_runs_that_protect_the_site(self, tmp_path):
        ask(tmp_path, GAUSSIAN, **only("gaussian", group="patient"))

    @pytest.mark.parametrize("limit", [0.5, 1e-300])
    def test_the_leakage_that_a_run_may_be_configured_for(self, tmp_path, limit):
        policy = only("laplace", max_leakage=limit)
        ask(tmp_path, LAPLACE | {"privacy.max-leakage": limit}, **policy)
        for found in (0.0, limit * 1.01, 1e9):
            asked = LAPLACE | {"privacy.max-leakage": found}
            refused(r"privacy.max-leakage = .*, demanded: above 0 and at most", tmp_path, asked, **policy)

    def test_scores_leave_only_if_they_may(self, tmp_path):
        refused("scores of a model on its examples may not leave", tmp_path, METRIC, EvaluateRequest)
        ask(tmp_path, METRIC, EvaluateRequest, scores_may_leave=True)

    def test_too_few_examples_without_saying_how_many(self, tmp_path):
        ask(tmp_path, OPEN, **(ANY | {"min_rows": 200}))
        text = refused(r"fewer examples than it demands of itself$", tmp_path, OPEN, **(ANY | {"min_rows": 1000}))
        assert not any(character.isdigit() for character in text)

    def test_with_dp_sgd_by_the_size_that_is_stated(self, tmp_path):
        node = own_node(tmp_path, tmp_path / "nobody-reads-this.npz")
        ask(tmp_path, DP_SGD, configured=node, **only("dp-sgd", min_rows=40))
        refused("fewer examples", tmp_path, DP_SGD, configured=node, **only("dp-sgd", min_rows=41))

    def test_under_local_noise_nothing_shows_of_it_here(self, tmp_path):
        """The handler answers for it with noise (see test_failures)."""
        node = own_node(tmp_path, tmp_path / "nobody-reads-this.npz")
        ask(tmp_path, GAUSSIAN, configured=node, **only("gaussian", min_rows=10**6))

    def test_a_bundle_nobody_has_looked_at(self, tmp_path, monkeypatch):
        pinned = ANY | {"allowed_fabs": [BUNDLE]}
        monkeypatch.delenv(CHECKED_BUNDLE, raising=False)
        refused("allowed-fabs", tmp_path, METRIC, **pinned)
        monkeypatch.setenv(CHECKED_BUNDLE, "1" * 64)
        refused("allowed-fabs", tmp_path, METRIC, **pinned)
        monkeypatch.setenv(CHECKED_BUNDLE, BUNDLE)
        ask(tmp_path, METRIC, **pinned)

    def test_a_sum_of_updates_where_the_server_must_not_see_one(self, tmp_path):
        demands = ANY | {"demands_secure_aggregation": True, "min_threshold": 3, "min_colluding": 1, "max_colluding": 2}
        says = "secure-aggregation.enabled = False, demanded: True"
        refused(says, tmp_path, METRIC, **demands)
        ask(tmp_path, METRIC, EvaluateRequest, **demands, scores_may_leave=True)
        policy = read_policy(policy_file(tmp_path, **demands))
        assert list(about_secure_sums(policy, None)) == [says]
        assert not list(about_secure_sums(policy, SimpleNamespace(threshold=3, colluding=2)))
        assert list(about_secure_sums(policy, SimpleNamespace(threshold=2, colluding=3))) == [
            "secure-aggregation.threshold = 2, demanded: at least 3",
            "secure-aggregation.colluding = 3, demanded: at most 2",
        ]
        (against_the_server_alone,) = about_secure_sums(policy, SimpleNamespace(threshold=9, colluding=0))
        assert against_the_server_alone == "secure-aggregation.colluding = 0, demanded: at least 1"
        assert not list(about_secure_sums(read_policy(policy_file(tmp_path, **ANY)), None))

    def test_several_complaints_are_told_together(self, tmp_path):
        text = refused("refused by the policy", tmp_path, OPEN | {"client.batch-size": 9}, max_batch_size=8)
        assert "privacy.server = 'none'" in text and "client.batch-size = 9" in text
