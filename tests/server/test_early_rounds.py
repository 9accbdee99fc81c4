"""Rounds of secure aggregation whose first two steps come with the last two of the round before."""

import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import secure_runs
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from secure_runs import MODEL, PHASES, SecureRun, app_with, phase_of, random_updates, settings

from cloister.aggregation import key_setup
from cloister.aggregation.key_setup import MAXIMUM_AGE
from cloister.client import attempts
from cloister.client.attempts import MemoryStore, Stage
from cloister.client.secure import take_part
from cloister.config.run import parse
from cloister.config.secure import shared_mean
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ProtocolError
from cloister.core.wire import CONFIG, ROUND, SECURE, SECURE_EARLY, SECURE_MESSAGE, SECURE_STEP
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.accounting.account import Account
from cloister.privacy.mechanisms.distributed.whole import whole_update
from cloister.secure_aggregation.messages import SealedShares

LAYOUT = Layout.of(MODEL)
UPDATES = random_updates(5)
OPENING, REST = {"advertise", "share"}, {"mask", "sign", "unmask"}


def early_run(folder, rounds=3, app=None, nodes=None, **more):
    """A run without noise, to see its sums, in which a round may begin the next one early."""
    keys = settings(folder, z=0.0, **{"num-rounds": rounds, **more})
    return SecureRun(keys, UPDATES, app=app, nodes=nodes)


def sum_of(numbers, run):
    """The sum of what some nodes put into it."""
    plan = run.strategy.mechanism.plan(LAYOUT.size)
    sent = LAYOUT.rows(MODEL)
    rows = (LAYOUT.rows({name: MODEL[name] + UPDATES[n - 1][name] for name in MODEL}) for n in numbers)
    return sum(whole_update(Cohort.of(LAYOUT, sent, (row,)), plan) for row in rows)


def fields_of(message):
    return message.content.config_records[CONFIG]


def phases(run, number):
    """What was asked for in a round, beside early steps."""
    return {phase_of(one) for one in run.asked if fields_of(one)[ROUND] == number}


def lost(sent):
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=sent)


def losing(where, inner=None):
    """An app that loses a node where `where(round, phase, node)` says so."""
    inner = inner or app_with(UPDATES)

    def app(sent, context):
        is_lost = where(fields_of(sent)[ROUND], phase_of(sent), context.node_id)
        return lost(sent) if is_lost else inner(sent, context)

    return app


def changing(step, change):
    """An app that changes what the third node sends in a step of the first round."""
    inner = app_with(UPDATES)

    def app(sent, context):
        reply = inner(sent, context)
        if (fields_of(sent)[ROUND], phase_of(sent), context.node_id) == (1, step, 3):
            change(reply.content.array_records["arrays"])
        return reply

    return app


def leave_out(record):
    """Send no early part."""
    del record[SECURE_EARLY]


def repeat(record):
    """Send what is for this round as the early part."""
    record[SECURE_EARLY] = record[SECURE_MESSAGE]


def steal(record):
    """Send shares in the name of the first node."""
    own = SealedShares.decode(record[SECURE_EARLY].numpy().tobytes())
    stolen = SealedShares("client-00000", own.sealed).encode()
    record[SECURE_EARLY] = type(record[SECURE_EARLY])(np.frombuffer(stolen, np.uint8))


class TestARunOfSeveralRounds:
    def test_has_three_exchanges_in_place_of_five(self, tmp_path):
        run = early_run(tmp_path)
        for number in (1, 2, 3):
            summed = run.collect(number)
            assert summed.survivors == 5 and not summed.rejected and summed.began_early == (number > 1)
            assert np.array_equal(summed.total, sum_of(range(1, 6), run))
        assert [phases(run, number) for number in (1, 2, 3)] == [OPENING | REST, REST, REST]

    def test_asks_for_nothing_early_in_its_last_round(self, tmp_path):
        run = early_run(tmp_path, rounds=2)
        for number in (1, 2):
            run.collect(number)
        early = {(fields_of(one)[ROUND], phase_of(one)) for one in run.asked if SECURE_EARLY in fields_of(one)}
        assert early == {(1, "sign"), (1, "unmask")}

    def test_begins_a_round_by_itself_after_one_that_somebody_did_not_survive(self, tmp_path):
        run = early_run(tmp_path, app=losing(lambda number, phase, node: (number, phase, node) == (1, "mask", 2)))
        assert run.collect(1).survivors == 4
        assert not any(SECURE_EARLY in fields_of(one) for one in run.asked)
        assert run.collect(2).survivors == 5 and phases(run, 2) == OPENING | REST

    @pytest.mark.parametrize("step", ["sign", "unmask"])
    def test_counts_a_reply_without_its_early_part_and_asks_again(self, step, tmp_path):
        run = early_run(tmp_path, app=changing(step, leave_out))
        for number in (1, 2, 3):
            summed = run.collect(number)
            assert summed.survivors == summed.shown == 5 and not summed.rejected
            assert np.array_equal(summed.total, sum_of(range(1, 6), run))
        assert [phases(run, number) for number in (1, 2, 3)] == [OPENING | REST, OPENING | REST, REST]

    @pytest.mark.parametrize(("step", "change"), [("sign", repeat), ("unmask", repeat), ("unmask", steal)])
    def test_takes_no_nonsense_for_an_early_part(self, step, change, tmp_path):
        run = early_run(tmp_path, app=changing(step, change))
        assert run.collect(1).survivors == 5
        assert np.array_equal(run.collect(2).total, sum_of(range(1, 6), run)) and phases(run, 2) == OPENING | REST

    @pytest.mark.parametrize("step", ["advertise", "share"])
    @pytest.mark.parametrize("error", [OSError("nfs"), ProtocolError("out of turn"), MemoryError()])
    def test_loses_nobody_by_what_goes_wrong_in_an_early_step(self, error, step, tmp_path, monkeypatch, caplog):
        def failing(request, node):
            if request.is_early and request.step == step and node.id in (2, 3):
                raise error
            return take_part(request, node)

        monkeypatch.setattr(secure_runs, "take_part", failing)
        run = early_run(tmp_path, app=app_with(UPDATES))
        first = run.collect(1)
        assert first.survivors == first.shown == 5 and not first.rejected
        told = [record.getMessage() for record in caplog.records if "does not begin early" in record.getMessage()]
        why = str(error) if isinstance(error, ProtocolError) else type(error).__name__
        assert told == [f"run {LOCAL_RUN}: round 2 does not begin early: {why}"] * 2
        assert run.collect(2).survivors == 5 and phases(run, 2) == OPENING | REST

    def test_asks_for_no_shares_that_it_cannot_use(self, tmp_path):
        """One node sends no keys for the next round; the others need not make shares then."""
        run = early_run(tmp_path, app=changing("sign", leave_out))
        run.collect(1)
        assert not any(SECURE_EARLY in fields_of(one) for one in run.asked if phase_of(one) == "unmask")

    def test_does_not_use_a_key_setup_that_has_waited_too_long(self, tmp_path, monkeypatch):
        run = early_run(tmp_path)
        run.collect(1)
        now = time.monotonic()
        monkeypatch.setattr(key_setup.time, "monotonic", lambda: now + MAXIMUM_AGE)
        assert run.collect(2).survivors == 5 and phases(run, 2) == OPENING | REST

    def test_begins_nothing_early_that_the_budget_does_not_cover(self, tmp_path):
        keys = {"num-rounds": 3, "privacy.max-epsilon": 1.2 * of_rounds(1), "privacy.target-delta": 1e-5}
        run = SecureRun(settings(tmp_path, **keys), UPDATES)
        run.collect(1)
        assert not any(SECURE_EARLY in fields_of(one) for one in run.asked)

    def test_begins_early_what_the_budget_just_covers(self, tmp_path):
        keys = {"num-rounds": 3, "privacy.max-epsilon": 1.01 * of_rounds(2), "privacy.target-delta": 1e-5}
        run = SecureRun(settings(tmp_path, **keys), UPDATES)
        assert [run.collect(number).began_early for number in (1, 2)] == [False, True]

    def test_begins_a_round_by_itself_if_others_are_asked(self, tmp_path):
        run = early_run(tmp_path)
        run.collect(1)
        asked = list(run.messages(2))[:4]
        summed = run.strategy.collect(2, asked, run.send)
        assert summed.survivors == 4 and phases(run, 2) == OPENING | REST

    def test_begins_nothing_early_if_a_part_of_the_nodes_is_asked(self, tmp_path):
        run = early_run(tmp_path, **{"strategy.fraction-train": 0.8, "strategy.min-nodes": 4})
        run.collect(1)
        assert not any(SECURE_EARLY in fields_of(one) for one in run.asked)

    def test_goes_on_after_a_server_that_is_started_anew(self, tmp_path):
        """What it had begun early is gone with it; no vector was made in it."""
        run = early_run(tmp_path)
        run.collect(1)
        resumed = early_run(tmp_path)
        resumed.grid.remember(run.grid.memories())
        summed = resumed.collect(2)
        assert summed.survivors == 5 and phases(resumed, 2) == OPENING | REST

    def test_lets_a_node_that_abstains_from_the_next_round_finish_this_one(self, tmp_path):
        """Its budget is for one round."""
        nodes = [{"partition-id": n, "num-partitions": 5} for n in range(5)]
        limit = {"max-epsilon": 1.2 * of_rounds(1), "ledger-dir": str(tmp_path / "ledger"), "target-delta": 1e-5}
        nodes[1] |= limit
        run = SecureRun(settings(tmp_path, z=1.0, **{"num-rounds": 3}), UPDATES, nodes=nodes)
        first, second = run.collect(1), run.collect(2)
        assert first.survivors == first.shown == 5 and not first.rejected
        assert second.survivors == 4 and phases(run, 2) == OPENING | REST
        assert [(one.node_id, "abstains" in one.detail or "budget" in one.detail) for one in second.rejected] == [
            (2, True)
        ]

    lost_once = st.dictionaries(st.tuples(st.integers(1, 3), st.integers(1, 5)), st.sampled_from(PHASES), max_size=3)

    @pytest.mark.slow
    @given(gone=lost_once)
    @effort(max_examples=10, deadline=None, derandomize=True)
    def test_gives_exact_sums_whoever_is_lost_and_comes_back(self, gone, tmp_path_factory):
        made = Counter()
        inner = app_with(UPDATES)

        def counting(sent, context):
            reply = inner(sent, context)
            made[fields_of(sent)[ROUND], context.node_id] += phase_of(sent) == "mask" and not reply.has_error()
            return reply

        app = losing(lambda number, phase, node: gone.get((number, node)) == phase, counting)
        run = early_run(tmp_path_factory.mktemp("run"), app=app)
        for number in (1, 2, 3):
            summed = run.collect(number)
            if summed.total is not None:
                left = set(range(1, 6)) - {one.node_id for one in summed.rejected}
                before = {node for node in range(1, 6) if gone.get((number, node)) in ("sign", "unmask")}
                assert np.array_equal(summed.total, sum_of(left | before, run))
        assert max(made.values()) == 1


def of_rounds(count):
    """ε of some rounds of five with t = 4 and z = 1, at δ = 1e-5."""
    (event,) = shared_mean(parse(settings("unused", z=1.0))).events(LAYOUT)
    return Account((event,) * count).epsilon(1e-5)


def asking(run, node=1):
    """A server that asks one node for what it likes, with what it has seen in a run."""

    def ask(message, **changed):
        config = ConfigRecord({**fields_of(message), **changed})
        kind = message.metadata.message_type
        sent = Message(RecordDict({**message.content, CONFIG: config}), node, kind)
        (reply,) = run.grid.send_and_receive([sent])
        return reply

    return ask


def asked_of(run, phase, number, node=1):
    """What a node was asked in a step of a round."""
    return next(
        one
        for one in run.asked
        if (phase_of(one), fields_of(one)[ROUND], one.metadata.dst_node_id) == (phase, number, node)
    )


class TestAServerThatAsksForMore:
    def advertise(self, run, number):
        fields = {ROUND: number, "seed": 3, SECURE_STEP: "advertise", SECURE_MESSAGE: b""}
        return Message(RecordDict({CONFIG: ConfigRecord(fields)}), 1, SECURE)

    def second_vector(self, folder):
        """The reply to a server that has had the vector of round 2 early, and begins the round again by itself."""
        run = early_run(folder, rounds=2)
        run.collect(1)
        run.collect(2)
        again = early_run(folder, rounds=2)
        again.grid = run.grid
        return again.collect(2)

    def test_gets_no_second_vector_in_an_ordinary_attempt(self, tmp_path):
        summed = self.second_vector(tmp_path)
        assert summed.total is None
        assert {one.detail for one in summed.rejected} == {
            "code 2: ProtocolError: this node has begun round 2 of this run before, or a later one"
        }

    def test_gets_one_from_a_twin_that_does_not_note_when_a_vector_is_made(self, tmp_path, monkeypatch):
        honest = MemoryStore.begin
        monkeypatch.setattr(
            MemoryStore, "begin", lambda *given, **more: given[2].stage == Stage.VECTOR or honest(*given)
        )
        monkeypatch.setattr(MemoryStore, "keep", lambda self, run, turn, kept: self._put(run, turn.slot, kept))
        assert self.second_vector(tmp_path).total is not None

    def test_gets_no_early_attempt_after_an_ordinary_one(self, tmp_path):
        run = early_run(tmp_path)
        held = losing(lambda number, phase, node: (number, phase) == (1, "unmask"))
        run.grid._client_app = held
        run.collect(1)
        run.grid._client_app = app_with(UPDATES)
        ask = asking(run)
        assert not ask(self.advertise(run, 2)).has_error()
        reply = ask(asked_of(run, "unmask", 1))
        assert reply.has_error() and "no attempt at round 1" in reply.error.reason

    def test_ends_an_early_attempt_by_an_ordinary_one(self, tmp_path):
        run = early_run(tmp_path)
        run.collect(1)
        assert any(one.attempt for one in kept_by(run))
        assert not asking(run)(self.advertise(run, 2)).has_error()
        summed = run.collect(2)
        assert summed.survivors == 4 and summed.rejected[0].node_id == 1

    @pytest.mark.parametrize("step", ["advertise", "share"])
    def test_gets_no_early_step_with_the_first_two(self, step, tmp_path):
        run = early_run(tmp_path)
        reply = asking(run)(self.advertise(run, 1), **{SECURE_STEP: step, SECURE_EARLY: b""})
        assert "'secure-early' must come as bytes, with 'sign' or 'unmask'" in reply.error.reason

    @pytest.mark.parametrize("more", [{"privacy.clipping": "adaptive", "privacy.bits-noise-multiplier": 1.0}])
    def test_gets_none_where_the_next_round_depends_on_this_one(self, more, tmp_path):
        keys = settings(tmp_path, z=0.5, **{"num-rounds": 3}, **more)
        run = SecureRun(keys, UPDATES)
        run.collect(1)
        assert not any(SECURE_EARLY in fields_of(one) for one in run.asked)
        reply = asking(run)(asked_of(run, "sign", 1), **{SECURE_EARLY: b""})
        assert "in a run whose clip and noise follow from no earlier round" in reply.error.reason


def kept_by(run, node=1):
    return attempts._memories[id(run.grid._contexts[node].state)].kept


class TestNodesWhoseProcessesEnd:
    def test_keep_both_attempts_in_their_folders_and_nothing_at_the_end(self, tmp_path):
        if not Path("/dev/shm").is_dir():
            pytest.skip("there is no folder in memory")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shelf:
            nodes = []
            for number in range(5):
                own = Path(shelf) / str(number)
                own.mkdir(mode=0o700)
                kept = {"secure-state": str(own), "ledger-dir": str(tmp_path / f"ledgers-{number}")}
                nodes.append({"partition-id": number, "num-partitions": 5, **kept})
            inner, most = app_with(UPDATES), 0

            def forgetful(sent, context):
                nonlocal most
                context.state = RecordDict()
                reply = inner(sent, context)
                most = max(most, len(list(Path(shelf).glob("0/*.attempt"))))
                return reply

            run = early_run(tmp_path, app=forgetful, nodes=nodes)
            assert [run.collect(number).survivors for number in (1, 2, 3)] == [5, 5, 5]
            assert [phases(run, number) for number in (2, 3)] == [REST, REST] and most == 2
            assert {path.name for path in Path(shelf).glob("*/*")} == {"1.turn"}


def test_turns_are_in_the_order_of_their_numbers():
    turns = [attempts.Turn(number, stage) for number in range(4) for stage in Stage]
    assert sorted(turns, key=lambda one: one.number) == turns
    assert len({one.number for one in turns}) == len(turns)
    with pytest.raises(ProtocolError):
        MemoryStore(RecordDict()).keep("1", turns[4], b"never begun")
