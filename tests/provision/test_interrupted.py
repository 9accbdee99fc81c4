"""What nodes were doing when a SuperLink was killed, at the next one."""

import itertools
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import TRAINED, SuperLink, begin, content, finish, labelled, names_of, nodes_of

from cloister.core.arrays import to_record
from cloister.deploy.superlink import apart, interrupted
from cloister.deploy.superlink.abandoned import Abandoned
from cloister.deploy.superlink.apart import OwnMessages
from cloister.deploy.superlink.interrupted import recover
from cloister.deploy.superlink.unfinished import WholeReplies


class TestARestart:
    """What nodes were doing when a SuperLink is killed, at the next one, which has its database and not its memory."""

    @pytest.fixture(autouse=True)
    def as_it_was(self, monkeypatch):
        for module, names in [(fleet_handlers, OwnMessages.names), (runtime_handlers, ("pull_messages",))]:
            for name in names:
                monkeypatch.setattr(module, name, getattr(module, name))

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "state.db"

    @pytest.fixture
    def link(self, path):
        """A SuperLink that has its state in a file, with nothing in front of Flower's functions yet."""
        self.flower = {name: getattr(fleet_handlers, name) for name in OwnMessages.names}
        self.hears = runtime_handlers.pull_messages
        link = SuperLink(str(path))
        self.start(link, [])
        return link

    @pytest.fixture
    def nodes(self, link):
        return nodes_of(link)

    def start(self, link, before):
        """Have a SuperLink begin that knows this of the one before it."""
        vars(fleet_handlers).update(self.flower)
        runtime_handlers.pull_messages = self.hears
        link.own = own = OwnMessages(before)
        own.install()
        link.abandoned = Abandoned(before)
        link.abandoned.install()
        WholeReplies(own.handover.unfinished).install()

    def restart(self, link, path):
        before = recover(path)
        self.start(link, before)
        return before

    @staticmethod
    def for_the_app(link, name):
        """What the server's app is answered when it asks for an object."""
        request = PullObjectRequest(node=Node(node_id=SUPERLINK_NODE_ID), run_id=link.run, object_id=name)
        return runtime_handlers.pull_object(request, link.state, SimpleNamespace(run_id=link.run))

    def begun(self, link, node):
        """A message, and a reply to it of which one part was sent."""
        message = link.send(node)
        node.confirm(node.fetch())
        reply = labelled(Message(content(TRAINED), reply_to=message), node.id, link.run)
        answer, objects = node.announce(reply), get_all_nested_objects(reply)
        part = next(name for name in objects if name != reply.object_id and not link.store.get(name))
        assert node.push(answer.session_id, part, objects[part].deflate())
        return message, reply, answer

    def test_nothing_is_known_of_a_new_database(self, path):
        assert recover(path) == []
        SuperLink(str(path))
        assert recover(path) == []

    def test_a_node_that_was_fetching_fetches_the_rest_and_replies(self, link, nodes, path):
        message, other = link.send(nodes[0]), link.send(nodes[1])
        (tree,) = nodes[0].next()
        self.restart(link, path)
        assert all(nodes[0].pull(name).object_available for name in names_of(tree))
        assert not nodes[0].pull(other.object_id).object_found, "it was not given to this node"
        assert not nodes[1].pull(other.object_id).object_found, "it was given to nobody"
        nodes[0].confirm(message.object_id)
        assert not nodes[0].pull(message.object_id).object_found
        reply = nodes[0].reply(message)
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)

    def test_a_node_that_did_not_hear_of_its_message_is_told_again(self, link, nodes, path):
        message, other = link.send(nodes[0]), link.send(nodes[1])
        nodes[0].next()  # and the answer does not arrive
        nodes[1].confirm(nodes[1].fetch())
        self.restart(link, path)
        assert nodes[0].fetch() == message.object_id and nodes[1].next() == []
        nodes[0].confirm(message.object_id)
        assert nodes[0].next() == [] and other.object_id not in link.heard(message, other)

    def test_a_node_that_is_fetching_is_not_told_again(self, link, nodes, path):
        message = link.send(nodes[0])
        nodes[0].next()
        self.restart(link, path)
        assert nodes[0].pull(message.object_id).object_available
        assert nodes[0].next() == []

    def test_a_node_goes_on_with_what_it_was_given_last(self, link, nodes, path):
        first, second = (link.send(nodes[0]) for _ in range(2))
        given = [nodes[0].next()[0].object_id for _ in range(2)]
        assert {*given} == {first.object_id, second.object_id}
        assert [each.message for each in self.restart(link, path)] == given
        assert nodes[0].pull(given[1]).object_available and not nodes[0].pull(given[0]).object_found

    def test_the_server_hears_that_a_reply_was_lost_with_the_next_part_of_it(self, link, nodes, path):
        message, reply, answer = self.begun(link, nodes[0])
        assert link.heard(message) == set()
        self.restart(link, path)
        assert link.heard(message) == set(), "the node may be training"
        for _ in range(2):
            assert not nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
        assert link.heard(message) == {message.object_id}

    @pytest.mark.parametrize("again", [False, True])
    def test_a_reply_that_came_whole_after_it_is_kept_whatever_comes_late(self, link, nodes, path, again):
        message, reply, _ = self.begun(link, nodes[0])
        self.restart(link, path)
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        for name in answer.objects_to_push:
            assert nodes[0].push(answer.session_id, name, objects[name].deflate())
        link.send(nodes[0])
        nodes[0].fetch()
        if again:
            assert not nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
        assert link.heard(message) == {message.object_id} and reply.object_id in link.store

    def test_who_sends_parts_of_no_reply_ends_no_wait_for_others(self, link, nodes, path):
        message, (_, reply, answer) = link.send(nodes[1]), self.begun(link, nodes[0])
        nodes[1].confirm(nodes[1].fetch())
        self.restart(link, path)
        assert not nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
        assert link.heard(message) == set()
        nodes[1].reply(message)
        assert link.heard(message) == {message.object_id}

    def half_handed_on(self, link, node):
        """A message whose reply Flower has with one part too few, as its own SuperLink leaves it."""
        message = link.send(node)
        node.confirm(node.fetch())
        reply = labelled(Message(content(TRAINED), reply_to=message), node.id, link.run)
        vars(fleet_handlers).update(self.flower)
        answer, objects = node.announce(reply), get_all_nested_objects(reply)
        *shown, _ = answer.objects_to_push
        assert all(node.push(answer.session_id, name, objects[name].deflate()) for name in shown)
        return message, reply

    def test_a_superlink_that_is_killed_while_it_hands_a_reply_to_flower_leaves_nothing_of_it(
        self, link, nodes, path, monkeypatch
    ):
        message = link.send(nodes[0])
        nodes[0].confirm(nodes[0].fetch())
        calls, stored = itertools.count(), link.state.store_object

        def killed(*words):
            if next(calls) == 2:
                raise SystemExit
            return stored(*words)

        with monkeypatch.context() as dying, pytest.raises(SystemExit):
            dying.setattr(link.state, "store_object", killed)
            nodes[0].reply(message)
        assert not self.replies(path)
        self.restart(link, path)
        assert link.heard(message) == set()
        nodes[0].reply(message)
        assert link.heard(message) == {message.object_id}

    def test_the_server_hears_at_once_of_a_reply_that_is_there_in_part(self, link, nodes, path):
        message, reply = self.half_handed_on(link, nodes[0])
        self.restart(link, path)
        assert link.heard(message) == {message.object_id}
        assert not self.for_the_app(link, reply.object_id).object_found, "Flower's grid waits for what is found"

    def test_without_that_the_server_would_wait(self, link, nodes):
        message, reply = self.half_handed_on(link, nodes[0])
        self.start(link, [])
        assert link.heard(message) == {message.object_id}
        found = self.for_the_app(link, reply.object_id)
        assert found.object_found and not found.object_available

    @pytest.mark.parametrize("begun", [False, True])
    def test_a_client_that_sends_no_part_to_the_next_one_holds_nobody_up(self, link, nodes, path, begun):
        if begun:
            message, reply, _ = self.begun(link, nodes[0])
        else:
            message = link.send(nodes[0])
            nodes[0].fetch()
            reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
        self.restart(link, path)
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        assert link.heard(message) == set()
        for name in answer.objects_to_push:
            assert nodes[0].push(answer.session_id, name, objects[name].deflate())
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)

    def test_a_reply_that_is_all_there_is_kept(self, link, nodes, path):
        message = link.send(nodes[0])
        nodes[0].fetch()
        reply = nodes[0].reply(message)
        assert self.restart(link, path) == []
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)

    def test_a_reply_that_was_being_handed_to_the_app_is_handed_to_it_again(self, link, nodes, path):
        message = link.send(nodes[0])
        nodes[0].fetch()
        reply = nodes[0].reply(message)
        assert link.state.get_message_res({message.object_id}, link.run), "and Flower was killed before it answered"
        assert link.heard(message) == set()
        self.restart(link, path)
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)
        self.restart(link, path)
        assert message.object_id not in self.replies(path), "what was heard is deleted"

    @staticmethod
    def replies(path):
        """The messages to which the database has a reply."""
        with closing(sqlite3.connect(path)) as connection:
            return {name for (name,) in connection.execute("SELECT reply_to_message_id FROM message_res")}

    def test_a_message_that_has_expired_is_not_waited_for(self, link, nodes, path, monkeypatch):
        link.send(nodes[0])
        nodes[0].fetch()
        later = datetime.now(UTC) + timedelta(days=365)
        monkeypatch.setattr(interrupted, "datetime", SimpleNamespace(now=lambda _: later))
        assert recover(path) == []

    def test_what_the_app_was_sending_goes_on(self, link, nodes, path):
        message, answer = begin(link, nodes[0], 1)
        assert [tree.object_id for tree in nodes[0].next()] == [message.object_id]
        self.restart(link, path)
        assert nodes[0].pull(message.object_id).object_found, "it may still come"
        link.abandoned.sent(nodes[0].id, link.run, frozenset({message.object_id}))
        assert nodes[0].pull(message.object_id).object_found, "the app sends the same one again"
        finish(link, message, answer)
        assert nodes[0].pull(message.object_id).object_available

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("was_sent", [False, True])
    @pytest.mark.parametrize("before", ["nothing", "a reply that Flower refuses", "a reply without its parts"])
    def test_a_tree_with_a_message_in_it_gives_no_part_of_others(self, link, nodes, path, was_sent, restarts, before):
        """A reply whose tree says that a guessed array of somebody else belongs to the node's own message."""
        sender, curious = nodes
        message, own = link.send(sender), link.send(curious)
        sent = own.deflate(), curious.fetch()
        curious.confirm(own.object_id)
        if before != "nothing":
            self.answer_without_effect(link, curious, own, before)
        array = get_object_tree(to_record({"x": TRAINED["bias"]})["x"])
        guess = next(name for name in names_of(array) if name != array.object_id)
        poisoned = ObjectTree(object_id=own.object_id, children=[ObjectTree(object_id=guess)])
        reply = labelled(Message(content({"b": np.zeros(3, np.float32)}), reply_to=own), curious.id, link.run)
        answer = curious.announce(reply, ObjectTree(object_id=reply.object_id, children=[poisoned]))
        assert not curious.push(answer.session_id, own.object_id, sent[0]), "that part says itself what its parts are"
        sender.confirm(sender.fetch())
        theirs = sender.reply(message, TRAINED if was_sent else {name: one + 1 for name, one in TRAINED.items()})
        assert link.heard(message) == {message.object_id}
        link.store.delete(theirs.object_id)
        if restarts:
            assert all(guess not in each.parts for each in self.restart(link, path))
        assert not curious.pull(guess).object_found
        curious.next()
        assert not curious.pull(guess).object_found

    @staticmethod
    def answer_without_effect(link, node, message, how):
        """Have it seem that the node has answered."""
        reply = Message(Error(1, "why"), reply_to=message)
        if how == "a reply that Flower refuses":
            reply.metadata.ttl = 1e9
        reply = labelled(reply, node.id, link.run)
        answer = node.announce(reply)
        if how == "a reply that Flower refuses":
            assert node.push(answer.session_id, reply.object_id, reply.deflate())

    def test_a_message_is_told_again_after_a_busy_moment_of_the_database(self, link, nodes, path, monkeypatch):
        message = link.send(nodes[0])
        nodes[0].next()  # and the answer does not arrive
        self.restart(link, path)
        with monkeypatch.context() as busy, pytest.raises(TimeoutError):
            busy.setattr(apart, "redeliver_message", self.fail)
            nodes[0].next()
        assert nodes[0].fetch() == message.object_id
        assert nodes[0].next() == []

    @staticmethod
    def fail(*_):
        raise TimeoutError

    def test_a_node_that_confirms_once_more_keeps_its_reply(self, link, nodes, path):
        message, node = link.send(nodes[0]), nodes[0]
        name = node.fetch()
        self.restart(link, path)
        node.confirm(name)
        reply = node.reply(message)
        assert node.next() == [] and self.replies(path) == {message.object_id}
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)
