"""A node's budget and the charges of its replies."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from asking import (
    BALL,
    CHOICE,
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    LAPLACE,
    OPEN,
    SIZED,
    SOFTMAX,
    answer,
    entries_of,
    gaussians,
    ledger_of_node,
    message_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
    write_data,
)
from flwr.app import ConfigRecord, RecordDict
from support import failures

from cloister.client import budget as subject
from cloister.client import ledgers
from cloister.client.budget import keep_budget
from cloister.client.costs import (
    FURTHER,
    PROMISED,
    SCORES,
    PrivacyCost,
)
from cloister.client.ledgers import InMemoryLedger, identity_of
from cloister.client.node import node_of
from cloister.client.noise import leakage_budget, leaked
from cloister.client.request import EvaluateRequest, TrainRequest
from cloister.config.run import parse
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.accounting.filters import GaussianFilter, filter_for
from cloister.privacy.accounting.ledger import DAY, Budget, Ledger, today
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.server.screening import REASON_LENGTH
from cloister.utils.arrays import stacked
from cloister.utils.errors import BudgetExhausted, PolicyError, PrivacyError

DAILY = {"mechanisms": [], "min_server_noise_multiplier": None, "max_messages_per_day": 2, "scores_may_leave": True}
TWO = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])


def charge(request, node):
    """Charge a reply that nothing computes."""
    with keep_budget(request, node):
        pass


@pytest.fixture
def node(tmp_path):
    return own_node(tmp_path)


class TestBudgets:
    def until_refused(self, settings, node, most=50, **fields):
        for number in range(most):
            reply = answer(settings, node, message_of(**fields))
            if reply.has_error():
                assert reply.error.reason.startswith("BudgetExhausted: no budget of this node covers this round")
                assert not any(digit in reply.error.reason for digit in "0123456789")
                return number
        return most

    def test_none_is_passed_and_the_last_release_that_fits_is_made(self, tmp_path_factory):
        def check(key, settings, unit, fields):
            node = own_node(tmp_path_factory.mktemp("node"))
            node |= {key: 6.0}
            made = self.until_refused(settings, node, **fields)
            assert 0 < made < 50
            account = ledger_of_node(node).account(unit)
            assert account.epsilon(1e-5) <= 6.0
            event = entries_of(node, unit)[0].event
            assert account.plus(event, 2).epsilon(1e-5, "pld") > 6.0, "two more would not have fitted"
            # Nothing else was counted in another place for what was not made.
            assert {len(entries_of(node, each)) for each in ("client", "example")} == {made}

        cases = [
            ("max-epsilon", GAUSSIAN, "client", {}),
            ("max-example-epsilon", GAUSSIAN, "example", {}),
            ("max-example-epsilon", DP_SGD, "example", {}),
            ("max-epsilon", GLOBAL, "client", {"privacy_events": gaussians(2.0)}),
        ]
        assert failures(cases, check) == []

    def test_noise_on_everything_spends_the_budget_of_a_group(self, tmp_path):
        """Where steps protect groups, releases by other noise are not counted for examples instead."""
        data = write_data(tmp_path, patient=np.repeat(np.arange(8), 5))
        rules = {"mechanisms": ["dp-sgd", "gaussian"], "min_server_noise_multiplier": None, "public_size": 8}
        policy = policy_file(tmp_path, group="patient", max_example_epsilon=8.0, **rules)
        node = own_node(tmp_path, data, policy=str(policy))
        steps = DP_SGD | {"task.group": "patient", "client.batch-size": 8}
        assert self.until_refused(steps, node) > 0
        assert self.until_refused(GAUSSIAN, node) == 0
        assert not entries_of(node, "example")

    @pytest.mark.parametrize("groups_first", [False, True])
    def test_examples_and_groups_have_no_budget_each(self, tmp_path, groups_first):
        """Neither counts what the other was charged: a site that names groups now and then would have two."""
        data = write_data(tmp_path, patient=np.repeat(np.arange(8), 5))
        node = own_node(tmp_path, data) | {"max-example-epsilon": 20.0}
        runs = [(DP_SGD, node), (DP_SGD | {"task.group": "patient"}, node | {"group": "patient"})]
        first, second = reversed(runs) if groups_first else runs
        assert self.until_refused(*first, most=1) == 1
        assert self.until_refused(*second) == 0
        assert self.until_refused(*first, most=1) == 1

    def test_groups_of_two_kinds_have_no_budget_together(self, tmp_path, caplog):
        """A site that names others would be charged for one of them, and a patient's rows lie in several."""
        data = write_data(tmp_path, patient=np.repeat(np.arange(8), 5), visit=np.arange(40))
        node = own_node(tmp_path, data) | {"max-example-epsilon": 20.0}
        patients, visits = ((DP_SGD | {"task.group": name}, node | {"group": name}) for name in ("patient", "visit"))
        assert self.until_refused(*patients, most=1) == 1
        assert self.until_refused(*visits) == 0
        assert "counted for groups by 'patient': no budget for groups by 'visit' covers them" in caplog.text
        assert self.until_refused(*patients, most=1) == 1
        assert {entry.mechanism for entry in entries_of(node, "group")} == {"dp-sgd, groups by patient"}

    def test_without_a_budget_groups_of_two_kinds_may_train(self, tmp_path):
        """Each release says which groups it is about, and nothing is promised over all of them."""
        node = own_node(tmp_path, write_data(tmp_path, patient=np.repeat(np.arange(8), 5), visit=np.arange(40)))
        for name in ("patient", "visit"):
            assert self.until_refused(DP_SGD | {"task.group": name}, node | {"group": name}, most=1) == 1

    @pytest.mark.parametrize("groups_first", [False, True])
    def test_nor_where_two_processes_enter_them_at_once(self, tmp_path, monkeypatch, groups_first):
        """An entry of another process between the question and the entry counts."""
        data = write_data(tmp_path, who=np.arange(40))
        node = own_node(tmp_path, data, max_example_epsilon=4.0)
        grouped = DP_SGD | {"task.group": "who", "privacy.dp-sgd-noise-multiplier": 2.0}
        alone = DP_SGD | {"privacy.dp-sgd-noise-multiplier": 2.0}
        of_groups = node | {"group": "who"}
        runs = (grouped, of_groups), (alone, node)
        first, then = runs if groups_first else reversed(runs)
        enter = Ledger.open_all

        def after_another(ledger, openings, allow):
            monkeypatch.setattr(Ledger, "open_all", enter)
            ledgers._ledger.cache_clear()
            assert not answer(*first).has_error()
            return enter(ledger, openings, allow)

        monkeypatch.setattr(Ledger, "open_all", after_another)
        assert answer(*then).error.reason.startswith("BudgetExhausted")
        assert not entries_of(node, "example" if groups_first else "group")

    def test_a_policy_that_begins_to_name_groups_needs_a_new_ledger(self, tmp_path):
        data = write_data(tmp_path, patient=np.repeat(np.arange(8), 5))
        rules = {"mechanisms": ["gaussian"], "min_server_noise_multiplier": None, "max_example_epsilon": 20.0}
        node = own_node(tmp_path, data, policy=str(policy_file(tmp_path, **rules)))
        assert self.until_refused(GAUSSIAN, node, most=1) == 1
        policy_file(tmp_path, group="patient", **rules)
        assert self.until_refused(GAUSSIAN, node) == 0
        assert self.until_refused(GAUSSIAN, node | {"data-identity": "groups"}, most=1) == 1

    def test_a_site_that_lists_no_mechanism_of_the_server_believes_no_promise(self, tmp_path):
        rules = {"mechanisms": ["dp-sgd"], "min_server_noise_multiplier": None, "max_epsilon": 1.0}
        node = own_node(tmp_path, policy=str(policy_file(tmp_path, **rules)))
        assert self.until_refused(DP_SGD, node, privacy_events=gaussians(1e6)) == 0
        policy_file(tmp_path, **rules | {"mechanisms": ["dp-sgd", "global-dp"]})
        assert self.until_refused(DP_SGD, node, privacy_events=gaussians(1e6), most=1) == 1

    def test_a_run_does_not_choose_the_filter_of_the_sites_budget(self, tmp_path):
        """A tiny budget at a tiny δ would choose an order at which nothing ever fits."""
        made = []
        for number, strict in enumerate(({}, {"privacy.client-max-epsilon": 1e-9, "privacy.target-delta": 1e-300})):
            node = own_node(tmp_path / str(number)) | {"max-example-epsilon": 8.0}
            assert self.until_refused(DP_SGD | strict, node, most=1) == (not strict)
            made.append(self.until_refused(DP_SGD | {"privacy.dp-sgd-noise-multiplier": 3.0}, node))
            assert ledger_of_node(node).was_set_beforehand("example") and len(ledger_of_node(node).budgets) == 1
        assert 0 < made[0] <= made[1]

    def test_a_promise_does_not_choose_the_filter(self, tmp_path):
        """It is fixed for good, and the server could choose an order at which little fits."""
        node = own_node(tmp_path) | {"max-epsilon": 8.0}
        said = json.dumps({"kind": "pure", "epsilon": 1e-3})
        answer(GLOBAL, node, message_of(privacy_events=[said]))
        assert str(ledger_of_node(node).filter_of("client")) == str(filter_for("gaussian", 8.0, 1e-5))

    def test_a_promise_that_cannot_be_added_up_never_reaches_the_ledger(self, tmp_path_factory):
        def check(epsilon):
            tmp_path = tmp_path_factory.mktemp("case")
            node = own_node(tmp_path)
            said = json.dumps({"kind": "pure", "epsilon": epsilon})
            assert "must be at most 1e+100" in answer(GLOBAL, node, message_of(privacy_events=[said])).error.reason
            assert not answer(GLOBAL, node, message_of(privacy_events=gaussians(2.0))).has_error()
            assert ledger_of_node(node).account("client").epsilon(1e-5) > 0

        assert failures([1e101, 1e308, 10**400], check) == []

    def test_a_pure_release_that_fits_is_made(self, node):
        """ε = 0.65 for the client, twice that for an example; filters leave some of a budget for δ."""
        settings = BALL | {"privacy.laplace-noise-multiplier": 1000.0}
        for key, less in (("max-epsilon", 0.6), ("max-example-epsilon", 1.2)):
            assert self.until_refused(settings, node | {key: less}) == 0
        assert self.until_refused(settings, node | {"max-epsilon": 8.0, "max-example-epsilon": 8.0}, 1) == 1

    def test_the_policys_budget_is_a_budget(self, tmp_path, node):
        rules = {"mechanisms": ["gaussian"], "min_server_noise_multiplier": None, "max_epsilon": 6.0}
        by_policy = self.until_refused(GAUSSIAN, node | {"policy": str(policy_file(tmp_path, **rules))})
        other = own_node(tmp_path / "other") | {"max-epsilon": 6.0}
        assert by_policy == self.until_refused(GAUSSIAN, other) > 0

    def test_nothing_without_a_guarantee_fits(self, tmp_path_factory):
        def check(key, settings):
            node = own_node(tmp_path_factory.mktemp("node"))
            assert self.until_refused(settings, node | {key: 1e9}) == 0

        cases = [
            (key, settings)
            for key in ["max-epsilon", "max-example-epsilon"]
            for settings in [OPEN, LAPLACE, GAUSSIAN | {"privacy.noise-seed": 1}]
        ]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("key", ["max-epsilon", "max-example-epsilon"])
    def test_nor_do_scores(self, node, key):
        settings = OPEN | {"task.test-fraction": 0.5}
        reply = answer(settings, node | {key: 1e9}, message_of(kind="evaluate"))
        assert f"this node has a budget ({key}), and scores" in reply.error.reason
        assert not answer(settings, node, message_of(kind="evaluate")).has_error()

    @pytest.mark.parametrize("settings", [DP_SGD, GAUSSIAN])
    def test_the_runs_own_budget_holds_for_simulated_clients(self, settings):
        limited, here = settings | {"privacy.client-max-epsilon": 5.0}, node_at(settings, SIZED)
        request, made = request_of_kind(settings=limited), 0
        with pytest.raises(BudgetExhausted):
            for _ in range(50):
                charge(request, here)
                made += 1
        unit = "client" if settings is GAUSSIAN else "example"
        assert (
            made > 0 and InMemoryLedger(here.state).account(unit, "add-or-remove", insiders=False).epsilon(1e-5) <= 5.0
        )

    @pytest.mark.parametrize(("settings", "unit"), [(DP_SGD, "example"), (GAUSSIAN, "client")])
    def test_a_client_without_a_memory_counts_the_rounds_in_which_it_may_have_been_drawn(self, settings, unit):
        """Draws are forgotten when such a run breaks off; no budget begins anew when it goes on."""
        here, request = node_at(settings, SIZED), request_of_kind(settings=settings)
        here.state.config_records["assumed"] = ConfigRecord({"rounds": 3, "held-out": False})
        for _ in range(2):
            charge(request, here)
        whole = node_at(settings, SIZED)
        for _ in range(5):
            charge(request, whole)
        found = [
            InMemoryLedger(node.state).account(unit, "add-or-remove", insiders=False).epsilon(1e-5)
            for node in (here, whole)
        ]
        assert found[0] == pytest.approx(found[1]) and 0 < found[1] < math.inf

    def test_of_leakage_too(self):
        settings = BALL | {"privacy.max-leakage": 1e9}
        here, request = node_at(settings, SIZED), request_of_kind(settings=settings)
        here.state.config_records["assumed"] = ConfigRecord({"rounds": 3, "held-out": False})
        (event,) = leaked(request)
        for number in (1, 2):
            leakage_budget(request, here).spend(event, number)
        spent = leakage_budget(request, here).spent()
        assert spent == pytest.approx(5 * event.leakage) and spent > 0

    def test_scores_of_earlier_rounds_are_not_assumed(self):
        here = node_at(GAUSSIAN, SIZED)
        here.state.config_records["assumed"] = ConfigRecord({"rounds": 3, "held-out": False})
        charge(request_of_kind(EvaluateRequest, GAUSSIAN), here)
        assert "client" not in here.state.config_records["assumed"]

    @pytest.mark.parametrize(("settings", "unit"), [(DP_SGD, "example"), (GAUSSIAN, "client")])
    def test_is_judged_at_the_delta_of_the_run_even_after_its_end(self, node, settings, unit):
        """The ledger says under which δ every run began, with a budget of ε or with none."""
        settings = settings | {"privacy.target-delta": 1e-7}
        for ceiling in (500.0, 0.0):
            answer(settings | {"privacy.client-max-epsilon": ceiling}, node)
        found = [(budget.epsilon, budget.delta) for budget in ledger_of_node(node).budgets if budget.unit == unit]
        assert found == [(500.0, 1e-7), (0.0, 1e-7)]

    def test_is_about_the_unit_that_the_mechanism_protects(self):
        """With Gaussian noise the run's budget is the client's: for an example it would be spent four times as fast."""
        here = node_at(GAUSSIAN, SIZED)
        limited = GAUSSIAN | {"privacy.client-max-epsilon": 2.5}
        charge(request_of_kind(settings=limited), here)
        assert InMemoryLedger(here.state).account("example", "add-or-remove", insiders=False).epsilon(1e-5) > 2.5

    @pytest.mark.parametrize("unit", ["client", "example"])
    def test_draws_that_insiders_know_of_amplify_nothing(self, node, unit):
        """Other clients know who was in a cohort of a fixed size: it costs what it would without a draw."""
        drawn = Sampling("without-replacement", cohort=1, population=1000)
        assert self.after_twenty(node, unit, drawn) == 0

    def test_a_secret_draw_of_the_node_does(self, node):
        assert self.after_twenty(node, "example", Sampling("poisson", 0.001)) == 1

    def after_twenty(self, node, unit, sampling):
        """Return whether a weak release still fits into a budget, after twenty draws of one in a thousand."""
        ledger = Ledger(Path(node["ledger-dir"]) / f"{identity_of(node_of(node), 'digits')}.jsonl")
        for _ in range(20):
            ledger.open(Gaussian(1.0, sampling), unit, "before", 1, lambda: None)
        key = "max-epsilon" if unit == "client" else "max-example-epsilon"
        weak = GAUSSIAN | {"privacy.gaussian-noise-multiplier": 100.0}
        return self.until_refused(weak, node | {key: 5.0}, 1)

    def test_nor_in_a_tally(self):
        tally = PrivacyBudget(InMemoryLedger(RecordDict()), "", "client", 1e-5, 5.0, kind="renyi")
        with pytest.raises(BudgetExhausted):
            for _ in range(20):
                with tally.release(Gaussian(1.0, Sampling("without-replacement", cohort=1, population=1000)), 1):
                    pass

    @pytest.mark.parametrize("key", ["max-epsilon", "max-example-epsilon", "target-delta"])
    @pytest.mark.parametrize("value", ["much", True, -1.0, math.nan, math.inf])
    def test_a_budget_that_is_no_number_is_none_that_is_kept(self, node, key, value, caplog):
        reply = answer(GAUSSIAN, node | {key: value})
        assert reply.error.reason == "NodeConfigError: details are in the log of the node"
        assert f"node configuration: {key} = {value!r} is not valid" in caplog.text
        assert not Path(node["ledger-dir"]).exists()

    def test_no_budget_is_none(self):
        node = node_of({})
        assert (node.max_epsilon, node.max_example_epsilon, node.target_delta) == (0.0, 0.0, 1e-5)


class TestMessagesADay:
    @pytest.fixture
    def limited(self, tmp_path, node):
        return node | {"policy": str(policy_file(tmp_path, **DAILY, max_choice_epsilon=1.0))}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (OPEN, {}),
            (GAUSSIAN, {}),
            (DP_SGD, {}),
            (BALL, {}),
            (LAPLACE, {}),
            (GLOBAL, {"privacy_events": gaussians(2.0, 3.0)}),
            (GAUSSIAN | CHOICE, {"arrays": TWO, "hypotheses": 2}),
        ],
    )
    def test_so_many_and_no_more_whatever_each_releases(self, limited, settings, message):
        for _ in range(2):
            assert not answer(settings, limited, message_of(**message)).has_error()
        before = len(ledger_of_node(limited).entries)
        reply = answer(settings, limited, message_of(**message))
        assert reply.error.reason.endswith("max-messages-per-day = 2 were answered")
        assert len(ledger_of_node(limited).entries) == before

    def test_those_that_come_at_the_same_time_are_counted(self, limited, monkeypatch):
        """Two others are answered after this one was let in, and before it is recorded."""
        begin, others = subject.PrivacyBudget.begin, []

        def after_others(budget, run):
            if not others:
                others.append(None)
                others.extend(answer(GAUSSIAN, limited) for _ in range(2))
            begin(budget, run)

        monkeypatch.setattr(subject.PrivacyBudget, "begin", after_others)
        reply = answer(GAUSSIAN, limited)
        assert not any(other.has_error() for other in others[1:])
        assert reply.error.reason.endswith("max-messages-per-day = 2 were answered")

    def test_the_next_day_is_another(self, limited, monkeypatch):
        for _ in range(2):
            answer(OPEN, limited)
        assert answer(OPEN, limited).has_error()
        tomorrow = subject.today() + 86_400
        monkeypatch.setattr(subject, "today", lambda: tomorrow)
        assert not answer(OPEN, limited).has_error()

    def test_scores_and_queries_do_not_count(self, limited):
        settings = OPEN | {"task.test-fraction": 0.5}
        for _ in range(3):
            assert not answer(settings, limited, message_of(kind="evaluate")).has_error()
            assert not answer(settings, limited, message_of(kind="query")).has_error()
        assert not answer(settings, limited).has_error()

    def test_what_was_refused_does_not_count(self, limited):
        for _ in range(5):
            assert answer(OPEN, limited, message_of(more=1)).has_error()
        assert not answer(OPEN, limited).has_error()

    def test_what_failed_does(self, limited):
        limited |= {"data-path": "/nowhere.npz"}
        for _ in range(2):
            assert not answer(GAUSSIAN, limited).has_error()
        assert "max-messages-per-day" in answer(GAUSSIAN, limited).error.reason

    def test_over_runs_and_restarts(self, limited):
        for run in ("1", "2"):
            charge(request_of_kind(run=run), node_at(OPEN, limited))
            ledgers._ledger.cache_clear()
        with pytest.raises(PrivacyError, match="max-messages-per-day"):
            charge(request_of_kind(run="3"), node_at(OPEN, limited))


class TestTheLimitOfAUnit:
    """δ and ε that satisfy the run and the node."""

    def test_is_the_stricter_of_both(self):
        def check(settings, unit, own, expected):
            charge = PrivacyCost(unit, (Gaussian(1.0),))
            assert subject._limit(charge, parse(settings).privacy, node_of(own)) == expected

        cases = [
            (OPEN, "client", {}, (1e-5, 0.0)),
            (OPEN, "example", {"target-delta": 1e-6}, (1e-6, 0.0)),
            (BALL, "client", {"target-delta": 1e-6}, (1e-6, 0.0)),
            (DP_SGD, "client", {"target-delta": 1e-6}, (1e-5, 0.0)),
            (DP_SGD | {"privacy.target-delta": 1e-7}, "client", {}, (1e-7, 0.0)),
            (GAUSSIAN | {"privacy.target-delta": 1e-7}, "example", {}, (1e-7, 0.0)),
            (DP_SGD | {"privacy.client-max-epsilon": 3.0}, "example", {}, (1e-5, 3.0)),
            (DP_SGD | {"privacy.client-max-epsilon": 3.0}, "group", {}, (1e-5, 3.0)),
            (DP_SGD | {"privacy.client-max-epsilon": 3.0}, "client", {}, (1e-5, 0.0)),
            (GAUSSIAN | {"privacy.client-max-epsilon": 3.0}, "client", {}, (1e-5, 3.0)),
            (GAUSSIAN | {"privacy.client-max-epsilon": 3.0}, "example", {}, (1e-5, 0.0)),
            (DP_SGD, "client", {"max-epsilon": 2.0, "target-delta": 1e-6}, (1e-6, 2.0)),
            (DP_SGD, "example", {"max-epsilon": 2.0}, (1e-5, 0.0)),
            (DP_SGD, "example", {"max-example-epsilon": 2.0, "target-delta": 1e-3}, (1e-3, 2.0)),
            (DP_SGD, "group", {"max-example-epsilon": 2.0}, (1e-5, 2.0)),
            (
                DP_SGD | {"privacy.client-max-epsilon": 3.0, "privacy.target-delta": 1e-7},
                "example",
                {"max-example-epsilon": 2.0},
                (1e-7, 2.0),
            ),
            (
                DP_SGD | {"privacy.client-max-epsilon": 1.0, "privacy.target-delta": 1e-3},
                "example",
                {"max-example-epsilon": 2.0, "target-delta": 1e-4},
                (1e-4, 1.0),
            ),
        ]
        assert failures(cases, check) == []

    def test_a_new_budget_of_pure_releases_has_a_rényi_filter(self, node, monkeypatch):
        for events, is_renyi in (((Gaussian(1.0), Pure(1.0)), True), ((Gaussian(1.0),), False), ((), False)):
            monkeypatch.setattr(subject, "privacy_costs_of", lambda *_, events=events: [PrivacyCost("client", events)])
            ((budget, _),) = subject.planned_charges(request_of_kind(), node_at(OPEN, node))
            assert (budget.kind == "renyi") == is_renyi


class TestWhatABudgetWrites:
    def spend(self, settings, node, number=5, kind=TrainRequest, run="seven", **more):
        request = request_of_kind(kind, settings, number=number, run=run, **more)
        charge(request, node_at(settings, node))

    def test_every_line_of_a_message(self, node):
        self.spend(GAUSSIAN | CHOICE | {"privacy.gaussian-clipping-norm": 3.0}, node, models=[SOFTMAX] * 2)
        found = [
            (entry.run, entry.round, entry.unit, entry.mechanism, entry.clip, entry.event, entry.done)
            for entry in ledger_of_node(node).entries
        ]
        first, more = ("gaussian", 3.0), ("in the same message", 3.0)
        assert found == [
            ("seven", 5, "client", *first, Gaussian(2.0), True),
            ("seven", 5, "client", *more, Pure(0.5), True),
            ("seven", 5, "example", *first, Gaussian(1.0), True),
            ("seven", 5, "example", *more, Pure(1.0), True),
        ]

    def test_the_sites_budget_under_the_runs_name(self, node):
        settings = GAUSSIAN | {"privacy.client-max-epsilon": 50.0, "privacy.target-delta": 1e-7}
        self.spend(settings, node | {"max-epsilon": 60.0, "target-delta": 1e-6})
        (budget,) = ledger_of_node(node).budgets
        assert budget == Budget("seven", "client", 1e-6, 60.0, "add-or-remove", GaussianFilter(), today())

    def test_nothing_of_a_run_that_is_refused(self, node):
        node = node | {"max-example-epsilon": 0.1}
        for ceiling in (50.0, 60.0):
            assert answer(GAUSSIAN | {"privacy.client-max-epsilon": ceiling}, node).has_error()
        (budget,) = ledger_of_node(node).budgets
        assert (budget.unit, budget.epsilon) == ("example", 0.1) and not ledger_of_node(node).entries

    def test_pure_releases_choose_the_filter_of_either_unit(self, node):
        self.spend(BALL | {"privacy.laplace-noise-multiplier": 1e6}, node | {"max-epsilon": 60.0})
        (budget,) = ledger_of_node(node).budgets
        assert (budget.unit, str(budget.filter).split(" of ")[0]) == ("client", "Rényi DP")

    def test_an_open_run_of_a_simulated_client_is_not_counted(self):
        here = node_at(OPEN, SIZED)
        charge(request_of_kind(settings=OPEN), here)
        assert not dict(here.state.config_records) and not dict(here.state.metric_records)

    def test_what_stops_a_message_is_logged_and_not_told(self, node, caplog):
        with caplog.at_level("INFO"):
            reply = answer(GAUSSIAN, node | {"max-epsilon": 1e-3})
        assert reply.error.reason == f"BudgetExhausted: {subject.ABSTAINS}"
        (record,) = [record for record in caplog.records if record.name == "cloister.client"]
        assert record.levelname == "WARNING"
        assert ": this client abstains: the next release would bring" in record.message
        assert "100 % of it is left" in record.message and "fewer rounds" not in subject.ABSTAINS
        assert ledger_of_node(node).entries == []

    def test_the_server_keeps_all_of_the_words(self):
        assert len(f"error: code 2: BudgetExhausted: {subject.ABSTAINS}") <= REASON_LENGTH

    def test_after_a_run_without_a_guarantee_the_log_says_that_nothing_helps(self, node, caplog):
        assert not answer(OPEN, node).has_error()
        reply = answer(DP_SGD | {"privacy.client-max-epsilon": 500.0}, node)
        assert reply.error.reason == f"BudgetExhausted: {subject.ABSTAINS}"
        assert "for which nothing can be claimed: no ε up to 500 covers them" in caplog.records[-1].message

    @pytest.mark.parametrize("key", ["max-epsilon", "max-example-epsilon"])
    def test_scores_and_a_budget(self, node, key):
        with pytest.raises(BudgetExhausted) as refused:
            self.spend(OPEN, node | {key: 1e9}, kind=EvaluateRequest)
        assert str(refused.value) == (
            f"this node has a budget ({key}), and scores on its examples would leave without noise"
        )

    @pytest.mark.parametrize("groups_first", [False, True])
    def test_a_budget_of_the_other_unit(self, node, groups_first):
        runs = [DP_SGD, DP_SGD | {"task.group": "patient"}]
        first, second = reversed(runs) if groups_first else runs
        limited = node | {"max-example-epsilon": 500.0}
        self.spend(first, limited)
        with pytest.raises(BudgetExhausted) as refused:
            self.spend(second, limited)
        before, now = ("group", "example") if groups_first else ("example", "group")
        assert str(refused.value.__cause__) == (
            f"ledger-dir/{ledger_of_node(node).path.name} holds releases that were counted for each "
            f"{before}: no budget for each {now} covers them; if this is other data, give it another data-identity"
        ).replace("ledger-dir", str(Path(node["ledger-dir"])))

    def test_without_a_budget_units_do_not_mind_each_other(self, node):
        for settings in (DP_SGD, DP_SGD | {"task.group": "patient"}, DP_SGD):
            self.spend(settings, node)
        assert [len(entries_of(node, unit)) for unit in ("client", "example", "group")] == [3, 2, 1]

    @pytest.mark.parametrize("spent", [1, 2])
    def test_messages_of_a_day(self, tmp_path, node, spent):
        """Those of other days and of scores, and further releases of a message, are none of today's."""
        limited = node | {"policy": str(policy_file(tmp_path, **DAILY))}
        path = Path(node["ledger-dir"]) / f"{identity_of(node_of(node), 'digits')}.jsonl"
        ledger = Ledger(path)
        for mechanism in (SCORES, FURTHER, SCORES):
            ledger.open(Gaussian(1.0), "client", "1", 1, lambda: None, mechanism)
        ledger.open(Gaussian(1.0), "example", "1", 1, lambda: None)
        for _ in range(spent):
            ledger.open(Gaussian(1.0), "client", "1", 1, lambda: None, PROMISED)
        if spent < 2:
            self.spend(GLOBAL, limited)
            return
        with pytest.raises(PolicyError) as refused:
            self.spend(GLOBAL, limited)
        assert str(refused.value) == ("refused by the policy of this node: max-messages-per-day = 2 were answered")

    def test_a_day_is_one_of_utc(self):
        assert today() % DAY == 0


class TestNamesOfData:
    """`data-identity` chooses the ledger: a site that changes it would begin its budgets anew without a word."""

    def test_a_name_that_changes_on_one_path_is_logged_and_noted_in_both_ledgers(self, tmp_path, caplog):
        node = own_node(tmp_path) | {"max-epsilon": 6.0}
        for name in ("first", "second"):
            assert not answer(GAUSSIAN, node | {"data-identity": name}).has_error()
        (said,) = (record for record in caplog.records if "under other names too" in record.message)
        assert said.message.startswith("the data at this place has ledgers under other names too: first. The ledger")
        first, second = (Ledger(Path(node["ledger-dir"]) / f"{name}.jsonl") for name in ("first", "second"))
        assert (first.others, second.others) == (("second",), ("first",))

    def test_no_name_is_noted_of_a_reply_that_is_not_made(self, tmp_path):
        node = own_node(tmp_path) | {"max-epsilon": 1e-6}
        for name in ("first", "second"):
            assert answer(GAUSSIAN, node | {"data-identity": name}).has_error()
        assert not any("place" in path.read_text() for path in Path(node["ledger-dir"]).glob("*.jsonl"))

    def test_data_at_another_path_may_have_another_name(self, tmp_path, caplog):
        for name in ("first", "second"):
            folder = {"ledger-dir": str(tmp_path / "ledgers"), "data-identity": name}
            assert not answer(GAUSSIAN, own_node(tmp_path / name) | folder).has_error()
        assert "under other names" not in caplog.text
