"""What stays in the state database of a run: of what nobody will fetch any more, nothing."""

import sqlite3
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import MODEL, TRAINED, SuperLink, content, labelled, names_of, nodes_of

from cloister.deploy import database
from cloister.deploy.busy import AskedAgain
from cloister.deploy.interrupted import expire_message
from cloister.deploy.leftovers import UNHEARD, Leftovers, forget_expired

pytestmark = pytest.mark.usefixtures("flower_as_it_was")


@pytest.fixture
def link(guarded, tmp_path):
    Leftovers().install()
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


class TestAfterEachRound:
    def test_a_node_that_confirms_nothing_leaves_one_message_at_most(self, link, nodes):
        sizes = []
        for _ in range(4):
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

    def test_replies_that_nobody_asks_for_are_few(self, link, nodes):
        messages, size = [], 0
        for number in range(UNHEARD + 3):
            messages.append(link.send(nodes[0]))
            nodes[0].confirm(nodes[0].fetch())
            nodes[0].reply(messages[-1], {"bias": np.full(1000, number, np.float32)})
            size = size or kept(link)
        assert kept(link) < 1.01 * UNHEARD * size
        heard = [message.object_id in link.heard(message) for message in messages]
        assert heard == [False] * 3 + [True] * UNHEARD

    def test_those_of_another_node_are_not_counted_with_them(self, link, nodes):
        theirs = link.send(nodes[1])
        nodes[1].fetch()
        nodes[1].reply(theirs)
        for _ in range(UNHEARD + 1):
            message = link.send(nodes[0])
            nodes[0].fetch()
            nodes[0].reply(message, MODEL)
        assert read(link, theirs) == 1


class TestExpired:
    """Nobody will be told of them any more, whatever is there of them."""

    @pytest.mark.parametrize("state", ["never fetched", "not confirmed", "answered"])
    @pytest.mark.parametrize("when", ["the app sends", "the app asks for another", "the app asks for it"])
    def test_leaves_nothing(self, link, nodes, state, when):
        message, other = link.send(nodes[0]), link.send(nodes[1])
        if state != "never fetched":
            nodes[0].fetch()
        if state == "answered":
            nodes[0].reply(message, TRAINED)
        expire(link, message)
        if when == "the app sends":
            forget_expired(link.state, link.run)
        elif when == "the app asks for another":
            assert link.heard(other) == set()
        else:
            assert read(link, message) == 1, "Flower says that it has expired"
        nodes[1].confirm(nodes[1].fetch())
        assert kept(link) == 0
        assert link.state.num_message_ins() == 1 and link.state.num_message_res() == 0

    def test_what_the_app_is_reading_stays(self, link, nodes):
        message = link.send(nodes[0])
        nodes[0].fetch()
        reply = nodes[0].reply(message)
        assert link.state.get_message_res({message.object_id}, link.run)
        expire(link, message)
        forget_expired(link.state, link.run)
        assert link.is_there(reply.object_id)

    def test_what_has_not_expired_stays(self, link, nodes):
        message = link.send(nodes[0])
        forget_expired(link.state, link.run)
        nodes[0].fetch()
        nodes[0].reply(message)
        forget_expired(link.state, link.run)
        assert read(link, message) == 1

    def test_so_does_another_run(self, link, nodes):
        message = link.send(nodes[0])
        expire(link, message)
        forget_expired(link.state, link.run + 1)
        assert kept(link) > 0

    def test_the_app_that_sends_begins_with_it(self, link, nodes):
        message = link.send(nodes[0])
        expire(link, message)
        with pytest.raises(ValueError, match="must not be empty"):
            runtime_handlers.push_messages(PushAppMessagesRequest(), link.state, SimpleNamespace(run_id=link.run))
        assert kept(link) == 0


class TestABusyDatabase:
    """A server's app is asked to send again what was not stored: an answer that it was not ends the run."""

    @pytest.fixture
    def begun(self, tmp_path, monkeypatch):
        """An app that has announced a message, and has its parts to send."""
        monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
        database.set_up(2 * 10**6)
        AskedAgain().install()
        link = SuperLink(str(tmp_path / "state.db"))
        large = Message(content({"large": np.ones(200_000, np.float32)}), nodes_of(link)[0].id, "train")
        return link, labelled(large, SUPERLINK_NODE_ID, link.run), tmp_path / "state.db"

    def announce(self, link, message):
        request = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return runtime_handlers.push_messages(request, link.state, SimpleNamespace(run_id=link.run))

    def push(self, link, session, name, part):
        request = PushObjectRequest(
            node=Node(node_id=SUPERLINK_NODE_ID),
            run_id=link.run,
            object_id=name,
            object_content=part.deflate(),
            session_id=session,
        )
        return runtime_handlers.push_object(request, link.state, SimpleNamespace(run_id=link.run)).stored

    def locked(self, path):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return closing(other)

    def test_that_is_locked(self, begun):
        link, message, path = begun
        with self.locked(path), pytest.raises(database.HTTPException) as announced:
            self.announce(link, message)
        session = self.announce(link, message).session_id
        with self.locked(path), pytest.raises(database.HTTPException) as pushed:
            self.push(link, session, message.object_id, message)
        assert announced.value.status_code == pushed.value.status_code == 503
        assert self.push(link, session, message.object_id, message)

    def test_that_is_full(self, begun):
        link, message, _ = begun
        session = self.announce(link, message).session_id
        link.state.query("CREATE TABLE ballast AS SELECT zeroblob(1000000) AS content")
        (name, part) = max(get_all_nested_objects(message).items(), key=lambda each: len(each[1].deflate()))
        with pytest.raises(database.HTTPException, match="full: try again") as error:
            self.push(link, session, name, part)
        link.state.query("DROP TABLE ballast")
        assert error.value.status_code == 503 and self.push(link, session, name, part)

    def test_what_was_not_asked_for_is_no_trouble(self, begun):
        link, message, _ = begun
        assert not self.push(link, "no session", message.object_id, message)
