"""A SuperLink that is killed after it has done what it was asked, and before it says so, is asked again."""

from itertools import count
from types import SimpleNamespace

import pytest
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import MODEL, SuperLink, content, labelled, nodes_of

from cloister.server.packed_grid import PackedGrid
from cloister.server.polling_grid import PollingGrid


class Lossy:
    """A server app's client of a SuperLink, which asks twice where the first answer is lost.

    Args:
        link: the SuperLink.
        lost: the number of the request whose answer is lost, from 0.
    """

    def __init__(self, link, lost):
        self.link, self.lost, self.numbers = link, lost, count()

    def _ask(self, handler, request):
        handle = getattr(runtime_handlers, handler)
        times = 2 if next(self.numbers) == self.lost else 1
        return [handle(request, self.link.state, SimpleNamespace(run_id=self.link.run)) for _ in range(times)][-1]

    def PushMessages(self, request):
        return self._ask("push_messages", request)

    def PushObject(self, request):
        return self._ask("push_object", request)

    def PullObject(self, request):
        return runtime_handlers.pull_object(request, self.link.state, SimpleNamespace(run_id=self.link.run))

    def PullMessages(self, request):
        return self._ask("pull_messages", request)


def start(path):
    """A SuperLink, and its nodes."""
    link = SuperLink(str(path))
    return link, nodes_of(link)


def sent(link, nodes, lost):
    """Return a server app's messages to all nodes when one of its answers is lost, and the number of requests."""
    flower = HttpGrid(token="token")
    flower._client = client = Lossy(link, lost)
    flower.set_run(link.state.get_run_info(run_ids=[link.run])[0])
    messages = [labelled(Message(content(MODEL), node.id, "train"), SUPERLINK_NODE_ID, link.run) for node in nodes]
    assert list(PollingGrid(PackedGrid.over(flower)).send_and_receive(messages, timeout=0.0)) == []
    return [message.metadata.message_id for message in messages], next(client.numbers)


@pytest.fixture
def requests(tmp_path):
    """Return the number of requests when no answer is lost."""
    _, number = sent(*start(tmp_path / "whole.db"), None)
    assert number > 8, "the announcement, two messages with parts in common, and a look for each reply"
    return number


@pytest.mark.slow
def test_whichever_answer_is_lost_each_node_has_its_message_whole_and_once(tmp_path, requests):
    for lost in range(requests):
        link, nodes = start(tmp_path / f"{lost}.db")
        names, asked = sent(link, nodes, lost)
        assert (asked > requests) == (0 < lost < requests - 2), "after a lost part the messages are announced again"
        assert [node.fetch() for node in nodes] == names
        assert all(node.next() == [] for node in nodes), "nobody trains twice"


def test_a_node_that_has_its_message_by_then_is_not_given_it_again(tmp_path, requests, monkeypatch):
    link, (first, other) = start(tmp_path / "state.db")
    push, fetched = runtime_handlers.push_object, []

    def taken_meanwhile(*request):
        answer = push(*request)
        if not answer.stored:
            fetched.append(first.fetch())
            first.confirm(fetched[0])
        return answer

    monkeypatch.setattr(runtime_handlers, "push_object", taken_meanwhile)
    names, _ = sent(link, [first, other], requests - 3)
    assert fetched == names[:1] and first.next() == []
    assert other.fetch() == names[1]
