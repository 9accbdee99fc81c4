"""Content of the state database of a run: nothing stays that no party will fetch any more."""

from types import SimpleNamespace

import pytest
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import TRAINED, names_of
from sqlalchemy import update

from cloister.deploy.superlink.gate import delete_expired

pytestmark = pytest.mark.usefixtures("gate")


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
    names = [message.object_id for message in messages]
    with link.state.session() as session:
        session.execute(update(MessageIns).where(MessageIns.message_id.in_(names)).values(ttl=0.0))


class TestAfterEachRound:
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


class TestExpired:
    """Nobody will be told of them any more, whatever is there of them."""

    @pytest.mark.parametrize("state", ["never fetched", "not confirmed", "answered"])
    def test_leaves_nothing(self, link, nodes, state):
        message = link.send(nodes[0])
        other_message = link.send(nodes[1])
        if state != "never fetched":
            nodes[0].fetch()
        if state == "answered":
            nodes[0].reply(message, TRAINED)
        expire(link, message)
        delete_expired(link.state, link.run)
        assert message.object_id not in link.store
        other = nodes[1].fetch()
        nodes[1].reply(other_message)
        assert other == other_message.object_id and read(link, other_message) == 1 and kept(link) == 0
        assert link.state.num_message_res() == 0

    def test_replies_that_nobody_asked_for_go_with_their_messages(self, link, nodes):
        messages = []
        for _ in range(3):
            messages.append(link.send(nodes[0]))
            nodes[0].fetch()
            nodes[0].reply(messages[-1])
        assert kept(link) > 0
        expire(link, *messages)
        delete_expired(link.state, link.run)
        assert kept(link) == 0 and link.state.num_message_res() == 0

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
