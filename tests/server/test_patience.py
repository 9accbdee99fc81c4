"""Waiting for replies, on a grid whose clock is turned by hand."""

import time
from collections.abc import Iterator
from itertools import product

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from httpx import HTTPStatusError, Request, Response
from support import content, failures, zeros

from cloister.flower.messages import assume_run
from cloister.server import polling_grid as patience
from cloister.server.polling_grid import GRACE_SECONDS, POLL_SECONDS, RENEWALS, PollingGrid


def refused(path):
    return HTTPStatusError("500", request=Request("POST", f"http://superlink{path}"), response=Response(500))


REFUSED = refused("/v1/runtime/push-messages")
EXPIRED = 59.5
"""After so many seconds it is Flower that replies, for a node that has let its message expire."""


class SlowGrid:
    """Nodes that reply so many seconds after they were asked; None: never."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 100.0
        self.waiting = {}
        self.pulled = []

    def push_messages(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id
            delay = self.seconds[node]
            if delay == "refused":
                yield None
                continue
            message.metadata.__dict__["_message_id"] = f"{node}-{self.now}"
            if delay is not None:
                reply = Message(content(zeros()), reply_to=message)
                if delay == EXPIRED:
                    reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE), reply_to=message)
                    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
                self.waiting[message.metadata.message_id] = (self.now + delay, reply)
            yield message.metadata.message_id

    def pull_messages(self, ids):
        self.pulled.append(self.now)
        ready = [found for found in ids if found in self.waiting and self.waiting[found][0] <= self.now]
        return [self.waiting.pop(found)[1] for found in ready]


@pytest.fixture
def ask(monkeypatch):
    """A function that asks all nodes: who replied, and after how many seconds the answer was there."""
    assume_run()

    def start(seconds, late_timeout=None):
        inner = SlowGrid(seconds)
        grid = PollingGrid(inner, late_timeout)
        monkeypatch.setattr(patience.time, "monotonic", lambda: inner.now)
        monkeypatch.setattr(patience.time, "sleep", lambda pause: setattr(inner, "now", inner.now + pause))

        def once(timeout=60.0):
            started = inner.now
            messages = [Message(RecordDict(), node, "train") for node in inner.seconds]
            replies = grid.send_and_receive(messages, timeout=timeout)
            return sorted(reply.metadata.src_node_id for reply in replies), inner.now - started

        return inner, once

    return start


def test_a_round_ends_when_the_last_reply_is_there(ask):
    inner, once = ask({1: 0.0, 2: 1.0, 3: 2.0})
    nodes, seconds = once()
    assert nodes == [1, 2, 3] and seconds == pytest.approx(2.0, abs=2 * POLL_SECONDS)
    assert max(later - sooner for sooner, later in zip(inner.pulled, inner.pulled[1:])) < 2 * POLL_SECONDS


def test_the_more_replies_are_waited_for_the_rarer_are_looks(ask):
    """The cost of one look at the SuperLink grows with them; the last replies are noticed as soon as those of a few."""
    inner, once = ask({node: node / 100 for node in range(1, 200)} | {200: 10.0})
    nodes, seconds = once()
    pauses = [later - sooner for sooner, later in zip(inner.pulled, inner.pulled[1:]) if later > sooner]
    assert nodes == list(range(1, 201)) and seconds == pytest.approx(10.0, abs=2 * POLL_SECONDS)
    assert pauses[0] == pytest.approx(2.0) and pauses[-1] == pytest.approx(POLL_SECONDS)


@pytest.mark.parametrize("timeout", [0.5, 3.25])
def test_a_pause_does_not_pass_the_deadline(ask, timeout):
    inner, once = ask(dict.fromkeys(range(200)))
    assert once(timeout)[1] == pytest.approx(timeout, abs=POLL_SECONDS)
    assert inner.pulled[-1] - 100.0 == pytest.approx(timeout, abs=POLL_SECONDS)


@pytest.mark.parametrize("hangs", [None, EXPIRED])
def test_a_node_that_hangs_costs_one_deadline(ask, hangs):
    _, once = ask({1: 1.0, 2: 4.0, 3: hangs})
    seconds = [once()[1] for _ in range(3)]
    assert seconds[0] == pytest.approx(hangs or 60, abs=0.2)
    assert seconds[1:] == pytest.approx([8, 8], abs=0.4)


def test_a_late_node_has_at_least_the_grace(ask):
    _, once = ask({1: 0.0, 2: None})
    assert [once()[1] for _ in range(2)] == pytest.approx([60, GRACE_SECONDS], abs=0.4)


def test_a_late_node_that_replies_again_is_waited_for_again(ask):
    inner, once = ask({1: 1.0, 2: None})
    once()
    inner.seconds[2] = 3.0
    assert once()[0] == [1, 2]
    inner.seconds[2] = 30.0
    assert once()[0] == [1, 2]


def test_nobody_is_given_up_before_anybody_has_replied(ask):
    inner, once = ask({1: None, 2: None})
    once()
    inner.seconds |= {1: 40.0, 2: 41.0}
    assert once()[0] == [1, 2]


def test_a_message_that_could_not_be_sent_is_not_waited_for(ask):
    _, once = ask({1: 1.0, 2: "refused"})
    nodes, seconds = once()
    assert nodes == [1] and seconds < 2


def test_there_may_be_no_deadline(ask):
    _, once = ask({1: 1.0, 2: 500.0})
    assert once(timeout=None)[0] == [1, 2]


def test_nobody_asked_is_no_waiting(ask):
    _, once = ask({})
    assert once() == ([], 0.0)


class Away:
    """A grid that refuses messages for a while, so many seconds after they were made each time."""

    def __init__(self, away, error=REFUSED):
        self.away, self.error, self.sent = away, error, []

    def push_messages(self, messages):
        self.sent.append([message.object_id for message in messages])
        if self.away:
            for message in messages:  # so much time has passed
                message.metadata.created_at -= self.away.pop()
            raise next(self.error) if isinstance(self.error, Iterator) else self.error
        return self.sent[-1]

    def pull_messages(self, ids):
        return []


class TestASuperLinkThatIsAway:
    @staticmethod
    def ask(inner):
        assume_run()
        message = Message(RecordDict(), 1, "train", ttl=60.0)
        assert list(PollingGrid(inner).send_and_receive([message], timeout=0.0)) == []
        return message

    def test_messages_that_expired_meanwhile_are_sent_anew(self, caplog):
        inner = Away([100.0, 70.0])
        message = self.ask(inner)
        assert len(inner.sent) == 3 and len({name for (name,) in inner.sent}) == 3
        assert time.time() - message.metadata.created_at < 60
        assert caplog.text.count("sent anew") == 2

    def test_the_clock_of_the_superlink_may_be_ahead(self):
        inner = Away([57.0])
        self.ask(inner)
        assert len(inner.sent) == 2

    @pytest.mark.parametrize(
        "inner",
        [Away([50.0]), Away([100.0], OSError("no disk")), Away([100.0], refused("/v1/runtime/push-object"))],
        ids=["before they expired", "something else went wrong", "a node may have a whole one"],
    )
    def test_other_refusals_are_errors(self, inner):
        with pytest.raises(type(inner.error)):
            self.ask(inner)
        assert len(inner.sent) == 1

    def test_nobody_tries_for_ever(self):
        inner = Away([100.0] * 50)
        with pytest.raises(HTTPStatusError):
            self.ask(inner)
        assert len(inner.sent) == RENEWALS + 1


class TestUnderAGuarantee:
    """A late node alone decides whether it counts: no other client may."""

    def test_a_late_node_counts_by_its_own_time_alone(self, ask):
        def check(others, seconds):
            inner, once = ask({1: others, 2: others, 3: None}, late_timeout=10.0)
            once()
            inner.seconds[3] = seconds
            assert [3 in once()[0] for _ in range(3)] == [seconds < 10.0] * 3

        assert failures(product([0.0, 2.0, 25.0, 55.0, None], [9.0, 11.0, 20.0, 54.0]), check) == []

    def test_the_others_have_all_their_time(self, ask):
        _, once = ask({1: 1.0, 2: 50.0, 3: None}, late_timeout=10.0)
        assert [once()[0] for _ in range(3)] == [[1, 2]] * 3

    def test_a_node_that_hangs_costs_one_deadline(self, ask):
        _, once = ask({1: 1.0, 2: 4.0, 3: None}, late_timeout=10.0)
        assert [once()[1] for _ in range(3)] == pytest.approx([60, 10, 10], abs=0.4)

    def test_a_node_that_is_quick_again_has_all_its_time_again(self, ask):
        inner, once = ask({1: 1.0, 2: None}, late_timeout=10.0)
        once()
        inner.seconds[2] = 3.0
        once()
        inner.seconds[2] = 40.0
        assert once()[0] == [1, 2]

    def test_there_may_be_no_deadline(self, ask):
        inner, once = ask({1: 1.0, 2: EXPIRED}, late_timeout=10.0)
        once(timeout=None)
        inner.seconds[2] = None
        assert once(timeout=None)[1] == pytest.approx(10, abs=0.4)
