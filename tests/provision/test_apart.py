"""Nodes at a SuperLink of Flower's own, one of which asks for what another one has sent."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, OBJECT_PUSH_SESSION_TTL_SECONDS, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.core.arrays import from_record, to_record
from cloister.core.identity import assume_run
from cloister.deploy import interrupted, unfinished
from cloister.deploy.abandoned import Abandoned, Sending
from cloister.deploy.apart import OwnMessages
from cloister.deploy.interrupted import take_up
from cloister.deploy.unfinished import GIVEN_UP, WholeReplies

MODEL = {"kernel": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
TRAINED = {"kernel": np.ones((64, 10), np.float32), "bias": np.arange(10, dtype=np.float32)}


class SuperLink:
    """The state of a SuperLink with one run that goes on."""

    def __init__(self, path):
        assume_run()
        objects = ObjectStoreFactory(path)
        self.state = LinkStateFactory(path, NoOpFederationManager(), objects).state()
        self.store = objects.store()
        self.run = self.state.create_run(
            "a/b", "1", "0" * 64, {}, "@none/default", None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (run,) = self.state.get_run_info(run_ids=[self.run])
        self.state.claim_task(run.primary_task_id)
        self.state.activate_task(run.primary_task_id)

    def send(self, node):
        """A message with the model, as the server's app sends it."""
        message = labelled(Message(content(MODEL), node.id, "train"), SUPERLINK_NODE_ID, self.run)
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(message), get_object_tree(message), session
        )
        assert stored
        for name in missing:
            assert self.state.store_object(self.run, session, name, get_all_nested_objects(message)[name].deflate())
        return message

    def heard(self, *messages):
        """The messages that the server's app hears of a reply to, when it asks for replies to these."""
        request = PullAppMessagesRequest(message_ids=[message.object_id for message in messages])
        found = runtime_handlers.pull_messages(request, self.state, SimpleNamespace(run_id=self.run))
        return {reply.metadata.reply_to_message_id for reply in found.messages_list}

    def is_complete(self, message):
        """Whether the server's app can read the reply to a message."""
        (reply,) = self.state.get_message_res({message.metadata.message_id}, self.run)
        return self.is_there(reply.metadata.message_id)

    def is_there(self, name):
        """Whether an object is, with all its parts."""
        return all(self.store.get(part) for part in names_of(self.store.get_object_tree(name)))


@dataclass
class Client:
    """A node that speaks Flower's Fleet interface."""

    link: SuperLink
    id: int

    def next(self):
        """The trees of the messages that it is told of."""
        request = PullMessagesRequest(node=Node(node_id=self.id))
        return list(
            fleet_handlers.pull_messages(
                request=request, state=self.link.state, store=self.link.store
            ).message_object_trees
        )

    def fetch(self):
        """The objects of the next message."""
        (tree,) = self.next()
        assert all(self.pull(name).object_available for name in names_of(tree))
        return tree.object_id

    def pull(self, name):
        request = PullObjectRequest(node=Node(node_id=self.id), run_id=self.link.run, object_id=name)
        return fleet_handlers.pull_object(request=request, state=self.link.state)

    def confirm(self, name):
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=self.id), run_id=self.link.run, message_object_id=name
        )
        fleet_handlers.confirm_message_received(request=request, state=self.link.state, store=self.link.store)

    def run(self):
        """What the SuperLink says about the run."""
        request = GetRunRequest(node=Node(node_id=self.id), run_id=self.link.run)
        return fleet_handlers.get_run(request=request, state=self.link.state).run

    def announce(self, reply, tree=None, sender=None):
        """What a SuperLink asks for of a reply, whose parts and whose sender are said to be these."""
        wire = message_to_proto(remove_content_from_message(reply))
        wire.metadata.src_node_id = self.id if sender is None else sender
        request = PushMessagesRequest(
            node=Node(node_id=self.id),
            messages_list=[wire],
            message_object_trees=[get_object_tree(reply) if tree is None else tree],
        )
        return fleet_handlers.push_messages(request=request, state=self.link.state)

    def push(self, session, name, content):
        request = PushObjectRequest(
            node=Node(node_id=self.id), run_id=self.link.run, object_id=name, object_content=content, session_id=session
        )
        return fleet_handlers.push_object(request=request, state=self.link.state).stored

    def reply(self, message, arrays=TRAINED, without=(), first=None):
        """Answer with these arrays, as a SuperNode does."""
        reply = labelled(Message(content(arrays), reply_to=message), self.id, self.link.run)
        answer, objects = self.announce(reply), get_all_nested_objects(reply)
        order = sorted(answer.objects_to_push, key=lambda name: name != (first and reply.object_id))
        for name in order:
            if name not in without:
                assert self.push(answer.session_id, name, objects[name].deflate())
        return reply


def content(arrays):
    return RecordDict({"arrays": to_record(arrays), "config": ConfigRecord({"server-round": 1})})


def labelled(message, sender, run):
    """The message with its sender, its run and its id, as Flower's processes write them."""
    message.metadata.__dict__.update(_run_id=run, _src_node_id=sender, _message_id="")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def names_of(tree):
    return [tree.object_id, *(name for child in tree.children for name in names_of(child))]


def objects_of(array):
    """The objects that an array is cut into, by name."""
    return get_all_nested_objects(to_record({"x": array})["x"])


@pytest.fixture
def guarded(monkeypatch):
    """Flower's functions keep every node to its own objects, until the test is over."""
    for name in OwnMessages.names:  # Abandoned.names among them
        monkeypatch.setattr(fleet_handlers, name, getattr(fleet_handlers, name))
    own = OwnMessages()
    own.install()
    return own


@pytest.fixture
def link(guarded):
    """A SuperLink with two nodes."""
    link = SuperLink(FLWR_IN_MEMORY_DB_NAME)
    link.own = guarded
    return link


@pytest.fixture
def nodes(link):
    """Those of the SuperLink."""
    return nodes_of(link)


def nodes_of(link):
    found = []
    for number in range(2):
        node = link.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, bytes([number]) * 33, 0)
        link.state.activate_node(node, 1000.0)
        found.append(Client(link, node))
    return found


@pytest.mark.parametrize("kept", ["in memory", "in a file"])
def test_a_reply_reaches_the_server_whole(guarded, kept, tmp_path):
    link = SuperLink(FLWR_IN_MEMORY_DB_NAME if kept == "in memory" else str(tmp_path / "state.db"))
    for node, first in zip(nodes_of(link), (False, True), strict=True):
        message = link.send(node)
        node.confirm(node.fetch())
        node.reply(message, first=first)
        assert link.is_complete(message)


def test_who_replies_with_what_is_there_already_is_heard_too(link, nodes):
    for node in nodes:
        message = link.send(node)
        node.fetch()
        node.reply(message, MODEL)
        assert link.is_complete(message)


class Sent:
    """Two nodes have a message, and one of them has replied, with an array that the other one guesses or does not."""

    def __init__(self, link, nodes, guess):
        sender, self.curious = nodes
        message, self.message = link.send(sender), link.send(self.curious)
        sender.fetch()
        self.curious.fetch()
        sender.reply(message)
        self.guess = objects_of(guess)


@pytest.fixture(params=["sent", "not sent"])
def sent(request, link, nodes):
    return Sent(link, nodes, TRAINED["bias"] if request.param == "sent" else TRAINED["bias"] + 1)


def test_no_object_of_another_node_is_given(sent):
    answers = [sent.curious.pull(name) for name in sent.guess]
    assert not any(answer.object_found or answer.object_available or answer.object_content for answer in answers)


def test_whatever_is_there_is_asked_for(sent):
    reply = labelled(
        Message(content({"bias": np.zeros(3)}), reply_to=sent.message), sent.curious.id, sent.curious.link.run
    )
    guessed = [ObjectTree(object_id=name) for name in sent.guess]
    tree = get_object_tree(reply)
    tree.children.extend(guessed)
    assert set(sent.guess) <= set(sent.curious.announce(reply, tree).objects_to_push)


def test_a_contradiction_to_what_is_there_looks_like_none(sent):
    reply = labelled(
        Message(content({"bias": np.zeros(3)}), reply_to=sent.message), sent.curious.id, sent.curious.link.run
    )
    other = ObjectTree(object_id="f" * 64)
    tree = ObjectTree(
        object_id=reply.object_id, children=[ObjectTree(object_id=name, children=[other]) for name in sent.guess]
    )
    answer = sent.curious.announce(reply, tree)
    assert sorted(answer.objects_to_push) == sorted(set(names_of(tree)))
    assert answer.session_id and answer.reconnect.reconnect == 5 and dict(answer.results) == {reply.object_id: 0}


def test_a_part_is_taken_as_often_as_it_is_shown(sent):
    reply = labelled(
        Message(content({"b": TRAINED["bias"]}), reply_to=sent.message), sent.curious.id, sent.curious.link.run
    )
    answer, objects = sent.curious.announce(reply), get_all_nested_objects(reply)
    for name in (*objects, *objects):
        assert sent.curious.push(answer.session_id, name, objects[name].deflate())


def test_a_reply_without_a_part_that_another_node_sent_does_not_reach_the_server(link, nodes):
    sent = Sent(link, nodes, TRAINED["bias"])
    sent.curious.reply(sent.message, without=sent.guess, first=True)
    assert not link.is_complete(sent.message)


@pytest.mark.parametrize("name", ["a part", "no part"])
def test_a_name_without_its_content_is_not_taken(link, nodes, name):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    answer = nodes[0].announce(reply)
    chosen = answer.objects_to_push[0] if name == "a part" else uuid4().hex
    assert not nodes[0].push(answer.session_id, chosen, b"something else")


def test_no_node_replies_in_the_name_of_another(link, nodes):
    mine = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=mine), nodes[1].id, link.run)
    answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
    taken = {name: nodes[0].push(answer.session_id, name, objects[name].deflate()) for name in objects}
    assert [name for name in taken if not taken[name]] == [reply.object_id]
    assert not link.is_complete(mine)


@pytest.mark.parametrize("bare", ["neither content nor error", "no message"])
def test_a_reply_that_the_server_could_not_read_is_not_taken(link, nodes, bare):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    body = WireMessage(metadata=message_to_proto(reply).metadata).SerializeToString()
    data = ConfigRecord().deflate() if bare == "no message" else b"Message  %d\0" % len(body) + body
    assert bare == "no message" or get_object_body(data, Message) == body
    name = get_object_id(data)
    answer = nodes[0].announce(reply, ObjectTree(object_id=name))
    assert list(answer.objects_to_push) == [name]
    assert not nodes[0].push(answer.session_id, name, data)


def test_an_error_is_taken(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(Error(1, "why"), reply_to=message), nodes[0].id, link.run)
    answer = nodes[0].announce(reply)
    assert nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
    assert link.is_complete(message)


def test_no_node_deletes_what_another_one_was_sent(link, nodes):
    message = link.send(nodes[0])
    nodes[1].confirm(message.object_id)
    assert nodes[0].fetch() == message.object_id
    nodes[0].confirm(message.object_id)
    assert not nodes[0].pull(message.object_id).object_found


def test_no_node_hears_how_many_others_reply_or_how_long_they_take(link, nodes):
    curious, other = nodes
    message, before = link.send(other), curious.run()
    other.fetch()
    other.reply(message)
    link.state.add_clientapp_runtime(link.run, 12.5)
    (known,) = link.state.get_run_info(run_ids=[link.run])
    assert known.bytes_recv and known.bytes_sent and known.clientapp_runtime
    assert curious.run() == before
    assert before.run_id == link.run and before.fab_hash == "0" * 64


def test_what_a_busy_database_did_not_take_is_sent_again(link, nodes, monkeypatch):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
    stored = link.state.store_object
    for name in sorted(objects, key=lambda name: name != reply.object_id):
        monkeypatch.setattr(link.state, "store_object", busy)
        if name != reply.object_id and not link.store.get(name):  # the first is kept back until the others are there
            with pytest.raises(TimeoutError):
                nodes[0].push(answer.session_id, name, objects[name].deflate())
        monkeypatch.setattr(link.state, "store_object", stored)
        assert nodes[0].push(answer.session_id, name, objects[name].deflate())
    assert link.is_complete(message)


def busy(*_):
    raise TimeoutError


def test_what_the_server_reads_is_what_was_sent(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = nodes[0].reply(message)
    arrays = from_record(reply.content.array_records["arrays"])
    assert all(link.store.get(name) for array in arrays.values() for name in objects_of(array))


class TestMessagesThatAreNotAllThere:
    """As of an app that was killed while it sent them. A node waits for the parts, and looks for nothing else."""

    @pytest.fixture(autouse=True)
    def noted(self, link, monkeypatch):
        monkeypatch.setattr(runtime_handlers, "push_messages", runtime_handlers.push_messages)
        self.abandoned = Abandoned()
        self.abandoned.install()
        Sending(self.abandoned).install()

    @staticmethod
    def begin(link, node, number):
        """Send all of a message but its parts."""
        message = Message(RecordDict({"config": ConfigRecord({"number": number})}), node.id, "train")
        message = labelled(message, SUPERLINK_NODE_ID, link.run)
        request = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return message, runtime_handlers.push_messages(request, link.state, SimpleNamespace(run_id=link.run))

    @staticmethod
    def finish(link, message, answer):
        for name in answer.objects_to_push:
            part = get_all_nested_objects(message)[name].deflate()
            assert link.state.store_object(link.run, answer.session_id, name, part)

    @staticmethod
    def told(node):
        return [tree.object_id for tree in node.next()]

    def test_a_node_waits_for_them_until_it_is_sent_another_one(self, link, nodes):
        node, other = nodes
        first, _ = self.begin(link, node, 1)
        assert self.told(node) == [first.object_id]
        self.begin(link, other, 2)
        assert node.pull(first.object_id).object_found, "they may still come"
        second, answer = self.begin(link, node, 3)
        assert not node.pull(first.object_id).object_found, "the SuperNode looks for the next message"
        assert self.told(node) == [second.object_id]
        assert node.pull(second.object_id).object_found
        self.finish(link, second, answer)
        assert node.pull(second.object_id).object_available

    def test_what_another_run_is_sent_meanwhile_changes_nothing(self, link, nodes):
        node = nodes[0]
        first, _ = self.begin(link, node, 1)
        assert self.told(node) == [first.object_id]
        self.abandoned.sent(node.id, link.run + 1, frozenset({"of another run"}))
        assert node.pull(first.object_id).object_found, "that run has not taken its place"
        self.begin(link, node, 2)
        self.abandoned.sent(node.id, link.run + 1, frozenset({"and one more"}))
        assert not node.pull(first.object_id).object_found

    def test_a_node_that_was_not_told_yet_does_not_wait_either(self, link, nodes):
        first, _ = self.begin(link, nodes[0], 1)
        second, _ = self.begin(link, nodes[0], 2)
        told = self.told(nodes[0])
        if told == [first.object_id]:
            assert not nodes[0].pull(first.object_id).object_found
            told = self.told(nodes[0])
        assert told == [second.object_id]

    def test_a_message_that_is_all_there_can_be_fetched_whatever_is_sent(self, link, nodes):
        message, answer = self.begin(link, nodes[0], 1)
        self.finish(link, message, answer)
        assert self.told(nodes[0]) == [message.object_id]
        self.begin(link, nodes[0], 2)
        assert nodes[0].pull(message.object_id).object_available


class TestRepliesThatAreNotAllThere:
    """Flower's server app waits for the parts of a reply that it hears of, and looks at no other reply meanwhile."""

    @pytest.fixture(autouse=True)
    def whole(self, link, monkeypatch):
        monkeypatch.setattr(runtime_handlers, "pull_messages", runtime_handlers.pull_messages)
        WholeReplies(link.own.unfinished).install()

    @pytest.fixture
    def clock(self, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr(unfinished, "time", SimpleNamespace(monotonic=lambda: now[0]))
        return now

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

    def test_a_second_reply_that_is_whole_does_not_show_the_first(self, link, nodes):
        message, reply = self.asked(link, nodes[0])
        nodes[0].announce(reply)
        nodes[0].reply(message, MODEL)
        assert link.heard(message) == set()

    def test_nobody_hides_the_reply_of_another(self, link, nodes):
        message, reply = self.asked(link, nodes[0])
        nodes[1].announce(labelled(Message(content(TRAINED), reply_to=message), nodes[1].id, link.run))
        nodes[0].reply(message)
        nodes[1].announce(reply)
        assert link.heard(message) == {message.object_id}

    @pytest.mark.parametrize("meanwhile", ["the same part", "all other parts"])
    def test_a_reply_is_not_heard_while_a_part_is_on_its_way_to_flower(self, link, nodes, monkeypatch, meanwhile):
        """A SuperNode sends parts in parallel; the database fails for one of them after others were answered."""
        message, reply = self.asked(link, nodes[0])
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        part = next(name for name in objects_of(TRAINED["kernel"]) if not link.store.get(name))
        others, stored = [name for name in objects if name != part], link.state.store_object

        def push(names):
            for name in names:
                assert nodes[0].push(answer.session_id, name, objects[name].deflate())

        def busy_meanwhile(*_):
            monkeypatch.setattr(link.state, "store_object", stored)
            push([part] if meanwhile == "the same part" else others)
            raise TimeoutError

        push(others if meanwhile == "the same part" else [])
        monkeypatch.setattr(link.state, "store_object", busy_meanwhile)
        with pytest.raises(TimeoutError):
            push([part])
        assert link.heard(message) == set()
        push([part])
        assert link.heard(message) == {message.object_id} and all(link.store.get(name) for name in objects)

    def test_a_reply_that_flower_gives_up_is_shown(self, link, nodes, clock):
        """Flower answers for it: at once, as it waits no longer for the parts."""
        message, reply = self.asked(link, nodes[0])
        answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
        clock[0] += GIVEN_UP - 1
        (name,) = [name for name in objects if name != reply.object_id and not link.store.get(name)][:1]
        assert nodes[0].push(answer.session_id, name, objects[name].deflate())
        clock[0] += GIVEN_UP - 1
        assert link.heard(message) == set()
        clock[0] += 1
        assert link.heard(message) == {message.object_id}
        assert GIVEN_UP > OBJECT_PUSH_SESSION_TTL_SECONDS

    def test_what_was_answered_takes_no_memory(self, link, nodes):
        message, _ = self.asked(link, nodes[0])
        nodes[0].reply(message)
        assert not link.own.unfinished._asked and not link.own.unfinished._begun


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

    def start(self, link, before):
        """Have a SuperLink begin that knows this of the one before it."""
        vars(fleet_handlers).update(self.flower)
        runtime_handlers.pull_messages = self.hears
        own = OwnMessages(before)
        own.install()
        link.abandoned = Abandoned(before)
        link.abandoned.install()
        WholeReplies(own.unfinished).install()

    def restart(self, link, path):
        before = take_up(path)
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
        assert take_up(path) == []
        SuperLink(str(path))
        assert take_up(path) == []

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

    def test_the_server_hears_at_once_that_a_reply_was_lost(self, link, nodes, path):
        """Its parts are refused: which of them the node has shown is not known any more."""
        message, reply, answer = self.begun(link, nodes[0])
        assert link.heard(message) == set()
        self.restart(link, path)
        assert not nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
        assert link.heard(message) == {message.object_id}
        assert not self.for_the_app(link, reply.object_id).object_found, "Flower's grid waits for what is found"

    def test_without_that_the_server_would_wait(self, link, nodes):
        message, reply, _ = self.begun(link, nodes[0])
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
        assert take_up(path) == []

    def test_what_the_app_was_sending_goes_on(self, link, nodes, path):
        message, answer = TestMessagesThatAreNotAllThere.begin(link, nodes[0], 1)
        assert [tree.object_id for tree in nodes[0].next()] == [message.object_id]
        self.restart(link, path)
        assert nodes[0].pull(message.object_id).object_found, "it may still come"
        link.abandoned.sent(nodes[0].id, link.run, frozenset({message.object_id}))
        assert nodes[0].pull(message.object_id).object_found, "the app sends the same one again"
        TestMessagesThatAreNotAllThere.finish(link, message, answer)
        assert nodes[0].pull(message.object_id).object_available

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("is_told_again", [False, True])
    @pytest.mark.parametrize("was_sent", [False, True])
    def test_a_tree_with_a_message_in_it_gives_no_part_of_others(
        self, link, nodes, path, was_sent, is_told_again, restarts
    ):
        """A reply whose tree says that a guessed array of somebody else belongs to the node's own message."""
        sender, curious = nodes
        message, own = link.send(sender), link.send(curious)
        curious.confirm(curious.fetch())
        array = get_object_tree(to_record({"x": TRAINED["bias"]})["x"])
        guess = next(name for name in names_of(array) if name != array.object_id)
        poisoned = ObjectTree(object_id=own.object_id, children=[ObjectTree(object_id=guess)])
        reply = labelled(Message(content({"b": np.zeros(3, np.float32)}), reply_to=own), curious.id, link.run)
        curious.announce(reply, ObjectTree(object_id=reply.object_id, children=[poisoned]))
        sender.confirm(sender.fetch())
        theirs = sender.reply(message, TRAINED if was_sent else {name: one + 1 for name, one in TRAINED.items()})
        assert link.heard(message) == {message.object_id}
        link.store.delete(theirs.object_id)
        if restarts:
            self.restart(link, path)
        if is_told_again:
            curious.next()
        assert not curious.pull(guess).object_found

    def test_a_node_that_confirms_once_more_keeps_its_reply(self, link, nodes, path):
        message, node = link.send(nodes[0]), nodes[0]
        name = node.fetch()
        self.restart(link, path)
        node.confirm(name)
        reply = node.reply(message)
        assert node.next() == [] and self.replies(path) == {message.object_id}
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)
