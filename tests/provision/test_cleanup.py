"""What stays in the state database of a run: of what nobody will fetch any more, nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import MODEL, TRAINED, SuperLink, names_of

from cloister.deploy.superlink import cleanup
from cloister.deploy.superlink.cleanup import DeletesExpired, delete_expired
from cloister.deploy.superlink.interrupted import expire_message

pytestmark = pytest.mark.usefixtures("flower_as_it_was")


@pytest.fixture
def link(guarded, tmp_path):
    DeletesExpired().install()
    link = SuperLink(str(tmp_path / "state.db"))
    link.own = guarded
    return link


def kept(link):
    """Bytes of all objects."""
    (row,) = link.state.query("SELECT coalesce(sum(length(content)), 0) AS bytes FROM objects")
    return row["bytes"]


def read(link, *messages):
    """Hear of replies, read and confirm them, as the server's app does."""
    request = PullAppMessagesRequest(message_ids=[message.object_id for message in messages])
    task = SimpleNamespace(run_id=link.run)
    found = runtime_handlers.pull_messages(request, link.state, task)
    for tree in found.message_object_trees:
        assert all(link.store.get(name) for name in names_of(tree))
        confirmed = ConfirmMessageReceivedRequest(
            node=Node(node_id=SUPERLINK_NODE_ID), run_id=link.run, message_object_id=tree.object_id
        )
        runtime_handlers.confirm_message_received(confirmed, link.state, task)
    return len(found.messages_list)


def expire(link, *messages):
    for message in messages:
        expire_message(link.state, message.object_id)


FEW = 2
"""Replies that are kept unread here."""


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(cleanup, "MAX_UNREAD_REPLIES", FEW)


class TestAfterEachRound:
    def test_a_node_that_confirms_nothing_leaves_one_message_at_most(self, link, nodes):
        sizes = []
        for _ in range(3):
            link.send(nodes[0])
            nodes[0].fetch()
            sizes.append(kept(link))
        assert max(sizes) < 1.01 * sizes[0]

    def test_who_replies_without_confirming_leaves_nothing(self, link, nodes):
        message = link.send(nodes[0])
        nodes[0].fetch()
        nodes[0].reply(message)
        assert read(link, message) == 1 and kept(link) == 0

    def test_the_message_of_another_node_stays(self, link, nodes):
        for _ in range(2):
            mine, theirs = link.send(nodes[0]), link.send(nodes[1])
            nodes[0].fetch()
            nodes[0].reply(mine)
            assert read(link, mine) == 1 and nodes[1].fetch() == theirs.object_id

    def test_replies_that_nobody_asks_for_are_few(self, link, nodes, few):
        messages, size = [], 0
        for number in range(FEW + 2):
            messages.append(link.send(nodes[0]))
            nodes[0].confirm(nodes[0].fetch())
            nodes[0].reply(messages[-1], {"bias": np.full(1000, number, np.float32)})
            size = size or kept(link)
        assert kept(link) < 1.01 * FEW * size
        heard = [message.object_id in link.heard(message) for message in messages]
        assert heard == [False] * 2 + [True] * FEW

    def test_those_of_another_node_are_not_counted_with_them(self, link, nodes, few):
        theirs = link.send(nodes[1])
        nodes[1].fetch()
        nodes[1].reply(theirs)
        for _ in range(FEW + 1):
            message = link.send(nodes[0])
            nodes[0].fetch()
            nodes[0].reply(message, MODEL)
        assert read(link, theirs) == 1


class TestExpired:
    """Nobody will be told of them any more, whatever is there of them."""

    @pytest.mark.parametrize(
        ("state", "when"),
        [
            ("not confirmed", "the app sends"),
            ("never fetched", "the app asks for it"),
            ("answered", "the app sends"),
            ("answered", "the app asks for another"),
            ("answered", "the app asks for it"),
        ],
    )
    def test_leaves_nothing(self, link, nodes, state, when):
        message, other = link.send(nodes[0]), link.send(nodes[1])
        if state != "never fetched":
            nodes[0].fetch()
        if state == "answered":
            nodes[0].reply(message, TRAINED)
        expire(link, message)
        if when == "the app sends":
            delete_expired(link.state, link.run)
        elif when == "the app asks for another":
            assert link.heard(other) == set()
        else:
            assert read(link, message) == 1, "Flower says that it has expired"
        nodes[1].confirm(nodes[1].fetch())
        assert kept(link) == 0
        assert link.state.num_message_ins() == 1 and link.state.num_message_res() == 0

    def test_the_message_that_is_asked_for_is_left_to_flower_without_its_parts(self, link, nodes):
        message = link.send(nodes[0])
        expire(link, message)
        delete_expired(link.state, link.run, [message.object_id])
        assert kept(link) == 0 and link.state.num_message_ins() == 1

    def test_what_the_app_is_reading_stays(self, link, nodes):
        message = link.send(nodes[0])
        nodes[0].fetch()
        reply = nodes[0].reply(message)
        assert link.state.get_message_res({message.object_id}, link.run)
        expire(link, message)
        delete_expired(link.state, link.run)
        assert link.is_there(reply.object_id)

    def test_what_has_not_expired_stays(self, link, nodes):
        message = link.send(nodes[0])
        delete_expired(link.state, link.run)
        nodes[0].fetch()
        nodes[0].reply(message)
        delete_expired(link.state, link.run)
        assert read(link, message) == 1

    def test_so_does_another_run(self, link, nodes):
        message = link.send(nodes[0])
        expire(link, message)
        delete_expired(link.state, link.run + 1)
        assert kept(link) > 0

    def test_the_app_that_sends_begins_with_it(self, link, nodes):
        message = link.send(nodes[0])
        expire(link, message)
        with pytest.raises(ValueError, match="must not be empty"):
            runtime_handlers.push_messages(PushAppMessagesRequest(), link.state, SimpleNamespace(run_id=link.run))
        assert kept(link) == 0
