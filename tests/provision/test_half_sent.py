"""Messages and replies of which a part never comes: nobody waits for them, and nobody else's are held up."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest
from fastapi import HTTPException
from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
)
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import (
    MODEL,
    TRAINED,
    begin,
    content,
    finish,
    labelled,
)

from cloister.deploy.superlink.abandoned import Abandoned, Sending
from cloister.deploy.superlink.unfinished import WholeReplies
from cloister.deploy.superlink.uploads import Upload


class TestMessagesThatAreNotAllThere:
    """As of an app that was killed while it sent them. A node waits for the parts, and looks for nothing else."""

    @pytest.fixture(autouse=True)
    def noted(self, link, monkeypatch):
        monkeypatch.setattr(runtime_handlers, "push_messages", runtime_handlers.push_messages)
        self.abandoned = Abandoned()
        self.abandoned.install()
        Sending(self.abandoned).install()

    @staticmethod
    def told(node):
        return [tree.object_id for tree in node.next()]

    def test_a_node_waits_for_them_until_it_is_sent_another_one(self, link, nodes):
        node, other = nodes
        first, _ = begin(link, node, 1)
        assert self.told(node) == [first.object_id]
        begin(link, other, 2)
        assert node.pull(first.object_id).object_found, "they may still come"
        second, answer = begin(link, node, 3)
        assert not node.pull(first.object_id).object_found, "the SuperNode looks for the next message"
        assert self.told(node) == [second.object_id]
        assert node.pull(second.object_id).object_found
        finish(link, second, answer)
        assert node.pull(second.object_id).object_available

    def test_what_another_run_is_sent_meanwhile_changes_nothing(self, link, nodes):
        node = nodes[0]
        first, _ = begin(link, node, 1)
        assert self.told(node) == [first.object_id]
        self.abandoned.sent(node.id, link.run + 1, frozenset({"of another run"}))
        assert node.pull(first.object_id).object_found, "that run has not taken its place"
        begin(link, node, 2)
        self.abandoned.sent(node.id, link.run + 1, frozenset({"and one more"}))
        assert not node.pull(first.object_id).object_found

    def test_a_node_that_was_not_told_yet_does_not_wait_either(self, link, nodes):
        first, _ = begin(link, nodes[0], 1)
        second, _ = begin(link, nodes[0], 2)
        told = self.told(nodes[0])
        if told == [first.object_id]:
            assert not nodes[0].pull(first.object_id).object_found
            told = self.told(nodes[0])
        assert told == [second.object_id]

    def test_a_message_that_is_all_there_can_be_fetched_whatever_is_sent(self, link, nodes):
        message, answer = begin(link, nodes[0], 1)
        finish(link, message, answer)
        assert self.told(nodes[0]) == [message.object_id]
        begin(link, nodes[0], 2)
        assert nodes[0].pull(message.object_id).object_available


class TestRepliesThatAreNotAllThere:
    """Flower's server app waits for the parts of a reply that it hears of, and looks at no other reply meanwhile."""

    @pytest.fixture(autouse=True)
    def whole(self, link, monkeypatch):
        monkeypatch.setattr(runtime_handlers, "pull_messages", runtime_handlers.pull_messages)
        WholeReplies(link.own.handover.unfinished).install()

    @staticmethod
    def asked(link, node):
        """A message that the node has, and a reply to it."""
        message = link.send(node)
        node.fetch()
        return message, labelled(Message(content(TRAINED), reply_to=message), node.id, link.run)

    def test_a_client_that_sends_no_part_hides_its_own_reply_alone(self, link, nodes):
        slow, quick = nodes
        (late, reply), (answered, _) = self.asked(link, slow), self.asked(link, quick)
        slow.announce(reply)
        quick.reply(answered)
        assert link.heard(late, answered) == {answered.object_id}
        assert link.heard(late) == set()

    @pytest.mark.parametrize("order", ["the root last", "the root first"])
    def test_a_reply_is_heard_with_its_last_part(self, link, nodes, order):
        message, reply = self.asked(link, nodes[0])
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        names = sorted(objects, key=lambda name: (name == reply.object_id) == (order == "the root last"))
        for name in names:
            assert link.heard(message) == set()
            assert nodes[0].push(answer.session_id, name, objects[name].deflate())
        assert link.heard(message) == {message.object_id}

    def test_an_error_is_heard_with_its_one_part(self, link, nodes):
        message, _ = self.asked(link, nodes[0])
        error = labelled(Message(Error(1, "why"), reply_to=message), nodes[0].id, link.run)
        answer = nodes[0].announce(error)
        assert link.heard(message) == set()
        nodes[0].push(answer.session_id, error.object_id, error.deflate())
        assert link.heard(message) == {message.object_id}

    def test_of_two_replies_the_one_that_is_whole_counts(self, link, nodes):
        message, reply = self.asked(link, nodes[0])
        nodes[0].announce(reply)
        second = nodes[0].reply(message, MODEL)
        assert link.heard(message) == {message.object_id} and link.is_there(second.object_id)

    def test_nobody_hides_the_reply_of_another(self, link, nodes):
        message, reply = self.asked(link, nodes[0])
        with pytest.raises(HTTPException, match="no reply to the message"):
            nodes[1].announce(labelled(Message(content(TRAINED), reply_to=message), nodes[1].id, link.run))
        with pytest.raises(HTTPException, match="src_node_id is not the node that sends"):
            nodes[1].announce(reply, src_node_id=nodes[0].id)
        nodes[0].reply(message)
        assert link.heard(message) == {message.object_id}

    def test_a_reply_is_not_heard_while_its_parts_are_on_their_way_to_flower(self, link, nodes, monkeypatch):
        message, _ = self.asked(link, nodes[0])
        heard, stored = [], link.state.store_object

        def store(*words):
            heard.append(link.heard(message))
            return stored(*words)

        monkeypatch.setattr(link.state, "store_object", store)
        nodes[0].reply(message)
        assert len(heard) > 3 and not any(heard)
        assert link.heard(message) == {message.object_id}

    def test_parts_are_taken_from_several_threads(self, link, nodes):
        """As a SuperNode sends them."""
        message, reply = self.asked(link, nodes[0])
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        with ThreadPoolExecutor(8) as pool:
            sent = [(name, objects[name].deflate()) for name in objects]
            assert all(pool.map(lambda part: nodes[0].push(answer.session_id, *part), sent * 3))
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)

    def test_parts_are_kept_one_after_the_other(self, link, nodes, monkeypatch):
        _, reply = self.asked(link, nodes[0])
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        both, met = Barrier(2), []

        def keep(*_):
            with suppress(BrokenBarrierError):
                met.append(both.wait(0.5))

        monkeypatch.setattr(Upload, "keep", keep)
        with ThreadPoolExecutor(2) as pool:
            sent = [(name, objects[name].deflate()) for name in objects][:2]
            list(pool.map(lambda part: nodes[0].push(answer.session_id, *part), sent))
        assert not met, "two threads wrote to one file"

    def test_what_was_begun_takes_no_space_once_the_node_is_given_another_message(self, link, nodes):
        _, reply = self.asked(link, nodes[0])
        answer, (first, *_) = nodes[0].announce(reply), get_all_nested_objects(reply).items()
        assert nodes[0].push(answer.session_id, first[0], first[1].deflate())
        link.send(nodes[0])
        nodes[0].fetch()
        assert not any(node.upload for node in link.own.nodes.values())

    def test_what_was_answered_takes_no_memory(self, link, nodes):
        message, _ = self.asked(link, nodes[0])
        nodes[0].reply(message)
        assert not link.own.handover.unfinished._messages and link.own.nodes[nodes[0].id].upload._file is None
