"""What a policy refuses: each rule at its minimum and its maximum, and the attacks that looked harmless."""

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
    SOFTMAX,
    answer,
    entries_of,
    message_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
    write_data,
)

from cloister.client.data import task_of
from cloister.client.mods.enforce import about_secure_sums, enforce_policy
from cloister.client.policy import CHECKED_BUNDLE, is_server_side, read_policy
from cloister.client.request import EvaluateRequest, KeepRequest, Reply, TrainRequest
from cloister.client.training.plan import requested_plan
from cloister.core.errors import PolicyError
from cloister.core.hypotheses import stacked
from cloister.deploy.scripts import policy_template
from cloister.privacy.accounting.events import Gaussian, Pure, Unaccounted
from cloister.privacy.accounting.promises import multiplier_of

BUNDLE = "0" * 64
REFUSED = "refused by the policy of this node: "
DONE = Reply(metrics={"done": 1})
ANY = {"mechanisms": [], "min_server_noise_multiplier": None}
"""A policy without a mechanism, for the other rules."""
CHOICE = CLUSTERED | {"privacy.client": "gaussian", "privacy.clusters": 2, "privacy.choice-epsilon": 0.5}


def ask(folder, settings, kind=TrainRequest, promise=(), configured=None, **changes):
    """What the policy makes of a request: passes it on, or an error."""
    node = {"policy": str(policy_file(folder, **changes)), "partition-id": 0, "num-partitions": 4} | (configured or {})
    events = tuple(event if isinstance(event, Pure) else Gaussian(event) for event in promise)
    more = {"promise": events} if promise else {}
    request = request_of_kind(kind, settings, **more)
    assert enforce_policy(request, node_at(settings, node), lambda *_: DONE) is DONE


def refused(says, *arguments, **changes):
    with pytest.raises(PolicyError, match=says) as refusal:
        ask(*arguments, **changes)
    return str(refusal.value)


def only(mechanism, **changes):
    """A policy that insists on one mechanism, and on a budget that no noise is too little for."""
    budget = "max_epsilon" if is_server_side(mechanism) else "max_example_epsilon"
    return {"mechanisms": [mechanism], "min_server_noise_multiplier": None, budget: 1e6} | changes


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
            silent = settings | {"privacy.client-noise-multiplier": 0.0}
            refused("privacy.client-noise-multiplier = 0.0, demanded: a number above 0", tmp_path, silent, **only(name))

    @pytest.mark.parametrize(
        ("promise", "enough"), [([1.0], True), ([0.99], False), ([1.2, 1.2], False), ([], False), ([1.5, 1.5], True)]
    )
    def test_the_minimum_is_of_all_promised_releases_together(self, tmp_path, promise, enough):
        if enough:
            ask(tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0)
        else:
            refused("demanded: at least 1", tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0)

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
        refused(r"privacy.noise-seed = 7 is noise that whoever .* demanded: -1", tmp_path, seeded, **only(kind))

    @pytest.mark.parametrize("name", ["gaussian", "laplace"])
    def test_a_choice_that_is_told(self, tmp_path, name):
        noised = CLUSTERED | {"privacy.client": name, "privacy.client-noise-multiplier": 5.0}
        ask(tmp_path, noised, **only(name))
        exact = noised | {"privacy.choice": "exact"}
        refused("privacy.choice = 'exact' tells the server which hypothesis suits", tmp_path, exact, **only(name))

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            (DP_SGD, "min_client_noise_multiplier"),
            (GAUSSIAN, "min_client_noise_multiplier"),
            (LAPLACE, "min_laplace_noise_multiplier"),
        ],
    )
    def test_the_minimum_of_a_client(self, tmp_path, settings, key):
        policy = only(settings["privacy.client"], **{key: 2.0})
        ask(tmp_path, settings | {"privacy.client-noise-multiplier": 2.0}, **policy)
        less = settings | {"privacy.client-noise-multiplier": 1.99}
        refused("privacy.client-noise-multiplier = 1.99, demanded: at least 2", tmp_path, less, **policy)

    @pytest.mark.parametrize("per_layer", [False, True])
    @pytest.mark.parametrize(
        ("radius", "bounds", "demanded"),
        [
            (0.0, {}, ""),
            (1e-9, {}, "0, as this node has no min-radius"),
            (9.0, {"max_radius": 10.0}, "0, as this node has no min-radius"),
            (0.0, {"min_radius": 0.5}, "at least 0.5"),
            (0.5, {"min_radius": 0.5}, ""),
            (0.4, {"min_radius": 0.5}, "at least 0.5"),
            (2.0, {"min_radius": 0.5, "max_radius": 2.0}, ""),
            (2.1, {"min_radius": 0.5, "max_radius": 2.0}, "at most 2"),
        ],
    )
    def test_a_radius_next_to_none_is_noise_next_to_none(self, tmp_path, radius, bounds, demanded, per_layer):
        asked = LAPLACE | {"privacy.radius": radius, "privacy.per-layer": per_layer}
        if demanded:
            refused(rf"privacy.radius = .*, demanded: {demanded}", tmp_path, asked, **only("laplace", **bounds))
        else:
            ask(tmp_path, asked, **only("laplace", **bounds))


BOUNDS = [
    # run, its key, the policy's rule, a number within it, one outside, how it is called
    (DP_SGD, "privacy.client-clipping-norm", {"min_client_clipping_norm": 0.5}, 0.5, 0.4, ""),
    (DP_SGD, "privacy.client-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 2.1, ""),
    (GAUSSIAN, "privacy.client-clipping-norm", {"min_client_clipping_norm": 0.5}, 0.5, 0.4, ""),
    (GAUSSIAN, "privacy.client-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 2.1, ""),
    (
        DP_SGD | {"privacy.clipping-decay": 0.5},
        "privacy.least-clipping-norm",
        {"min_client_clipping_norm": 0.1},
        0.1,
        0.09,
        "",
    ),
    (DP_SGD, "privacy.least-clipping-norm", {"max_client_clipping_norm": 2.0}, 2.0, 1e30, ""),
    (OPEN, "client.learning-rate", {"max_learning_rate": 0.5}, 0.5, 0.6, ""),
    (OPEN, "client.batch-size", {"min_batch_size": 8}, 8, 7, ""),
    (OPEN, "client.batch-size", {"max_batch_size": 8}, 8, 9, ""),
    (OPEN, "client.local-epochs", {"max_local_epochs": 4}, 4, 5, ""),
    (OPEN, "task.test-fraction", {"max_test_fraction": 0.25}, 0.25, 0.26, ""),
    (CHOICE, "privacy.clusters", {"max_hypotheses": 2}, 2, 3, ""),
    (CHOICE, "privacy.choice-epsilon", {"max_choice_epsilon": 0.5}, 0.5, 0.6, ""),
    (DP_SGD, "client.local-epochs", {"max_steps": 72, "public_size": 40}, 2, 3, "steps of training"),
    (OPEN, "client.local-epochs", {"max_steps": 72, "public_size": 40}, 2, 3, "steps of training"),
]


class TestLimits:
    @pytest.mark.parametrize(("settings", "key", "rule", "within", "outside", "called"), BOUNDS)
    def test_a_number_at_its_limit_and_past_it(self, tmp_path, settings, key, rule, within, outside, called):
        ask(tmp_path, settings | {key: within}, **(ANY | rule))
        name, limit = next(iter(rule.items()))
        side, found = "least" if name.startswith("min") else "most", 108 if called else outside
        text = refused("demanded: ", tmp_path, settings | {key: outside}, **(ANY | rule))
        assert text == f"{REFUSED}{called or key} = {found:g}, demanded: at {side} {limit:g}"

    @pytest.mark.parametrize(("settings", "key", "rule", "within", "outside", "called"), BOUNDS)
    def test_without_the_rule_either_will_do(self, tmp_path, settings, key, rule, within, outside, called):
        for value in (within, outside):
            ask(tmp_path, settings | {key: value}, **ANY)

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
                "privacy.client-clipping-norm": norm,
                "privacy.least-clipping-norm": least,
                "privacy.clipping-decay": decay,
            }
            request = request_of_kind(settings=settings, number=number)
            with suppress(PolicyError):
                enforce_policy(request, node_at(settings, node), lambda *_: DONE)
                passed += 1
                assert 0.5 <= request.config.privacy.dp_sgd.mechanism().clipping_norm_in(number) <= 2.0
        assert passed

    @pytest.mark.parametrize("base", [OPEN, GAUSSIAN, DP_SGD])
    def test_no_epoch_of_any_round_is_at_a_rate_past_the_limit(self, tmp_path, base):
        """A schedule gives shares of the rate, whatever rounds and warm-ups a server makes up."""
        rules, tenth = ANY | {"max_learning_rate": 0.5}, {"client.learning-rate": 0.5, "client.local-epochs": 3}
        node = {"policy": str(policy_file(tmp_path, **rules)), "partition-id": 0, "num-partitions": 4}
        for schedule, warmup, final, number in product(
            ("auto", "linear", "cosine"), (0, 3, 99), (0.0, 1.0), (0, 1, 9, 2**31)
        ):
            more = {"client.final-rate-share": final, "client.warmup-rounds": warmup, "client.schedule": schedule}
            settings = base | tenth | more | {"num-rounds": 100}
            request = request_of_kind(settings=settings, number=number)
            assert enforce_policy(request, node_at(settings, node), lambda *_: DONE) is DONE
            plan = requested_plan(request, task_of(request.config.task), 0)
            assert all(0 <= plan.rate(epoch) <= 0.5 for epoch in range(3))
            faster = settings | {"client.learning-rate": 0.6}
            refused("client.learning-rate = 0.6, demanded: at most 0.5", tmp_path, faster, **rules)

    @pytest.mark.parametrize(
        ("more", "found"),
        [
            ({"client.loss-scale": 6.0}, 0.6),
            ({"client.class-weights": "1,1,1,1,1,1,1,1,1,6"}, 0.6),
            ({"client.class-weights": "1,1,1,1,1,1,1,1,1,3", "client.loss-scale": 2.0}, 0.6),
        ],
    )
    def test_what_multiplies_losses_multiplies_the_rate(self, tmp_path, more, found):
        """Unless gradients are clipped after it: then a step is as long as the clip and the rate let it be."""
        rules, slow = ANY | {"max_learning_rate": 0.5}, {"client.learning-rate": 0.1}
        for base in (OPEN, GAUSSIAN):
            text = refused("demanded: at most 0.5", tmp_path, base | slow | more, **rules)
            what = "client.learning-rate times the largest of client.class-weights and client.loss-scale"
            assert text == f"{REFUSED}{what} = {found:g}, demanded: at most 0.5"
        ask(tmp_path, DP_SGD | slow | more, **rules)
        ask(tmp_path, OPEN | slow | {"client.class-weights": "0.1,1,1,1,1,1,1,1,1,5"}, **rules)

    def test_how_many_examples_of_a_group_a_run_may_take(self, tmp_path):
        grouped, rules = DP_SGD | {"task.group": "who"}, ANY | {"group": "who"}
        ask(tmp_path, grouped | {"privacy.group-cap": 10**6}, **rules)
        ask(tmp_path, grouped | {"privacy.group-cap": 20}, **rules, max_group_cap=20)
        past = grouped | {"privacy.group-cap": 21}
        refused("privacy.group-cap = 21, demanded: at most 20", tmp_path, past, **rules, max_group_cap=20)
        ask(tmp_path, DP_SGD, **ANY, max_group_cap=2)

    @pytest.mark.parametrize("settings", [DP_SGD, GAUSSIAN, OPEN])
    def test_steps_that_cannot_be_counted_are_too_many(self, tmp_path, settings):
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
        "privacy.noise-seed = 7 is noise that whoever knows the seed can remove, demanded: -1",
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
            settings | {"privacy.client-noise-multiplier": 0.0},
            TrainRequest,
            [],
            only(settings["privacy.client"]),
            "privacy.client-noise-multiplier = 0.0, demanded: a number above 0",
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
        "privacy.client-noise-multiplier = 5, demanded: at least 6",
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
        assert enforce_policy(request_of_kind(settings=OPEN), node_at(OPEN), lambda *_: DONE) is DONE

    def test_the_next_is_given_the_same(self, tmp_path):
        here = node_at(METRIC, {"policy": str(policy_file(tmp_path)), "partition-id": 0, "num-partitions": 4})
        request, seen = request_of_kind(settings=METRIC, promise=(Gaussian(1.0),)), []
        for held in (here, node_at(METRIC)):
            enforce_policy(request, held, lambda *given: seen.append(given))
            assert seen.pop() == (request, held)

    @pytest.mark.parametrize("kind", [TrainRequest, EvaluateRequest, KeepRequest])
    def test_rows_are_counted_only_where_they_matter(self, tmp_path, monkeypatch, kind):
        monkeypatch.setattr("cloister.client.mods.enforce.local_data", lambda *_: pytest.fail("it was read"))
        rules = ANY | {"scores_may_leave": True}
        ask(tmp_path, OPEN, kind, **rules)
        if kind is not TrainRequest:
            ask(tmp_path, OPEN, kind, **rules, min_rows=10**6)

    def test_as_many_rows_as_demanded_are_enough(self, tmp_path):
        node, rules = own_node(tmp_path), ANY
        ask(tmp_path, OPEN, configured=node, **rules, min_rows=40)
        refused("fewer examples", tmp_path, OPEN, configured=node, **rules, min_rows=41)

    @pytest.mark.parametrize("limit", ["max_epsilon", "max_example_epsilon", "max_leakage"])
    @pytest.mark.parametrize("fraction", [0.0, 0.8])
    def test_rows_are_not_counted_for_a_run_that_a_limit_of_the_node_refuses(self, tmp_path, limit, fraction):
        """By the share of test rows at which the answer changed, a server read which rows there are: uncharged."""
        policy = str(policy_file(tmp_path, **ANY, min_rows=20))
        node = own_node(tmp_path, policy=policy) | {limit.replace("_", "-"): 1.0}
        reply = answer(OPEN | {"task.test-fraction": fraction}, node)
        assert reply.error.reason.startswith("BudgetExhausted: "), "whatever there is"

    def test_the_rows_are_those_of_the_runs_seed(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(
            "cloister.client.mods.enforce.local_data", lambda *given: asked.append(given) or pytest.fail("enough")
        )
        request = request_of_kind(settings=OPEN)
        node = {"policy": str(policy_file(tmp_path, **ANY, min_rows=1)), "partition-id": 2, "num-partitions": 4}
        with pytest.raises(pytest.fail.Exception, match="enough"):
            enforce_policy(request, node_at(OPEN, node), pytest.fail)
        assert asked == [(request.config.task, node_at(OPEN, node).config, request.seed)]

    def test_dp_sgd_without_a_size_has_enough(self, tmp_path):
        """A simulated client: what it was dealt is public, and no minimum is about it."""
        ask(tmp_path, DP_SGD, **only("dp-sgd", min_rows=10**6))

    def test_a_leakage_is_a_word_of_laplace_alone(self, tmp_path):
        rules = only("laplace", max_leakage=0.5) | {"mechanisms": ["laplace", "gaussian"]}
        ask(tmp_path, GAUSSIAN, **rules)

    def test_a_least_clipping_norm_has_no_maximum(self, tmp_path):
        decaying = DP_SGD | {"privacy.clipping-decay": 0.5, "privacy.client-clipping-norm": 9.0}
        ask(tmp_path, decaying | {"privacy.least-clipping-norm": 3.0}, **(ANY | {"min_client_clipping_norm": 0.1}))

    def test_without_decay_a_least_clipping_norm_is_none(self, tmp_path):
        ask(tmp_path, DP_SGD, **(ANY | {"min_client_clipping_norm": 0.1}))

    @pytest.mark.parametrize(
        "settings",
        [
            CHOICE | {"privacy.clusters": 1, "privacy.choice-epsilon": 1.0},
            CLUSTERED | {"privacy.clusters": 2},
            CHOICE | {"privacy.choice": "exact", "privacy.choice-epsilon": 1.0},
            GAUSSIAN,
        ],
    )
    def test_a_choice_that_is_none_or_not_private_has_no_epsilon(self, tmp_path, settings):
        ask(tmp_path, settings, **(ANY | {"max_choice_epsilon": 0.5, "max_hypotheses": 2}))

    def test_mechanisms_of_the_server_are_not_those_of_the_client(self, tmp_path):
        """Noise of a client that is too little is told so, and none of the server's is asked for."""
        weak = GAUSSIAN | {"privacy.client-noise-multiplier": 1.0}
        rules = only("gaussian", min_client_noise_multiplier=2.0) | {"mechanisms": ["global-dp", "gaussian"]}
        text = refused(REFUSED, tmp_path, weak, **rules, max_epsilon=1e6)
        assert text == (
            f"{REFUSED}none of global-dp, gaussian is on as demanded: privacy.server = 'none', not 'global-dp'; "
            "privacy.client-noise-multiplier = 1, demanded: at least 2"
        )

    def test_a_policy_that_allows_bundles_goes_on_to_its_other_rules(self, tmp_path, monkeypatch):
        monkeypatch.setenv(CHECKED_BUNDLE, BUNDLE)
        refused("client.batch-size", tmp_path, METRIC, **ANY, allowed_fabs=[BUNDLE], max_batch_size=1)


class TestAttacks:
    """What passed policies that looked strict."""

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
        found = self.refusal(node, settings | {"privacy.client-noise-multiplier": 0.49})
        assert "privacy.client-noise-multiplier = 0.49, demanded: at least 0.5" in found

    def test_laplace_noise_next_to_none(self, tmp_path, node):
        with pytest.raises(PolicyError, match="cannot be read"):
            ask(tmp_path, LAPLACE, mechanisms=["laplace"], min_server_noise_multiplier=None, min_radius=1.0)
        policy = only("laplace", min_radius=1.0, max_example_epsilon=8.0)
        policy_file(tmp_path, **policy)
        found = self.refusal(node, LAPLACE | {"privacy.client-noise-multiplier": 1e-3, "privacy.radius": 1.0})
        assert found.startswith("BudgetExhausted")

    @pytest.mark.parametrize("settings", [DP_SGD, CLUSTERED | {"privacy.client": "dp-sgd"}])
    def test_two_hypotheses(self, node, settings):
        two = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])
        found = self.refusal(node, settings, message_of(two, hypotheses=2))
        assert "hypotheses = '2'" in found or "privacy.clusters = 2, demanded: at most 1" in found

    def test_clipping_norms_whose_squares_underflow(self, node):
        for norm in (1e-33, 1e-46, 1e-7):
            assert "demanded: at least 1e-06" in self.refusal(node, DP_SGD | {"privacy.client-clipping-norm": norm})

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

    @pytest.mark.parametrize("spoilt", [False, True])
    @pytest.mark.parametrize("count", [3, 30, 40])
    def test_a_refusal_counts_no_rows(self, tmp_path, count, spoilt):
        """A run without noise is refused for that, and not told on how many rows a split leaves."""
        policy = policy_file(tmp_path, **only("dp-sgd", min_rows=30, public_size=40))
        rows = np.full((count, 64), np.nan if spoilt else 0.5)
        np.savez(tmp_path / "own.npz", x=rows, y=np.zeros(count, np.int64))
        node = own_node(tmp_path, tmp_path / "own.npz", policy=str(policy))
        found = self.refusal(node, OPEN | {"task.test-fraction": 0.4})
        assert found == "PolicyError: refused by the policy of this node: privacy.client = 'none', not 'dp-sgd'"
