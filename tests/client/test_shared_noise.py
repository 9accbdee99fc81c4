"""A node asked for a step of DP-SGD on a secure sum: what its policy allows, and what its ledger charges."""

from dataclasses import replace

import pytest
from asking import SOFTMAX, context_of, gaussians, message_of, node_at, own_node, policy_file, request_of_kind
from policed import ask, only, refused

from cloister.client.costs import plan_of, privacy_costs_of
from cloister.client.request import TrainRequest, request_of
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian, Repeated, Unaccounted
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.secure_aggregation.epoch import EpochList
from cloister.utils.arrays import Layout
from cloister.utils.errors import PrivacyError

STEPS = {
    "task.model": "softmax",
    "task.test-fraction": 0.0,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 1.5,
    "privacy.dp-sgd-sampling-rate": 0.25,
    "strategy.min-nodes": 5,
    "secure-aggregation.enabled": True,
}
"""Of 5 members, one of which may collude."""
EVENT = Repeated(Gaussian(1.5, Sampling("bounded-poisson", 0.25)), 1)
RELIES = only("dp-sgd", min_colluding=1)


def of_examples(settings, node):
    """The charge for one example, and the clip that it names."""
    (charge,) = [each for each in privacy_costs_of(request_of_kind(settings=settings), node) if each.unit == "example"]
    return charge.events, charge.clip


class TestAPolicy:
    def test_says_how_many_may_collude_or_refuses(self, tmp_path):
        refused(
            "other members add a part of the noise, and this policy sets no min-colluding",
            tmp_path,
            STEPS,
            **only("dp-sgd"),
        )
        ask(tmp_path, STEPS, **RELIES)
        refused(
            "secure-aggregation.colluding = 1, demanded: at least 2", tmp_path, STEPS, **RELIES | {"min_colluding": 2}
        )

    def test_bounds_the_noise(self, tmp_path):
        ask(tmp_path, STEPS, **RELIES, min_dp_sgd_noise_multiplier=1.5)
        refused(
            "as it counts here, = 1.5, demanded: at least 1.6",
            tmp_path,
            STEPS,
            **RELIES,
            min_dp_sgd_noise_multiplier=1.6,
        )

    def test_bounds_the_expected_batch_of_its_own_node(self, tmp_path):
        own = own_node(tmp_path)
        ask(tmp_path, STEPS, configured=own, **RELIES, max_batch_size=10, max_local_epochs=1, max_steps=1)
        refused(
            "client.batch-size = 10, demanded: at most 9", tmp_path, STEPS, configured=own, **RELIES, max_batch_size=9
        )


class TestTheCharge:
    def test_is_that_of_central_dp_sgd_where_the_policy_counts_on_others(self, tmp_path):
        node = own_node(tmp_path) | {"policy": str(policy_file(tmp_path, **RELIES | {"public_size": 40}))}
        assert of_examples(STEPS, node_at(STEPS, node)) == ((EVENT,), 1.0)
        assert of_examples(STEPS, node_at(STEPS)) == ((EVENT,), 1.0), "a simulated node counts on the run"

    def test_is_no_guarantee_where_nobody_but_the_run_says_how_many_collude(self, tmp_path):
        (event,), _ = of_examples(STEPS, node_at(STEPS, own_node(tmp_path)))
        assert event == Unaccounted("no policy of this node has min-colluding")

    def test_is_for_one_share_where_the_provisioner_made_more_keys_than_may_collude(self):
        request, layout = request_of_kind(settings=STEPS), Layout.of(SOFTMAX)
        own = request.config.shared_release
        assert own.unit_events(layout, by_provisioner=1) == (EVENT,)
        asked = replace(request, by_provisioner=("site-1", "site-2"))
        charge = privacy_costs_of(asked, node_at(STEPS))[-1]
        assert charge.events == own.unit_events(layout, by_provisioner=2)
        alone, plan = charge.events[0].event.noise_multiplier, own.plan(layout.size)
        assert alone == pytest.approx(plan.shares.base / plan.steps, rel=1e-6) and alone < 0.8

    def test_has_none_without_noise(self):
        silent = STEPS | {"privacy.dp-sgd-noise-multiplier": 0.0}
        (event,), _ = of_examples(silent, node_at(silent))
        assert isinstance(event, Unaccounted)

    def test_follows_s_of_the_round(self):
        settings = STEPS | {"privacy.clipping-decay": 0.5, "privacy.min-clipping-norm": 0.1}
        request = request_of_kind(settings=settings, number=3)
        (charge,) = [each for each in privacy_costs_of(request, node_at(settings)) if each.unit == "example"]
        assert charge.clip == 0.25 and charge.events == (EVENT,)
        first, third = (parse(settings).shared_release.plan(650, number) for number in (1, 3))
        assert third.bound == pytest.approx(first.bound / 4) and third.steps == first.steps
        assert third.terms() != first.terms(), "members sign S of the round"


def test_a_node_plans_one_step_with_places_for_its_own_size(tmp_path):
    plan = plan_of(request_of_kind(settings=STEPS), node_at(STEPS, own_node(tmp_path)))
    assert (plan.public_size, plan.batch_size, plan.epochs) == (40, 10, 1)


def test_a_server_that_promises_noise_of_its_own_is_refused():
    delivery = EpochList({}).encode()
    context = context_of(STEPS)
    assert request_of(TrainRequest, message_of(secure_message=delivery), context).config.sums_gradients
    with pytest.raises(PrivacyError, match="is not what this node's share of the noise amounts to"):
        request_of(TrainRequest, message_of(secure_message=delivery, privacy_events=gaussians(1000.0)), context)
