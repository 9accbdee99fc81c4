"""Rounds of secure aggregation through the strategy, the grid and the app."""

import gc
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from secure_runs import MODEL, PHASES, SecureRun, app_with, phase_of, random_updates, settings
from secure_twins import Held, both

from cloister.client import round_state, secure
from cloister.flower.messages import assume_run
from cloister.privacy.accounting.events import DistributedGaussian, Unaccounted
from cloister.privacy.mechanisms.distributed.plan import quantize_update
from cloister.secure_aggregation.messages import (
    Advertisement,
    Delivery,
    MaskedInput,
    SealedShares,
    Signatures,
    Survivors,
)
from cloister.secure_aggregation.messages import Cohort as Members
from cloister.server import secure_sum
from cloister.server.exchanges import decoded
from cloister.server.screening import Unfit
from cloister.server.strategy_wrapper import Measurements
from cloister.utils.arrays import Layout, from_record, to_record
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, FederationError, ProtocolError
from cloister.utils.wire import CLIPPING_NORM, DISTANCE, SECURE, SECURE_MESSAGE, SECURE_STEP

LAYOUT = Layout.of(MODEL)


def whole(update, plan):
    """Return a client's addend to the sum, without noise."""
    row = LAYOUT.rows({name: MODEL[name] + update[name] for name in MODEL})
    return quantize_update(Cohort.of(LAYOUT, LAYOUT.rows(MODEL), (row,)), plan)


def sum_of(updates, plan):
    return sum(whole(update, plan) for update in updates)


def reasons(summed):
    return {one.node_id: one.detail for one in summed.rejected}


lost = st.dictionaries(st.integers(1, 5), st.sampled_from(PHASES), max_size=3)


class TestTheSum:
    @given(gone=lost)
    @effort(max_examples=8, deadline=None, derandomize=True)
    def test_is_that_of_the_survivors_exactly_or_unknown(self, gone, tmp_path_factory):
        self.check(gone, 5, 4, tmp_path_factory.mktemp("run"))

    @pytest.mark.slow
    @given(data=st.data())
    @effort(max_examples=80, deadline=None, derandomize=True)
    def test_is_so_for_cohorts_of_all_sizes(self, data, tmp_path_factory):
        clients = data.draw(st.integers(3, 9))
        threshold = data.draw(st.integers(clients // 2 + 1, clients).filter(lambda t: t > 1))
        gone = data.draw(st.dictionaries(st.integers(1, clients), st.sampled_from(PHASES)))
        self.check(gone, clients, threshold, tmp_path_factory.mktemp("run"))

    def check(self, gone, clients, threshold, folder):
        updates = random_updates(clients)
        run = SecureRun(settings(folder, clients, threshold, z=0.0), updates, gone)
        summed = run.collect()
        left = {phase: [n for n in range(1, clients + 1) if not self.lost_by(gone, n, phase)] for phase in PHASES}
        asked_for_vectors = min(len(left["advertise"]), len(left["share"])) >= threshold
        assert len(run.spent()) == asked_for_vectors
        if len(left["unmask"]) < threshold:
            assert summed.sum is None
            arrays, _ = run.strategy.aggregate_train(1, summed)
            assert arrays is None and run.strategy.measured.abandoned
            assert (run.strategy.measured.accepted, run.strategy.measured.rejected) == (0, summed.rejected)
        else:
            assert summed.sum.survivors == len(left["mask"])
            there = [updates[node - 1] for node in left["mask"]]
            assert np.array_equal(summed.sum.total, sum_of(there, run.strategy.mechanism.plan(LAYOUT.size)))

    @staticmethod
    def lost_by(gone, node, phase):
        return node in gone and PHASES.index(gone[node]) <= PHASES.index(phase)

    def test_becomes_the_mean_of_those_who_are_left(self, tmp_path):
        updates = random_updates(5, scale=0.02)
        run = SecureRun(settings(tmp_path, z=0.0), updates, {2: "mask"})
        arrays, _ = run.strategy.aggregate_train(1, run.collect())
        left = [updates[number] for number in (0, 2, 3, 4)]
        for name, array in from_record(arrays).items():
            assert array.dtype == np.float32
            assert np.allclose(array, sum(update[name] for update in left) / 4, atol=1e-6)
        measured = run.strategy.measured
        assert (measured.asked, measured.accepted, [one.node_id for one in measured.rejected]) == (5, 4, [2])

    def test_counts_an_update_that_is_not_finite_as_zero(self, tmp_path):
        updates = random_updates(5)
        updates[3]["softmax/bias"][0] = np.nan
        run = SecureRun(settings(tmp_path, z=0.0), updates)
        plan = run.strategy.mechanism.plan(LAYOUT.size)
        assert np.array_equal(run.collect().sum.total, sum_of([one for n, one in enumerate(updates) if n != 3], plan))

    def test_bounds_a_long_update_on_the_client(self, tmp_path):
        updates = random_updates(5, scale=0.0)
        updates[0] = {name: np.full_like(array, 100.0) for name, array in MODEL.items()}
        run = SecureRun(settings(tmp_path, z=0.0), updates)
        plan = run.strategy.mechanism.plan(LAYOUT.size)
        total = run.collect().sum.total
        assert 0.99 * plan.steps < np.linalg.norm(total.astype(float)) <= plan.steps

    def test_nobody_sends_anything_else_than_messages_of_the_protocol(self, tmp_path):
        run = SecureRun(settings(tmp_path), random_updates(5))
        run.collect()
        assert len(run.answered) == 25
        for reply in run.answered:
            (record,) = reply.content.array_records.values()
            assert set(record) <= {SECURE_MESSAGE, "roster"}
            assert not reply.content.config_records
            assert not any(reply.content.metric_records.values())


def deviations(run, updates, rounds):
    """The noise in sums, divided by the deviation that it should have, and the number of survivors."""
    plan, found = run.strategy.mechanism.plan(LAYOUT.size), []
    for number in range(1, rounds + 1):
        summed = run.collect(number)
        noise = summed.sum.total - sum_of(updates[: summed.sum.survivors], plan)
        found.append(noise / (summed.sum.survivors * plan.shares.left(summed.sum.survivors)) ** 0.5)
    return np.concatenate(found)


def is_standard(sample):
    """Return whether variance and mean are those of a standard normal, to five deviations on both sides."""
    size = len(sample)
    return abs(sample.var() - 1) < 5 * (2 / size) ** 0.5 and abs(sample.mean()) < 5 / size**0.5


class TestTheNoise:
    def sample(self, folder, gone=None, rounds=3):
        updates = random_updates(5)
        return deviations(SecureRun(settings(folder, threshold=3), updates, gone), updates, rounds)

    @pytest.mark.parametrize("gone", [{}, {5: "mask"}])
    def test_has_the_variance_that_is_charged_whoever_is_left(self, gone, tmp_path):
        assert is_standard(self.sample(tmp_path, gone))

    def test_a_server_that_leaves_the_surplus_in_has_more(self, tmp_path, monkeypatch):
        monkeypatch.setattr(secure_sum, "without_surplus", lambda total, *_: total)
        assert not is_standard(self.sample(tmp_path))

    def test_clients_that_add_none_are_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr(secure, "add_noise", lambda *_: None)
        assert not is_standard(self.sample(tmp_path))

    def test_of_survivors_that_vanish_before_they_unmask_stays_as_it_is(self, tmp_path):
        # Three shares of a fifth of the variance, and two of a third.
        assert 1.05 < self.sample(tmp_path, {4: "unmask", 5: "unmask"}, rounds=4).var() < 1.5


class TestCharges:
    def test_a_round_is_one_event_at_the_server(self, tmp_path):
        run = SecureRun(settings(tmp_path, colluding=1), random_updates(5))
        run.collect()
        (event,) = run.spent()
        assert isinstance(event, DistributedGaussian) and event.honest == 3
        assert event.multiplier("add-or-remove", True) == pytest.approx(1.0, rel=1e-6)

    def test_a_round_that_is_finished_says_what_was_measured_and_is_spent(self, tmp_path, monkeypatch):
        run = SecureRun(settings(tmp_path, 6), random_updates(6), {5: "advertise", 3: "unmask"})
        aggregate, noted = run.strategy.inner.aggregate_train, []

        def noting(server_round, replies):
            noted.append((server_round, len(replies)))
            return aggregate(server_round, replies)

        monkeypatch.setattr(run.strategy.inner, "aggregate_train", noting)
        summed = run.collect(7)
        assert run.strategy.aggregate_train(7, summed)[0] is not None and noted == [(7, 1)]
        (entry,) = run.plan.budget.ledger.entries
        assert (entry.round, entry.mechanism, entry.clip, entry.done) == (7, "global-dp", 1.0, True)
        noise = run.strategy.mechanism.multiplier * run.strategy.mechanism.factor
        assert run.strategy.measured == Measurements(
            asked=6,
            accepted=5,
            rejected=summed.rejected,
            noise_std=noise / 5,
            noise_multiplier=noise,
            sensitivity=1 / 5,
            clipping_norm=1.0,
            epsilon=run.strategy.budget.epsilon(),
        )
        assert 0 < run.strategy.measured.epsilon < np.inf
        assert [(one.node_id, one.code) for one in summed.rejected] == [(3, "error"), (5, "error")]
        assert (summed.sum.survivors, summed.sum.shown, summed.accepted) == (5, 4, ())
        assert summed.examples == (1.0,) * 5 == tuple(summed.cohort.factors) and not summed.cohort.norms.any()

    @pytest.mark.parametrize("phase", ["mask", "unmask"])
    def test_a_round_that_is_abandoned_stays_charged_and_says_what_is_spent(self, phase, tmp_path, caplog):
        run = SecureRun(settings(tmp_path), random_updates(5), {2: phase, 1: phase})
        summed = run.collect()
        assert run.strategy.aggregate_train(1, summed) == (None, None)
        spent = run.strategy.budget.epsilon()
        assert 0 < spent < np.inf and len(run.spent()) == 1
        assert run.strategy.measured == Measurements(5, 0, summed.rejected, epsilon=spent, abandoned=True)
        assert [one.node_id for one in summed.rejected] == [1, 2]
        assert (summed.sum, summed.examples) == (None, ())
        (told,) = [record for record in caplog.records if record.name == "cloister.server"]
        assert told.getMessage().startswith("round 1 was abandoned: 3 ") and told.levelname == "WARNING"

    def test_a_round_without_anybody_spends_nothing(self, tmp_path, caplog):
        run = SecureRun(settings(tmp_path), random_updates(5), dict.fromkeys(range(1, 6), "advertise"))
        asked = run.messages()
        for nodes in (asked, list(asked)[:1], []):
            assert run.strategy.collect(1, nodes, run.send).sum is None and not run.spent()
        told = [record.getMessage() for record in caplog.records if record.name == "cloister.server"]
        assert told == ["round 1 was abandoned: no node has advertised keys"] * 3

    def test_the_budget_ends_a_run_before_anybody_is_asked(self, tmp_path):
        from cloister.utils.errors import BudgetExhausted

        run = SecureRun(settings(tmp_path, **{"privacy.max-epsilon": 0.5}), random_updates(5))
        with pytest.raises(BudgetExhausted):
            run.messages()
        assert not run.spent()

    def entries(self, folder, rules):
        """Return each node's ledger after a round; one is lost before it shares, one before it signs."""
        policy = folder / "policy.toml"
        policy.write_text(f'tasks = ["digits"]\nmechanisms = ["global-dp"]\nmax-epsilon = 90.0\n{rules}\n')
        own = [{"policy": str(policy), "ledger-dir": str(folder / str(n))} for n in range(5)]
        nodes = [{"partition-id": n, "num-partitions": 5, **node} for n, node in enumerate(own)]
        run = SecureRun(settings(folder, colluding=1), random_updates(5), {2: "share", 3: "sign"}, nodes)
        run.collect()
        from cloister.client.ledgers import ledger_of
        from cloister.client.node import node_of

        return run.spent(), [ledger_of(node_of(node), "digits").entries for node in nodes]

    def test_nodes_count_what_they_added_themselves(self, tmp_path):
        (own,), found = self.entries(tmp_path, "min-colluding = 1")
        for number, entries in enumerate(found, start=1):
            expected = [] if number == 2 else [("client", own), ("example", own.replaced())]
            assert [(entry.unit, entry.event) for entry in entries] == expected
            assert {entry.mechanism for entry in entries} <= {"secure-aggregation"}

    def test_nodes_count_on_no_others_for_their_examples_unless_a_rule_says_how_many_may_collude(self, tmp_path):
        (own,), found = self.entries(tmp_path, "")
        for number, entries in enumerate(found, start=1):
            expected = (
                []
                if number == 2
                else [("client", own), ("example", Unaccounted("no policy of this node has min-colluding"))]
            )
            assert [(entry.unit, entry.event) for entry in entries] == expected


def message(run, node, step, content=b"", number=1):
    fields = {"server-round": number, "seed": 3, SECURE_STEP: step, SECURE_MESSAGE: content}
    return Message(RecordDict({"config": ConfigRecord(fields)}), node, SECURE)


def replied(sent, answer, **more):
    """A reply that holds a message of the protocol."""
    packed = {SECURE_MESSAGE: np.frombuffer(answer.encode(), np.uint8)}
    return Message(RecordDict({"arrays": to_record(packed | more)}), reply_to=sent)


def reply_to(run, sent):
    (reply,) = run.grid.send_and_receive([sent])
    return reply


class TestANodeRefuses:
    def refusal(self, run, sent, says):
        reply = reply_to(run, sent)
        assert reply.has_error()
        assert says in reply.error.reason, reply.error.reason
        return reply.error.reason

    def run(self, folder, **more):
        from cloister.client.app import app

        return SecureRun(settings(folder, **more), random_updates(5), app=app)

    def trains(self, run, **fields):
        config = ConfigRecord({"server-round": 1, "seed": 3, **fields})
        return Message(RecordDict({"arrays": to_record(MODEL), "config": config}), 1, "train")

    def test_to_send_a_model_that_is_not_masked(self, tmp_path):
        self.refusal(self.run(tmp_path), self.trains(None), "'secure-message' must be in the server's message")

    def test_to_train_out_of_turn(self, tmp_path):
        from cloister.secure_aggregation.messages import Delivery

        empty = {SECURE_MESSAGE: Delivery((), {}).encode()}
        run = self.run(tmp_path)
        self.refusal(run, self.trains(None, **empty), "takes part in no attempt at round 1")
        assert not reply_to(run, message(run, 1, "advertise")).has_error()
        self.refusal(run, self.trains(None, **empty), "out of turn")

    def test_another_promise_than_its_own_share_amounts_to(self, tmp_path):
        run = self.run(tmp_path)
        (asked, *_) = run.messages()
        config = asked.content.config_records["config"]
        (promise,) = config["privacy-events"]
        config["privacy-events"] = [promise.replace('"honest": 4', '"honest": 5')]
        config[SECURE_MESSAGE] = b""
        self.refusal(run, asked, "no Delivery")
        from cloister.secure_aggregation.messages import Delivery

        config[SECURE_MESSAGE] = Delivery((), {}).encode()
        self.refusal(run, asked, "is not what this node's share of the noise amounts to")

    def test_a_promise_of_shares_where_nobody_adds_any(self, tmp_path):
        run = self.run(tmp_path)
        (asked, *_) = run.messages()
        promise = asked.content.config_records["config"]["privacy-events"]
        plain = dict.fromkeys(("enabled", "threshold", "colluding"))
        keys = {key: value for key, value in settings(tmp_path).items() if key.rpartition(".")[2] not in plain}
        from cloister.client.app import app

        run = SecureRun(keys, random_updates(5), app=app)
        self.refusal(run, self.trains(None, **{"privacy-events": promise}), "counts on shares of noise")

    def test_other_settings_than_the_attempt_began_with(self, tmp_path):
        run = self.run(tmp_path)
        assert not reply_to(run, message(run, 1, "advertise")).has_error()
        for context in run.grid._contexts.values():
            context.run_config["privacy.noise-multiplier"] = 9.0
        assert self.refusal(run, message(run, 1, "share"), "settings") == (
            "ProtocolError: the settings of the run have changed since the attempt at round 1 began"
        )

    def test_a_second_attempt_at_a_round(self, tmp_path):
        run = self.run(tmp_path)
        assert not reply_to(run, message(run, 1, "advertise", number=2)).has_error()
        for number in (2, 1):
            self.refusal(run, message(run, 1, "advertise", number=number), "has begun round")
        assert not reply_to(run, message(run, 1, "advertise", number=3)).has_error()

    @pytest.mark.parametrize("step", ["share", "sign", "unmask"])
    def test_a_step_without_an_attempt(self, step, tmp_path):
        run = self.run(tmp_path)
        assert self.refusal(run, message(run, 1, step), "no attempt") == (
            "ProtocolError: this node takes part in no attempt at round 1, or not any more"
        )

    @pytest.mark.parametrize("step", ["", "mask", "reveal"])
    def test_a_step_that_there_is_not(self, step, tmp_path):
        self.refusal(self.run(tmp_path), message(None, 1, step), "as a step of the protocol")

    def test_steps_in_a_run_without_secure_aggregation(self, tmp_path):
        from cloister.client.app import app

        run = SecureRun({"output-dir": str(tmp_path), "task.model": "softmax"}, random_updates(2), app=app)
        self.refusal(run, message(run, 1, "advertise"), "this run has none")

    def test_to_take_part_without_a_key(self, tmp_path):
        from cloister.client.app import app

        run = SecureRun(settings(tmp_path), random_updates(5), nodes=[{"partition-id": 0}] * 5, app=app)
        self.refusal(run, message(run, 1, "advertise"), "no signing key")


class TestPolicies:
    """The noise is the node's own: it goes by what it adds, not by what the server promises."""

    KEPT = ("min-server-noise-multiplier = 1.0", "min-threshold = 4", "max-colluding = 1")

    def refusal(self, folder, *rules, demanded="true"):
        demands = (f"demands-secure-aggregation = {demanded}", 'mechanisms = ["global-dp"]', 'tasks = ["digits"]')
        (folder / "policy.toml").write_text("\n".join((*demands, *rules)))
        first = {"policy": str(folder / "policy.toml"), "ledger-dir": str(folder / "ledgers")}
        nodes = [{"partition-id": n, "num-partitions": 5, **(first if n == 0 else {})} for n in range(5)]
        return reasons(SecureRun(settings(folder, colluding=1), random_updates(5), nodes=nodes).collect()).get(1, "")

    def test_that_are_kept(self, tmp_path):
        assert not self.refusal(tmp_path, *self.KEPT)

    def test_bind_where_it_is_not_demanded(self, tmp_path):
        rules = ("max-epsilon = 90.0", "min-colluding = 2")
        said = self.refusal(tmp_path, *rules, demanded="false")
        assert "secure-aggregation.colluding = 1, demanded: at least 2" in said

    @pytest.mark.parametrize(
        ("rules", "says"),
        [
            (["min-server-noise-multiplier = 1.01"], "promises a noise multiplier of 1, demanded: at least 1.01"),
            (["max-epsilon = 3.0", "min-threshold = 5"], "secure-aggregation.threshold = 4, demanded: at least 5"),
            (["max-epsilon = 3.0"], "no budget of this node covers this round"),
        ],
    )
    def test_that_are_not(self, rules, says, tmp_path):
        assert says in self.refusal(tmp_path, *rules)


class TestWhatSpendsNothing:
    """A round that a node cannot go on with is refused before anything is charged."""

    @pytest.mark.parametrize(
        ("limit", "told"),
        [({"max-epsilon": 0.5}, "no budget of this node covers"), ({"max-leakage": 0.5}, "has a limit (max-leakage)")],
    )
    def test_nodes_without_budget_abstain_before_others_count_on_them(self, tmp_path, limit, told):
        nodes = [{"partition-id": n, "num-partitions": 5, "ledger-dir": str(tmp_path / str(n))} for n in range(5)]
        poor = [node | limit for node in nodes[:2]]
        run = SecureRun(settings(tmp_path), random_updates(5), nodes=[*poor, *nodes[2:]])
        summed = run.collect()
        assert summed.sum is None and not run.spent()
        assert all(told in reasons(summed)[node] for node in (1, 2))
        assert {phase_of(one) for one in run.asked} == {"advertise"}
        self.check_ledgers_are_empty(nodes)

    def test_fewer_members_than_the_threshold(self, tmp_path):
        nodes = [{"partition-id": n, "num-partitions": 5, "ledger-dir": str(tmp_path / str(n))} for n in range(5)]
        inner = app_with(random_updates(5))

        def told_of_few(sent, context):
            if phase_of(sent) == "mask":
                config = sent.content.config_records["config"]
                whole = Delivery.decode(config[SECURE_MESSAGE])
                config[SECURE_MESSAGE] = Delivery(whole.sharers[:3], {}).encode()
            return inner(sent, context)

        summed = SecureRun(settings(tmp_path), random_updates(5), nodes=nodes, app=told_of_few).collect()
        assert len(summed.rejected) == 5 and "3 members left; the threshold is 4" in reasons(summed)[1]
        self.check_ledgers_are_empty(nodes)

    def check_ledgers_are_empty(self, nodes):
        from cloister.client.ledgers import ledger_of
        from cloister.client.node import node_of

        assert not any(list(ledger_of(node_of(node), "digits").entries) for node in nodes)


class TestAServerThatAsksForMore:
    """Each stops at the node: what it has refused, or said once, it does not say again."""

    def after(self, folder, phase):
        """A run that has gone up to a phase, and the last message that the first node got in it."""
        run = SecureRun(settings(folder), random_updates(5), dict.fromkeys(range(1, 6), phase))
        run.collect()
        run.grid._client_app = app_with(random_updates(5))
        of_first = [one for one in run.asked if one.metadata.dst_node_id == 1 and phase_of(one) == phase]
        return run, of_first[-1].content

    def ask(self, run, content, kind=SECURE):
        return reply_to(run, Message(content, 1, kind))

    def test_two_lists_of_survivors(self, tmp_path):
        run, content = self.after(tmp_path, "sign")
        assert not self.ask(run, content).has_error()
        fewer = content.config_records["config"]
        survivors = Survivors.decode(fewer[SECURE_MESSAGE])
        names = survivors.names[:4]
        fewer[SECURE_MESSAGE] = Survivors(names, {name: survivors.signatures[name] for name in names}).encode()
        assert "out of turn" in self.ask(run, content).error.reason
        assert "no attempt" in self.ask(run, content).error.reason

    def test_survivors_below_the_threshold(self, tmp_path):
        run, content = self.after(tmp_path, "sign")
        config = content.config_records["config"]
        survivors = Survivors.decode(config[SECURE_MESSAGE])
        names = survivors.names[:3]
        config[SECURE_MESSAGE] = Survivors(names, {name: survivors.signatures[name] for name in names}).encode()
        assert "3 survivors; the threshold is 4" in self.ask(run, content).error.reason

    def test_shares_twice(self, tmp_path):
        run, content = self.after(tmp_path, "unmask")
        assert not self.ask(run, content).has_error()
        assert "no attempt" in self.ask(run, content).error.reason

    def test_shares_without_enough_signatures(self, tmp_path):
        run, content = self.after(tmp_path, "unmask")
        config = content.config_records["config"]
        signatures = Signatures.decode(config[SECURE_MESSAGE]).signatures
        config[SECURE_MESSAGE] = Signatures(dict(list(signatures.items())[:3])).encode()
        assert "3 survivors have signed" in self.ask(run, content).error.reason

    def test_a_cohort_of_invented_members(self, tmp_path):
        run, content = self.after(tmp_path, "share")
        config = content.config_records["config"]
        honest = Members.decode(config[SECURE_MESSAGE]).advertisements
        keys = {name: Ed25519PrivateKey.generate() for name in ("site-a", "site-b", "site-c")}
        invented = tuple(Advertisement(n, os.urandom(32), os.urandom(32), k.sign(b"x")) for n, k in keys.items())
        config[SECURE_MESSAGE] = Members((honest[0], *invented)).encode()
        assert "'site-a' is not on the roster" in self.ask(run, content).error.reason

    def test_the_vector_twice(self, tmp_path):
        run, content = self.after(tmp_path, "mask")
        assert not self.ask(run, content, "train").has_error()
        assert "out of turn" in self.ask(run, content, "train").error.reason
        assert "no attempt" in self.ask(run, content, "train").error.reason


class TestWhatANodeRemembers:
    def test_no_secret_is_in_what_may_be_written_to_a_disk(self, tmp_path):
        run = SecureRun(settings(tmp_path), random_updates(5), {1: "unmask"})
        run.collect()
        assert {str(memory) for memory in run.grid.memories().values()} == {
            str({"config": {"secure-round": {"run": "1", "round": 1}}, "metrics": {}})
        }

    def test_nothing_is_left_of_a_round_that_was_finished(self, tmp_path):
        run = SecureRun(settings(tmp_path), random_updates(5), {1: "unmask"})
        run.collect()
        places = {node: id(context.state) for node, context in run.grid._contexts.items()}
        assert [node for node, place in places.items() if round_state._memories[place].attempt] == [1]
        del run
        gc.collect()
        assert not any(place in round_state._memories for place in places.values())

    def test_a_run_that_goes_on_does_not_make_a_round_again(self, tmp_path):
        updates = random_updates(5)
        run = SecureRun(settings(tmp_path), updates)
        run.collect(2)
        resumed = SecureRun(settings(tmp_path), updates)
        resumed.grid.remember(run.grid.memories())
        before = len(resumed.spent())
        summed = resumed.collect(2)
        assert summed.sum is None and len(resumed.spent()) == before
        assert set(reasons(summed).values()) == {
            "code 2: ProtocolError: this node has begun round 2 of this run before, or a later one"
        }
        assert resumed.collect(3).sum.survivors == 5

    def test_a_twin_that_does_not_note_the_rounds_it_has_begun_makes_one_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr(round_state.MemoryStore, "begin", lambda self, run, number: self._note(run, number))
        run = SecureRun(settings(tmp_path), random_updates(5))
        run.collect(2)
        resumed = SecureRun(settings(tmp_path), random_updates(5))
        resumed.grid.remember(run.grid.memories())
        assert resumed.collect(2).sum is not None

    @given(gone=st.dictionaries(st.tuples(st.integers(1, 3), st.integers(1, 5)), st.sampled_from(PHASES), max_size=3))
    @effort(max_examples=10, deadline=None, derandomize=True)
    def test_each_round_has_an_exact_sum_and_one_vector_a_node_whoever_is_lost_and_comes_back(
        self, gone, tmp_path_factory
    ):
        updates, made = random_updates(5), Counter()
        inner = app_with(updates)

        def app(sent, context):
            number, phase = sent.content.config_records["config"]["server-round"], phase_of(sent)
            if gone.get((number, context.node_id)) == phase:
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=sent)
            reply = inner(sent, context)
            made[number, context.node_id] += phase == "mask" and not reply.has_error()
            return reply

        run = SecureRun(settings(tmp_path_factory.mktemp("run"), z=0.0, **{"num-rounds": 3}), updates, app=app)
        for number in (1, 2, 3):
            summed = run.collect(number)
            if summed.sum is not None:
                there = [updates[node - 1] for node in range(1, 6) if made[number, node]]
                assert np.array_equal(summed.sum.total, sum_of(there, run.strategy.mechanism.plan(LAYOUT.size)))
        assert max(made.values()) == 1

    def taken(self, folder):
        """Return a function that takes the first node's attempt, once."""
        run = SecureRun(settings(folder), random_updates(5))
        assert not reply_to(run, message(run, 1, "advertise")).has_error()
        store = round_state.MemoryStore(run.grid._contexts[1].state)
        return store, lambda: store.take("1", 1) or None

    def test_one_of_two_messages_at_the_same_time_gets_the_attempt(self, tmp_path):
        store, take = self.taken(tmp_path)

        class Slow:
            attempt, process = Held(round_state._memories[id(store._state)].attempt), os.getpid()

        round_state._memories[id(store._state)] = Slow()
        assert both(take) == 1

    def test_a_fork_does_not_go_on_with_a_copy(self, tmp_path, monkeypatch):
        _, take = self.taken(tmp_path)
        monkeypatch.setattr(round_state.os, "getpid", lambda: 1)
        with pytest.raises(ProtocolError) as refused:
            take()
        assert str(refused.value) == (
            "the attempt began in another process, which may go on with it; this one does not"
        )

    def test_a_node_that_is_started_anew_has_dropped_out(self, tmp_path):
        updates = random_updates(5)
        run = SecureRun(settings(tmp_path, z=0.0), updates)
        inner = app_with(updates)

        def forgetful(sent, context):
            if context.node_id == 2 and phase_of(sent) == "mask":
                context.state = RecordDict()
            return inner(sent, context)

        run.grid._client_app = forgetful
        summed = run.collect()
        assert summed.sum.survivors == 4 and "no attempt at round 1" in reasons(summed)[2]


def terms_of(run):
    """Of its first round, as all members have them."""
    clients, plan = len(run.grid._contexts), run.strategy.mechanism.plan(LAYOUT.size)
    return run.strategy._terms(1, plan, run.asked).under(secure._simulated(clients)[1])


class TestTheServer:
    def test_rejects_a_reply_that_is_none(self, tmp_path):
        updates = random_updates(5)
        inner = app_with(updates)

        def odd(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) in {(1, "share"), (2, "mask")}:
                reply.content["arrays"] = ArrayRecord()
            return reply

        run = SecureRun(settings(tmp_path, threshold=3, z=0.0), updates, app=odd)
        summed = run.collect()
        assert summed.sum.survivors == 3
        assert reasons(summed) == dict.fromkeys((1, 2), "the reply must hold 'secure-message' as an array of bytes")
        assert {one.code for one in summed.rejected} == {"protocol"}

    def test_rejects_a_vector_in_the_name_of_another_node(self, tmp_path):
        inner = app_with(updates := random_updates(5))

        def thief(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (2, "mask"):
                return reply
            own = MaskedInput.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
            return replied(sent, replace(own, name="client-00000"))

        run = SecureRun(settings(tmp_path, z=0.0), updates, app=thief)
        summed = run.collect()
        (rejection,) = summed.rejected
        found = (rejection.node_id, rejection.code, rejection.detail)
        assert found == (2, "protocol", "the vector names another sender") and summed.sum.survivors == 4
        there = [update for number, update in enumerate(updates) if number != 1]
        assert np.array_equal(summed.sum.total, sum_of(there, run.strategy.mechanism.plan(LAYOUT.size)))

    def test_rejects_a_node_that_speaks_for_another(self, tmp_path):
        updates = random_updates(5)
        inner = app_with(updates)

        def thief(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (2, "share"):
                return reply
            own = SealedShares.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
            return replied(sent, replace(own, name="client-00000"))

        run = SecureRun(settings(tmp_path, z=0.0), updates, app=thief)
        summed = run.collect()
        assert summed.sum.survivors == 4 and reasons(summed) == {2: "the message names another sender"}
        assert [one.code for one in summed.rejected] == ["protocol"]

    def test_gives_a_name_to_the_node_that_can_sign_for_it(self, tmp_path):
        updates = random_updates(6)
        inner = app_with(updates)

        def thief(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (1, "advertise"):
                return reply
            content = from_record(reply.content["arrays"])
            own = Advertisement.decode(content[SECURE_MESSAGE].tobytes())
            return replied(sent, replace(own, name="client-00001"), roster=content["roster"])

        run = SecureRun(settings(tmp_path, 6, 5, z=0.0), updates, app=thief)
        summed = run.collect()
        assert summed.sum.survivors == 5 and set(reasons(summed)) == {1}
        assert reasons(summed)[1] == "the node has another roster than most, or has not signed as who it says"
        assert [rejection.code for rejection in summed.rejected] == ["roster"]

    def test_goes_on_without_a_node_that_has_no_roster(self, tmp_path):
        inner = app_with(updates := random_updates(6))

        def hostile(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (1, "advertise"):
                return reply
            own = Advertisement.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
            return replied(sent, own, roster=np.frombuffer(b"no roster", np.uint8))

        summed = SecureRun(settings(tmp_path, 6, 5, z=0.0), updates, app=hostile).collect()
        assert summed.sum.survivors == 5 and set(reasons(summed)) == {1} and "roster" in reasons(summed)[1]
        assert [rejection.code for rejection in summed.rejected] == ["protocol"]

    @pytest.mark.parametrize("key", ["mask_key", "seal_key"])
    def test_goes_on_without_a_node_whose_key_nobody_can_agree_with(self, key, tmp_path):
        self.check_without_first(tmp_path, lambda own: {key: bytes(32)})

    def test_goes_on_without_a_node_that_has_one_key_for_all(self, tmp_path):
        self.check_without_first(tmp_path, lambda own: {"mask_key": own.seal_key})

    def check_without_first(self, folder, changed):
        """The first node signs other keys than those that it has made: all others finish the round."""
        updates = random_updates(6)
        inner = app_with(updates)

        def hostile(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (1, "advertise"):
                return reply
            content, terms = from_record(reply.content["arrays"]), terms_of(run)
            own = Advertisement.decode(content[SECURE_MESSAGE].tobytes())
            other = replace(own, **changed(own))
            signed = terms.advertisement(own.name, other.mask_key, other.seal_key)
            other = replace(other, signature=secure._simulated(6)[0][own.name].sign(signed))
            return replied(sent, other, roster=content["roster"])

        run = SecureRun(settings(folder, 6, 5, z=0.0), updates, app=hostile)
        summed = run.collect()
        assert summed.sum.survivors == 5
        assert reasons(summed) == {1: "the node has keys that permit no key agreement, or those of another node"}
        assert [one.code for one in summed.rejected] == ["protocol"]
        assert np.array_equal(summed.sum.total, sum_of(updates[1:], run.strategy.mechanism.plan(LAYOUT.size)))

    def test_asks_one_of_two_nodes_that_have_a_name(self, tmp_path):
        nodes = [{"partition-id": n % 5, "num-partitions": 5} for n in range(6)]
        summed = SecureRun(settings(tmp_path, 6, 5, z=0.0), random_updates(6), nodes=nodes).collect()
        assert summed.sum.survivors == 5 and set(reasons(summed)) in ({1}, {6})
        assert set(reasons(summed).values()) == {"the node has the name of another node"}
        assert [one.code for one in summed.rejected] == ["roster"]

    def test_goes_on_with_a_node_that_seals_nonsense_for_another(self, tmp_path):
        updates = random_updates(5)
        inner = app_with(updates)

        def hostile(sent, context):
            reply = inner(sent, context)
            if (context.node_id, phase_of(sent)) != (2, "share"):
                return reply
            sealed = dict(SealedShares.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes()).sealed)
            return replied(sent, SealedShares("client-00001", sealed | {"client-00000": bytes(60)}))

        run = SecureRun(settings(tmp_path, z=0.0), updates, app=hostile)
        summed = run.collect()
        assert summed.sum.survivors == 5 and not summed.rejected
        assert np.array_equal(summed.sum.total, sum_of(updates, run.strategy.mechanism.plan(LAYOUT.size)))

    def test_never_tries_a_round_again(self, tmp_path):
        run = SecureRun(settings(tmp_path), random_updates(5), {1: "mask", 2: "mask"})
        assert run.collect().sum is None
        asked = [phase_of(one) for one in run.asked]
        assert {phase: asked.count(phase) for phase in asked} == {"advertise": 5, "share": 5, "mask": 5}

    @pytest.mark.parametrize(
        ("more", "told"),
        [
            ({}, {}),
            (
                {
                    "privacy.clipping": "adaptive",
                    "privacy.clipping-count-noise-multiplier": 1.0,
                    "privacy.noise-multiplier": 0.5,
                },
                {CLIPPING_NORM: 1.0},
            ),
            (
                {
                    "privacy.server": "metric",
                    "privacy.distance": "rms",
                    "privacy.distance-release": "private",
                    "privacy.distance-noise-multiplier": 1.0,
                },
                {DISTANCE: 1.0},
            ),
        ],
        ids=["as it is set", "a clip that follows", "a distance"],
    )
    def test_tells_each_step_what_all_have_to_go_by(self, more, told, tmp_path):
        run = SecureRun(settings(tmp_path, **more), random_updates(5))
        assert run.collect(3).sum.survivors == 5 and len(run.asked) == 25
        for sent in run.asked:
            phase, fields = phase_of(sent), dict(sent.content.config_records["config"])
            assert isinstance(fields.pop(SECURE_MESSAGE), bytes)
            common = {"server-round": 3, "seed": 3, **told}
            assert {name: fields[name] for name in common} == common
            if phase == "mask":
                assert sent.metadata.message_type == "train" and set(sent.content) == {"arrays", "config"}
                assert "privacy-events" in fields and "ledger-head" in fields
            else:
                assert sent.metadata.message_type == SECURE and set(sent.content) == {"config"}
                assert fields == common | {SECURE_STEP: phase}

    def test_takes_no_replies_past_the_protocol(self, tmp_path):
        run = SecureRun(settings(tmp_path), random_updates(5))
        run.messages()
        with pytest.raises(FederationError) as refused:
            run.strategy.aggregate_train(1, [])
        assert str(refused.value) == (
            "under secure aggregation a round has several steps; let Cloister's round loop drive it"
        )

    def test_refuses_a_cohort_in_which_two_lists_could_be_signed(self, tmp_path):
        run = SecureRun(settings(tmp_path, 4, 4), random_updates(8))
        with pytest.raises(ConfigError) as refused:
            run.messages()
        assert str(refused.value) == (
            "8 nodes would train in round 1, and secure-aggregation.threshold and secure-aggregation.colluding permit "
            "at most 7; raise the threshold, or lower strategy.fraction-train"
        )

    def test_takes_a_cohort_in_which_they_just_cannot(self, tmp_path):
        assert len(SecureRun(settings(tmp_path, 4, 4), random_updates(7)).messages()) == 7


class TestWhatAReplyHolds:
    """Where it is no message of the protocol, the reason says what it must be."""

    BYTES = np.frombuffer(SealedShares("client-00000", {}).encode(), np.uint8)

    def reply(self, **arrays):
        assume_run()
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), 1, SECURE)

    def test_is_read_under_its_name(self):
        shares = decoded(self.reply(**{SECURE_MESSAGE: Array(self.BYTES)}), SealedShares)
        assert shares == SealedShares("client-00000", {})

    @pytest.mark.parametrize(
        "array",
        [
            None,
            Array(BYTES.astype(np.float32)),
            Array(BYTES.astype(np.int8)),
            Array(BYTES[None]),
            Array(dtype="uint8", shape=(9,), stype="numpy.ndarray", data=b"nonsense"),
        ],
        ids=["none", "float32", "int8", "two axes", "mislabelled"],
    )
    def test_has_to_be_an_array_of_bytes(self, array):
        held = {} if array is None else {SECURE_MESSAGE: array}
        with pytest.raises(Unfit) as refused:
            decoded(self.reply(other=Array(self.BYTES), **held), SealedShares)
        assert refused.value.code == "protocol"
        assert refused.value.detail == "the reply must hold 'secure-message' as an array of bytes"

    def test_without_a_record_of_arrays(self):
        assume_run()
        with pytest.raises(Unfit) as refused:
            decoded(Message(RecordDict({}), 1, SECURE), SealedShares)
        assert refused.value.detail == "the reply must hold 'secure-message' as an array of bytes"

    def test_has_to_be_of_the_kind_that_was_asked_for(self):
        with pytest.raises(Unfit) as refused:
            decoded(self.reply(**{SECURE_MESSAGE: Array(self.BYTES)}), Survivors)
        assert refused.value.code == "protocol" and refused.value.detail == "the bytes are no Survivors"
