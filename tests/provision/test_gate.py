"""Actions of a registered node against others at `cloister superlink`, by the numbers of the demonstrations of it.

B is the node that attacks, A another one. What is refused is logged with B. What is not refused has no effect on A.
"""

import logging
import math
import os
from contextlib import suppress

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.servicer.fleet import fleet_handlers
from open_link import TRAINED, SuperLink, begin, content, finish, labelled, names_of, nodes_of
from served_app import answered, given, grid_of, sent
from support import failures

from cloister.deploy.superlink import gate as module
from cloister.deploy.superlink.gate import AppMessages, Gate, GateKnown
from cloister.utils.arrays import to_record
from cloister.utils.wire import PACKED, PIECE, SALT, packed

pytestmark = pytest.mark.usefixtures("gate")


@pytest.fixture
def a(nodes):
    return nodes[0]


@pytest.fixture
def b(nodes):
    return nodes[1]


@pytest.fixture
def grid(link):
    return grid_of(link)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, "flwr")
    return caplog


def reply_of(node, message, record=None):
    """A packed reply of a node to a message."""
    content = RecordDict({PACKED: packed(record or RecordDict({"arrays": to_record(TRAINED)}))})
    return labelled(Message(content, reply_to=message), node.id, node.link.run)


def instruction(node, to):
    """A message as if from the server."""
    message = Message(RecordDict({"config": ConfigRecord({"evil": 1})}), to, "train", ttl=60.0)
    return labelled(message, SUPERLINK_NODE_ID, node.link.run)


def announced(node, wire, *trees):
    """Announce whatever is said."""
    wires = wire if isinstance(wire, list) else [wire]
    request = PushMessagesRequest(node=Node(node_id=node.id), messages_list=wires, message_object_trees=trees)
    return fleet_handlers.push_messages(request=request, state=node.link.state)


def refuses(node, message, log, why, **said):
    """Return whether a node's request is refused, and logged with the node."""
    wire = message_to_proto(remove_content_from_message(message))
    for name, value in said.items():
        setattr(wire.metadata, name, value)
    with pytest.raises(HTTPException, match=why) as error:
        announced(node, wire, get_object_tree(message))
    assert error.value.status_code == 400
    assert f"refused what node {node.id} sent: " in log.text and why in log.text


def heard(grid, *ids):
    return {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}


class TestD02AReplyInTheNameOfAnother:
    def test_is_refused_and_a_is_heard(self, grid, a, b, log):
        _, (mine, _) = sent(grid, [a, b])
        message = given(a)
        refuses(b, reply_of(a, message), log, "it comes in another name")
        answered(a, message)
        assert heard(grid, mine)[mine].has_content()

    def test_under_its_own_name_goes_nowhere(self, grid, a, b):
        _, (mine, _) = sent(grid, [a, b])
        message = given(a)
        assert not b.announce(reply_of(b, message)).objects_to_push, "Flower declines it"
        answered(a, message)
        assert heard(grid, mine)[mine].metadata.src_node_id == a.id


class TestD03AnInstructionToANode:
    def test_is_refused(self, a, b, log):
        refuses(b, instruction(b, a.id), log, "it comes in another name; it is not to the SuperLink; it answers no")
        refuses(b, instruction(b, a.id), log, "it is not to the SuperLink; it answers no message", src_node_id=b.id)
        assert a.next() == []


def test_d04_d17_a_message_of_its_own_to_the_superlink_is_refused(b, log):
    message = instruction(b, SUPERLINK_NODE_ID)
    refuses(b, message, log, "it answers no message", src_node_id=b.id)
    refuses(b, message, log, "its id is not that", message_id=get_object_id(b"Message  3\0abc"))


def test_d05_a_time_that_is_no_number_is_refused(grid, a, b, log):
    sent(grid, [b])
    message = given(b)

    def check(name, value):
        refuses(b, reply_of(b, message), log, "a time is no number", **{name: value})

    cases = [(name, value) for name in ("created_at", "ttl") for value in (math.nan, math.inf, -math.inf)]
    assert not failures(cases, check)


class TestD06D18ChildrenOfOthersObjects:
    """B announces that an object has other children than it has. It has no names of objects that are to come."""

    @staticmethod
    def poison(node, message, names):
        """Announce a reply whose tree says so of these objects."""
        reply = reply_of(node, message)
        false = [ObjectTree(object_id=name, children=[ObjectTree(object_id="f" * 64)]) for name in names]
        with suppress(ValueError):  # of an object that is there Flower knows the children
            node.announce(reply, ObjectTree(object_id=reply.object_id, children=false))

    def test_of_what_the_server_sends_next_does_not_meet_it(self, grid, a, b):
        _, _ = sent(grid, [a, b])
        message, before = given(b), get_all_nested_objects(given(a))
        known = [*before, *get_all_nested_objects(to_record(TRAINED)), ConfigRecord({"server-round": 1}).object_id]
        self.poison(b, message, known)
        _, ids = sent(grid, [a, b], TRAINED)
        given(a)
        assert all(ids)

    def test_of_what_a_replies_does_not_meet_it(self, grid, a, b):
        _, (mine, _) = sent(grid, [a, b])
        self.poison(b, given(b), get_all_nested_objects(Message(content(TRAINED), a.id, "train")))
        answered(a)
        assert heard(grid, mine)[mine].has_content()


class TestD07AskingForValuesByName:
    @pytest.fixture
    def guesses(self, grid, a, b):
        """Names of a record of A's reply, for every value that it may have, when A has replied."""
        sent(grid, [a, b])
        counted = RecordDict({"metrics": MetricRecord({"num-examples": 4711})})
        answered(a, app=lambda message, _: Message(counted, reply_to=message))
        names = [MetricRecord({"num-examples": number}).object_id for number in range(4700, 4720)]
        return [*names, counted.object_id]

    def test_finds_nothing(self, b, guesses, log):
        assert not any(b.pull(name).object_found for name in guesses)
        assert f"refused node {b.id} an object" in log.text

    def test_nor_does_announcing_them(self, b, guesses):
        message = given(b)
        reply = reply_of(b, message)
        tree = ObjectTree(object_id=reply.object_id, children=[ObjectTree(object_id=name) for name in guesses])
        assert {*b.announce(reply, tree).objects_to_push} >= {*guesses}, "each is one that nobody sent"


def test_a_node_is_given_no_object_of_anothers_message_whose_name_it_has(grid, a, b):
    """Not even while it has a message of its own."""
    sent(grid, [a, b])
    ((theirs,), (own,)) = a.next(), b.next()
    others = {*names_of(theirs)} - {*names_of(own)}
    assert others and not any(b.pull(name).object_found for name in others)
    assert all(b.pull(name).object_found for name in names_of(own))


def test_d08_the_last_piece_of_a_large_reply_has_no_name_that_can_be_tried(grid, a, b):
    sent(grid, [a, b])
    large = RecordDict({"a": ArrayRecord({"w": Array(np.zeros(2 * PIECE + 1 - 300, np.uint8))})})
    reply = answered(a, app=lambda message, _: Message(large, reply_to=message))
    pieces = [part for part in get_all_nested_objects(reply).values() if isinstance(part, ArrayChunk)]
    assert len(pieces) >= 2 and min(len(part.data) for part in pieces) >= SALT
    assert not any(b.pull(ArrayChunk(bytes([byte])).object_id).object_found for byte in range(256))


class TestD09TheModelThatAnotherNodeHasNotFetched:
    @pytest.fixture
    def model(self, grid, a, b):
        """The name of the shared model, when B has fetched its message."""
        sent(grid, [a, b])
        return given(b).content["cloister.shared"].object_id

    @pytest.mark.parametrize("fetches", [False, True])
    def test_looks_the_same_after_its_own_confirmation(self, a, b, model, fetches):
        if fetches:
            given(a)
        assert b.pull(model).object_available

    @pytest.mark.parametrize("fetches", [False, True])
    def test_looks_the_same_as_a_part_of_its_reply(self, grid, a, b, fetches):
        """The presence of the model once told a node, in each round, whether another one was drawn."""
        sent(grid, [a, b])
        (tree,) = b.next()
        contents = {name: b.pull(name).object_content for name in names_of(tree)}
        shared = inflate_object_from_contents(tree.object_id, contents).content["cloister.shared"].object_id
        b.confirm(tree.object_id)
        if fetches:
            answered(a)
        own = reply_of(b, message_of(b, tree))
        claimed = get_object_tree(own)
        claimed.children.append(next(part for part in iterate_object_tree(tree) if part.object_id == shared))
        answer = announced(b, message_to_proto(remove_content_from_message(own)), claimed)
        assert {*answer.objects_to_push} == {*names_of(get_object_tree(own))}

    def test_looks_the_same_after_its_reply(self, grid, gate, a, b, monkeypatch):
        sent(grid, [a, b])
        (tree,) = b.next()
        b.announce(reply_of(b, message_of(b, tree)))
        monkeypatch.setitem(gate.inner, "pull_object", pytest.fail)
        assert not any(b.pull(name).object_found for name in names_of(tree))


def message_of(node, tree):
    """A message that replies can refer to."""
    message = instruction(node, node.id)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


class TestD10TheConfirmationOfAnothersMessage:
    def test_is_refused(self, grid, a, b, log):
        _, (mine, _) = sent(grid, [a, b])
        b.confirm(mine)
        assert given(a).metadata.message_id == mine
        assert f"refused node {b.id} the confirmation" in log.text

    def test_cannot_be_tried_by_its_time(self, grid, a, b):
        """Messages of a round say one time. Two of them with the same content have different names all the same."""
        messages, ids = sent(grid, [a, a])
        assert messages[0].metadata.dst_node_id == messages[1].metadata.dst_node_id and len({*ids}) == 2


class TestD11AMessageThatIsNotAllThere:
    def test_is_not_given(self, link, a):
        """As of an app that was killed while it sent it, or sends it now."""
        message, answer = begin(link, a, 1)
        assert a.next() == []
        finish(link, message, answer)
        assert [tree.object_id for tree in a.next()] == [message.object_id]

    def test_keeps_no_later_one_from_its_node(self, link, a):
        begin(link, a, 1)
        whole = link.send(a)
        assert [tree.object_id for tree in a.next()] == [whole.object_id] and a.next() == []

    def test_cannot_be_confirmed(self, link, a):
        message, answer = begin(link, a, 1)
        a.next()
        a.confirm(message.object_id)
        finish(link, message, answer)

    def test_cannot_be_confirmed_in_a_state_in_memory(self):
        """There it is given at once."""
        link = SuperLink(FLWR_IN_MEMORY_DB_NAME)
        node = nodes_of(link)[0]
        message, answer = begin(link, node, 1)
        assert node.next() and not node.confirm(message.object_id)
        finish(link, message, answer)
        node.confirm(message.object_id)
        assert message.object_id in link.store


def test_d12_d20_a_reply_that_is_half_sent_or_lacks_its_children_costs_its_own_node(grid, a, b):
    _, (mine, theirs) = sent(grid, [a, b])
    reply = reply_of(b, given(b))
    session = b.announce(reply, ObjectTree(object_id=reply.object_id)).session_id
    answered(a)
    assert heard(grid, mine, theirs).keys() == {mine}
    b.push(session, reply.object_id, reply.deflate())
    assert heard(grid, theirs)[theirs].error.reason == "a reply cannot be put together: KeyError"


def test_d13_an_object_of_a_that_is_announced_cannot_be_pushed_by_b(grid, a, b):
    """It would have to know the object: the salt is in it."""
    _, (mine, _) = sent(grid, [a, b])
    counted = RecordDict({"metrics": MetricRecord({"num-examples": 99})})
    reply = reply_of(a, given(a), counted)
    answer = a.announce(reply)
    for guess in (counted["metrics"], counted, RecordDict({PACKED: packed(counted)})):
        assert not b.push("", guess.object_id, guess.deflate())
    for name, part in get_all_nested_objects(reply).items():
        assert a.push(answer.session_id, name, part.deflate())
    assert heard(grid, mine)[mine].has_content()


def test_d14_other_content_under_a_name_is_refused(grid, b):
    sent(grid, [b])
    reply = reply_of(b, given(b))
    session = b.announce(reply).session_id
    assert not b.push(session, reply.object_id, b"Message  3\0abc")


def test_d15_a_node_hears_no_totals_of_a_run(grid, a, b):
    sent(grid, [a, b])
    a.announce(reply_of(a, given(a)), seconds=3.0)
    (run,) = a.link.state.get_run_info(run_ids=[a.link.run])
    for told in (b.run(), run):
        assert [told.bytes_sent, told.bytes_recv, told.clientapp_runtime] == [0, 0, 0]
    assert b.run().run_id == a.link.run


def test_a_node_that_had_no_message_is_given_one_that_is_sent_later(grid, a):
    for _ in range(2):
        assert not a.next()
    sent(grid, [a])
    assert given(a)


def test_the_database_is_asked_once_while_apps_send_nothing(grid, a, gate, monkeypatch):
    asked = []
    inner = gate.inner["pull_messages"]
    monkeypatch.setitem(gate.inner, "pull_messages", lambda **request: asked.append(1) or inner(**request))
    for _ in range(3):
        assert not a.next()
    assert len(asked) == 1


def test_d16_what_a_reply_says_of_itself_is_not_read(grid, a, b):
    _, (mine, theirs) = sent(grid, [a, b])
    fake, own = reply_of(a, given(a)), given(b)
    b.send(fake, reply_to_message_id=own.metadata.message_id)
    reply = heard(grid, mine, theirs)
    assert reply.keys() == {theirs} and reply[theirs].metadata.src_node_id == b.id


def test_d19_a_is_heard_after_all_of_it(grid, a, b, log):
    _, (mine, theirs) = sent(grid, [a, b])
    message = given(a)
    refuses(b, reply_of(a, message), log, "it comes in another name")
    b.confirm(mine)
    assert not any(b.pull(name).object_found for name in get_all_nested_objects(message))
    b.announce(reply_of(b, given(b)))
    answered(a, message)
    assert heard(grid, mine, theirs).keys() == {mine}


def test_a_node_sends_one_reply_at_a_time(grid, b, log):
    sent(grid, [b])
    reply = reply_of(b, given(b))
    wire = message_to_proto(remove_content_from_message(reply))
    for wires, trees in ((0, 1), (1, 0), (2, 1), (1, 2)):
        with pytest.raises(HTTPException, match="it is not one message"):
            announced(b, [wire] * wires, *[get_object_tree(reply)] * trees)


def test_an_announcement_holds_no_content(grid, b, log):
    sent(grid, [b])
    reply = reply_of(b, given(b))
    wire = message_to_proto(reply)
    with pytest.raises(HTTPException, match="its content is not in its objects"):
        announced(b, wire, get_object_tree(reply))


class TestASuperLinkThatIsStartedAgain:
    """It knows from its database what it gave to whom."""

    @pytest.fixture
    def tree(self, grid, a, b, monkeypatch):
        """Of the message that A was given before."""
        sent(grid, [a, b])
        (tree,) = a.next()
        again = Gate(AppMessages())
        again.inner = fleet_handlers.pull_object.__self__.inner
        again.install()
        return tree

    def test_gives_a_node_the_rest_of_its_message(self, a, tree):
        assert all(a.pull(name).object_available for name in names_of(tree))

    def test_gives_another_one_nothing_of_it(self, b, tree):
        assert not any(b.pull(name).object_found for name in names_of(tree))
        b.confirm(tree.object_id)
        assert tree.object_id in b.link.store

    def test_takes_the_reply(self, grid, a, tree):
        a.confirm(tree.object_id)
        answered(a, message_of(a, tree), app=lambda message, _: Message(content(TRAINED), reply_to=message))
        assert heard(grid, tree.object_id).keys() == {tree.object_id}


def test_who_confirms_once_more_is_not_accused(grid, a, log):
    sent(grid, [a])
    a.confirm(given(a).metadata.message_id)
    assert "refused" not in log.text


def test_a_node_that_sends_much_is_named_with_its_bytes(grid, b, log, monkeypatch):
    monkeypatch.setattr(module, "LOUD", 10_000)
    sent(grid, [b])
    given(b)

    def push(size):
        b.push("", "0" * 64, os.urandom(size))

    push(9_999)
    assert not log.text
    push(1)
    assert f"node {b.id} has sent 0 MB in answer to one message" in log.text
    log.clear()
    push(9_999)
    assert not log.text, "once each so many bytes"
    sent(grid, [b])
    given(b)
    push(9_999)
    assert not log.text, "it is counted anew for each message"


def test_the_servers_app_learns_that_there_is_a_gate(grid):
    assert grid.transport.gated


def test_the_servers_app_is_told_of_objects_as_ever(grid, a):
    _, ids = sent(grid, [a])
    answered(a)
    assert heard(grid, *ids)[ids[0]].has_content() and GateKnown.names == ("pull_object",)
