"""A node that trained under a guarantee judges no models as an outsider, and the other way round: durably."""

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from asking import (
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    MECHANISMS,
    OPEN,
    answer,
    entries_of,
    gaussians,
    message_of,
    node_at,
    own_node,
    request_of_kind,
)
from flwr.app import ConfigRecord
from support import failures

from cloister.client import ledgers
from cloister.client.app import reply_to
from cloister.client.budget import keep_role
from cloister.client.node import node_of
from cloister.client.request import EvaluateRequest, KeepRequest, TrainRequest
from cloister.privacy.accounting.ledger import Ledger
from cloister.utils.errors import PrivacyError

HELD_OUT = {"evaluation.held-out-clients": 0.5}
RUN = DP_SGD | HELD_OUT
TRAINED = "PrivacyError: this node has trained under a guarantee, and is no held-out client: its scores do not leave"
SCORED = "PrivacyError: this node has scored models of this run as a held-out client, and does not train in it"


def train(node, settings=RUN, run="1", **more):
    return asked("train", node, settings, run, **more)


def score(node, settings=RUN, run="1", **more):
    return asked("evaluate", node, settings, run, **more)


def asked(kind, node, settings, run, **more):
    """An error's text, or nothing; every message meets a process that has read no ledger."""
    ledgers._ledger.cache_clear()
    message = message_of(kind=kind)
    message.metadata.__dict__["_run_id"] = int(run)
    reply = answer(settings, node, message, **more)
    return reply.error.reason if reply.has_error() else ""


class TestOwnData:
    @pytest.mark.parametrize("name", [*MECHANISMS, "global-dp"])
    def test_trained_then_score(self, tmp_path, name):
        node, settings = own_node(tmp_path), MECHANISMS.get(name, GLOBAL) | HELD_OUT
        promise = {"privacy_events": gaussians(2.0)} if name == "global-dp" else {}
        assert not answer(settings, node, message_of(**promise)).has_error()
        assert score(node, settings) == TRAINED
        assert not [entry for entry in entries_of(node, "client") if entry.mechanism == "scores"]

    def test_scored_then_train(self, tmp_path):
        node = own_node(tmp_path)
        assert score(node) == ""
        assert train(node) == SCORED
        assert not [entry for entry in entries_of(node, "example") if entry.mechanism == "dp-sgd"]

    def test_each_role_may_go_on(self, tmp_path):
        one, other = own_node(tmp_path / "one"), own_node(tmp_path / "other")
        for _ in range(3):
            assert train(one) == score(other) == ""

    def test_under_another_id(self, tmp_path):
        """Nodes that restart come back under one; their data is what counts."""
        node = own_node(tmp_path)
        assert train(node, node_id=1) == ""
        assert score(node, node_id=101) == TRAINED

    def test_in_another_run_trained_stays_trained(self, tmp_path):
        node = own_node(tmp_path)
        train(node, run="1")
        assert score(node, run="2") == TRAINED

    def test_in_another_run_who_scored_may_train(self, tmp_path):
        """Scores were sent before anything that this training makes."""
        node = own_node(tmp_path)
        assert score(node, run="1") == train(node, run="2") == ""
        assert score(node, run="2") == TRAINED

    def test_training_in_a_run_that_holds_nobody_out_counts(self, tmp_path):
        node = own_node(tmp_path)
        assert train(node, DP_SGD, run="1") == ""
        assert score(node, run="2") == TRAINED

    def test_in_another_process(self, tmp_path):
        """The role is on the disk, not in a memory."""
        node = own_node(tmp_path)
        assert train(node) == ""
        script = (
            "import sys; sys.path[:0] = sys.argv[1:3]\n"
            "import json; from asking import answer, message_of; from test_roles import RUN\n"
            "print(answer(RUN, json.loads(sys.argv[3]), message_of(kind='evaluate')).error.reason)"
        )
        here = Path(__file__).parent
        done = subprocess.run(
            [sys.executable, "-c", script, str(here), str(here.parent), json.dumps(node)],
            capture_output=True,
            text=True,
            timeout=480,
            check=True,
        )
        assert done.stdout.strip() == TRAINED

    def by_another_process(self, node, kind):
        """Do the same in a process with a ledger of its own in its memory."""
        kept = ledgers._ledger
        ledgers._ledger = lru_cache(Ledger)
        try:
            message = message_of(kind=kind)
            assert not answer(RUN, node, message).has_error()
        finally:
            ledgers._ledger = kept

    @pytest.mark.parametrize(
        ("kind", "meanwhile", "says"), [("evaluate", "train", TRAINED), ("train", "evaluate", SCORED)]
    )
    def test_a_process_of_many_messages_reads_what_others_wrote(self, tmp_path, kind, meanwhile, says):
        node = own_node(tmp_path)
        ledgers.ledger_of(node_of(node), "digits")
        self.by_another_process(node, meanwhile)
        assert answer(RUN, node, message_of(kind=kind)).error.reason == says

    @pytest.mark.parametrize(
        ("kind", "meanwhile", "says"), [("evaluate", "train", TRAINED), ("train", "evaluate", SCORED)]
    )
    def test_of_two_processes_at_once_the_second_has_no_other_role(self, tmp_path, monkeypatch, kind, meanwhile, says):
        """It was asked, and another process enters the other role before this one enters its own."""
        node, enter = own_node(tmp_path), Ledger.open_all

        def after_another(ledger, *args, **more):
            monkeypatch.setattr(Ledger, "open_all", enter)
            self.by_another_process(node, meanwhile)
            return enter(ledger, *args, **more)

        monkeypatch.setattr(Ledger, "open_all", after_another)
        assert answer(RUN, node, message_of(kind=kind)).error.reason == says
        mechanisms = {entry.mechanism for entry in entries_of(node, "example")}
        assert mechanisms == ({"dp-sgd"} if meanwhile == "train" else {"scores"})

    def test_a_message_that_was_refused_gave_no_role(self, tmp_path):
        node = own_node(tmp_path) | {"public-size": 0}
        assert "public-size" in train(node)
        assert score(node | {"public-size": 40}) == ""

    def test_nothing_of_the_folder_is_told(self, tmp_path):
        node = own_node(tmp_path)
        train(node)
        (path,) = (tmp_path / "ledgers").glob("*.jsonl")
        path.write_text(path.read_text().replace("poisson", "Poisson"))
        found = score(node)
        assert found.startswith("LedgerError") and str(tmp_path) not in found


class TestSimulated:
    def ask(self, here, kind, settings=RUN, run="1"):
        keep_role(request_of_kind(kind, settings, run=run), here)

    @pytest.mark.parametrize(
        ("first", "then", "says"),
        [(TrainRequest, EvaluateRequest, "has trained"), (EvaluateRequest, TrainRequest, "has scored")],
    )
    def test_the_state_remembers(self, first, then, says):
        here = node_at(RUN)
        self.ask(here, first)
        self.ask(here, first)
        with pytest.raises(PrivacyError, match=says):
            self.ask(here, then)

    def test_another_client_has_a_role_of_its_own(self):
        self.ask(node_at(RUN), TrainRequest)
        self.ask(node_at(RUN, {"partition-id": 1, "num-partitions": 4}), EvaluateRequest)

    def test_a_query_is_no_role(self):
        here = node_at(RUN)
        for first, then in ((KeepRequest, TrainRequest), (KeepRequest, EvaluateRequest)):
            here = node_at(RUN)
            self.ask(here, first)
            self.ask(here, then)
            self.ask(here, first)

    def test_other_runs_have_no_roles(self):
        def check(settings):
            here = node_at(settings)
            for kind in (TrainRequest, EvaluateRequest, TrainRequest):
                self.ask(here, kind, settings)

        cases = [(settings,) for settings in [OPEN | HELD_OUT, DP_SGD, GAUSSIAN, OPEN | {"task.test-fraction": 0.2}]]
        assert failures(cases, check) == []

    def test_the_texts(self):
        for first, then, says in ((TrainRequest, EvaluateRequest, TRAINED), (EvaluateRequest, TrainRequest, SCORED)):
            here = node_at(RUN)
            self.ask(here, first)
            with pytest.raises(PrivacyError) as refused:
                self.ask(here, then)
            assert f"PrivacyError: {refused.value}" == says

    def test_scores_of_another_run_do_not_count(self):
        here = node_at(RUN)
        self.ask(here, EvaluateRequest, run="1")
        self.ask(here, TrainRequest, run="2")

    def test_the_state_says_which(self):
        trained, scored, neither = node_at(RUN), node_at(RUN), node_at(RUN)
        self.ask(trained, TrainRequest, run="7")
        self.ask(scored, EvaluateRequest, run="8")
        self.ask(neither, KeepRequest)
        found = [dict(each.state.config_records["roles"]) for each in (trained, scored, neither)]
        assert found == [{"trained": True}, {"scored-in-run": "8"}, {}]

    def test_a_role_is_given_before_the_answer(self):
        """A reply that fails on its way may have been seen."""
        here = node_at(RUN)
        with pytest.raises(ZeroDivisionError):
            reply_to(request_of_kind(settings=RUN), here, lambda *_: 1 / 0)
        assert dict(here.state.config_records["roles"]) == {"trained": True}

    @pytest.mark.parametrize(("held_out", "kind"), [(False, EvaluateRequest), (True, TrainRequest)])
    def test_without_a_memory_of_earlier_rounds_it_had_the_role_that_the_run_deals_it(self, held_out, kind):
        here = node_at(RUN)
        here.state.config_records["assumed"] = ConfigRecord({"rounds": 3, "held-out": held_out})
        with pytest.raises(PrivacyError):
            self.ask(here, kind)
        self.ask(here, TrainRequest if kind is EvaluateRequest else EvaluateRequest)
