"""The grid of the server's app over Flower's own SuperLink: what one node does costs no other node's reply."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import TRAINED, content, labelled
from served_app import answered, given, grid_of, sent
from sqlalchemy import update

from cloister.server import packed_grid as module
from cloister.server.app import _packing
from cloister.server.packed_grid import MAX_FAILURES, MAX_REFUSED, SAFE_TO_ANNOUNCE_AGAIN, PackedGrid
from cloister.server.polling_grid import MaximumSize, PollingGrid, transport_of
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import from_record
from cloister.utils.wire import GATE, PACKED, PIECE, SHARED, packed


@pytest.fixture
def grid(link):
    return grid_of(link)


def by_node(replies):
    return {reply.metadata.src_node_id: reply for reply in replies}


def errors_of(replies):
    return {node: reply.error.reason for node, reply in by_node(replies).items() if reply.has_error()}


def test_messages_and_replies_are_packed_and_both_apps_see_named_arrays(grid, nodes):
    messages, ids = sent(grid, nodes)
    for node in nodes:
        answered(node)
    replies = by_node(grid.pull_messages(ids))
    assert replies.keys() == {node.id for node in nodes}
    for message in messages:
        reply = replies[message.metadata.dst_node_id]
        assert reply.metadata.reply_to_message_id == message.metadata.message_id
        np.testing.assert_array_equal(from_record(reply.content["arrays"])["kernel"], TRAINED["kernel"])
    assert transport_of(PollingGrid(grid)).packed and not grid.transport.gated


def test_no_node_makes_flowers_superlink_pass_for_ours(grid, nodes, link):
    """A node may announce an object of the name by which ours is known; Flower's then says that it is to come."""
    link.store.preregister(link.run, ObjectTree(object_id=GATE))
    assert not grid._is_gated()


def test_the_app_packs_over_a_superlink_alone(grid, link):
    flower = HttpGrid(token="token")
    flower._client, flower._run = grid._client, grid.run
    other = LocalGrid(lambda *_: None, {}, [{}])
    assert type(_packing(flower)) is PackedGrid and _packing(other) is other
    assert transport_of(PollingGrid(other)) is None


def test_the_model_is_sent_once_a_round_under_a_name_of_its_own(grid, nodes):
    """Flower names an object that comes again by its content: one salt for all rounds would be a name that is known."""
    seen = []
    for _ in range(2):
        sent(grid, nodes)
        one, other = (given(node).content for node in nodes)
        assert one[SHARED].object_id == other[SHARED].object_id and one[PACKED].object_id != other[PACKED].object_id
        seen.append(one[SHARED].object_id)
    assert seen[0] != seen[1]


def test_a_reply_of_any_number_of_arrays_takes_as_many_requests(grid, nodes):
    _, ids = sent(grid, nodes[:1], {str(number): np.zeros(3, np.float32) for number in range(30)})

    def many(message, _):
        return Message(message.content, reply_to=message)

    answered(nodes[0], app=many)
    grid._client.requests.clear()
    assert len(list(grid.pull_messages(ids))) == 1
    assert len(grid._client.requests) == 5


def test_a_node_that_has_not_sent_all_of_its_reply_is_asked_again_at_the_next_look(grid, nodes):
    """D12: nobody waits for it."""
    _, ids = sent(grid, nodes)
    late, other = nodes
    asked = given(late)
    reply = labelled(Message(RecordDict({PACKED: packed(content(TRAINED))}), reply_to=asked), late.id, late.link.run)
    session = late.announce(reply).session_id
    answered(other)
    assert by_node(grid.pull_messages(ids)).keys() == {other.id}
    assert list(grid.pull_messages([ids[0]])) == []
    for name, part in get_all_nested_objects(reply).items():
        assert late.push(session, name, part.deflate())
    assert by_node(grid.pull_messages([ids[0]])).keys() == {late.id}


def test_what_nobody_asked_for_is_dropped(grid, nodes):
    """D4 and D17: a node's message to the SuperLink, malformed, well formed or half sent."""
    _, ids = sent(grid, nodes[:1])
    bad = b"Message  3\0abc"
    poison = message_to_proto(remove_content_from_message(instruction(grid)))
    poison.metadata.message_id = get_object_id(bad)
    push_announcement(nodes[1], poison, ObjectTree(object_id=get_object_id(bad)), {get_object_id(bad): bad})
    for sends in (True, False):
        fine = instruction(grid)
        objects = {name: part.deflate() for name, part in get_all_nested_objects(fine).items()}
        wire = message_to_proto(remove_content_from_message(fine))
        push_announcement(nodes[1], wire, get_object_tree(fine), objects if sends else {})
    answered(nodes[0])
    (reply,) = grid.pull_messages(ids)
    assert reply.metadata.src_node_id == nodes[0].id and reply.has_content()


def instruction(grid):
    """A message as if from the server, to the SuperLink."""
    message = Message(content(TRAINED), SUPERLINK_NODE_ID, "train")
    return labelled(message, SUPERLINK_NODE_ID, grid.run.run_id)


def push_announcement(node, wire, tree, objects):
    """Announce whatever is said, and send the objects."""
    request = PushMessagesRequest(node=Node(node_id=node.id), messages_list=[wire], message_object_trees=[tree])
    session = fleet_handlers.push_messages(request=request, state=node.link.state).session_id
    for name, part in objects.items():
        assert node.push(session, name, part)


def test_a_time_that_is_no_number_costs_its_own_node_alone(grid, nodes):
    """D5: the SuperLink fails at each look for that reply."""
    _, ids = sent(grid, nodes)
    bad, other = nodes
    answered(bad, created_at=math.nan)
    answered(other)
    assert by_node(grid.pull_messages(ids)).keys() == {other.id}
    found = [list(grid.pull_messages([ids[0]])) for _ in range(MAX_FAILURES - 1)]
    assert found[:-1] == [[]] * (MAX_FAILURES - 2)
    assert errors_of(found[-1]) == {bad.id: "the SuperLink cannot hand on the reply: 500"}


def test_who_replied_to_what_is_what_the_server_asked_for(grid, nodes):
    """D16: what the object of a reply says, against what was announced, is not read."""
    _, ids = sent(grid, nodes)
    liar, other = nodes
    own, of_other = given(liar), given(other)
    poses = labelled(
        Message(RecordDict({PACKED: packed(content(TRAINED))}), reply_to=of_other), other.id, liar.link.run
    )
    liar.send(poses, reply_to_message_id=own.metadata.message_id)
    answered(other, of_other)
    replies = by_node(grid.pull_messages(ids))
    assert {node: reply.metadata.reply_to_message_id for node, reply in replies.items()} == {
        liar.id: ids[0],
        other.id: ids[1],
    }


BROKEN = {
    "no head": b"no object at all",
    "an unknown class": b"Unknown  2\0{}",
    "no children": b"Message " + b"0" * 64 + b" 2\0{}",
    "a body that is none": b"Message  9\0{secret:}",
    "another class": b"RecordDict  2\0{}",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_reply_that_cannot_be_put_together_is_an_error_of_its_node(grid, nodes, broken, caplog):
    """D20: here it is nothing but its first object, whatever that is."""
    _, ids = sent(grid, nodes)
    bad, other = nodes
    reply = answered(bad)
    answered(other)
    store(bad.link, reply.object_id, broken)
    with caplog.at_level(logging.WARNING, "cloister.server"):
        replies = list(grid.pull_messages(ids))
    (reason,) = errors_of(replies).values()
    assert by_node(replies)[bad.id].has_error() and by_node(replies)[other.id].has_content()
    assert reason.startswith("a reply cannot be put together: ") and "secret" not in reason
    assert f"node {bad.id} does not count, after" in caplog.text


def store(link, name, data):
    """Have the SuperLink hold other bytes under a name."""
    with link.store.session() as session:
        session.execute(update(StoredObject).where(StoredObject.object_id == name).values(content=data))


def test_a_tree_without_children_is_an_error_of_its_node(grid, nodes):
    """D20."""
    _, ids = sent(grid, nodes[:1])
    message = given(nodes[0])
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, nodes[0].link.run)
    answer = nodes[0].announce(reply, tree=ObjectTree(object_id=reply.object_id))
    assert nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
    assert errors_of(grid.pull_messages(ids)) == {nodes[0].id: "a reply cannot be put together: KeyError"}


def test_a_reply_that_is_too_large_is_given_up_while_it_is_read(grid, nodes, caplog):
    grid.maximum.arrays = 2 * PIECE
    _, ids = sent(grid, nodes[:1])
    huge = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(8 * PIECE, np.uint8))})})
    answered(nodes[0], app=lambda message, _: Message(huge, reply_to=message))
    grid._client.requests.clear()
    with caplog.at_level(logging.WARNING, "cloister.server"):
        (reply,) = grid.pull_messages(ids)
    assert reply.error.reason == f"a reply may have {grid.maximum.total} bytes"
    assert grid._client.requests.count("pull_object") <= 6 + grid.maximum.total // PIECE
    assert f"node {nodes[0].id} " in caplog.text and "bytes" in caplog.text


def test_a_reply_of_too_many_objects_is_not_fetched(grid, nodes, monkeypatch):
    monkeypatch.setattr(module, "MAX_PARTS", 2)
    _, ids = sent(grid, nodes[:1])
    answered(nodes[0])
    assert errors_of(grid.pull_messages(ids)) == {nodes[0].id: "a reply may have 2 objects"}
    assert "pull_object" not in grid._client.requests[grid._client.requests.index("pull_messages") :]


def test_an_object_that_is_named_often_is_fetched_once():
    """As often as a client named it, others' replies came too late meanwhile."""
    chunk = ObjectTree(object_id="chunk")
    assert module._names(ObjectTree(object_id="root", children=[chunk] * 3)) == ["chunk", "root"]


def test_parts_that_are_gone_are_an_error_of_their_node(grid, nodes):
    _, ids = sent(grid, nodes[:1])
    reply = answered(nodes[0])
    found = grid._client.PullMessages
    grid._client.PullMessages = lambda request: (found(request), nodes[0].link.store.delete(reply.object_id))[0]
    assert errors_of(grid.pull_messages(ids)) == {nodes[0].id: "its node did not send all of it"}


def test_what_flower_answers_for_a_node_comes_in_the_name_of_the_superlink(grid, nodes):
    _, ids = sent(grid, nodes[:1])
    nodes[0].link.state.acknowledge_node_heartbeat(nodes[0].id, 0)
    nodes[0].link.state.delete_messages({ids[0]})
    (reply,) = grid.pull_messages(ids)
    assert reply.metadata.src_node_id == SUPERLINK_NODE_ID and reply.metadata.reply_to_message_id == ids[0]
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_an_error_of_an_app_is_packed_and_comes_back_as_one(grid, nodes):
    _, ids = sent(grid, nodes[:1])
    refused = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "PolicyError: no")
    reply = answered(nodes[0], app=lambda message, _: Message(refused, reply_to=message))
    assert reply.has_content()
    (found,) = grid.pull_messages(ids)
    assert found.error == refused and grid.transport.packed


class Stock:
    """A client app of another framework: it knows named arrays alone."""

    def __init__(self, node):
        self.node = node

    def answer(self):
        message = given(self.node)
        if "arrays" in message.content:
            reply = Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=message)
        else:
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "<class 'KeyError'>")
            reply = Message(error, reply_to=message)
        self.node.send(labelled(reply, self.node.id, self.node.link.run))


def test_a_client_that_knows_no_packed_messages_is_sent_named_arrays(grid, nodes, caplog):
    stock, ours = nodes
    _, ids = sent(grid, nodes)
    Stock(stock).answer()
    answered(ours)
    assert by_node(grid.pull_messages(ids)).keys() == {ours.id}
    Stock(stock).answer()
    (reply,) = grid.pull_messages(ids[:1])
    assert reply.metadata.reply_to_message_id == ids[0] and reply.metadata.src_node_id == stock.id
    assert dict(reply.content["metrics"]) == {"num-examples": 3}
    assert not grid.transport.packed


def asked_again(grid, node):
    """Let a node answer a packed message with an error; the id of the message that it is sent with named arrays."""
    _, ids = sent(grid, [node])
    Stock(node).answer()
    assert list(grid.pull_messages(ids)) == []
    return ids


def test_a_client_that_answered_twice_to_named_arrays_alone_is_sent_those_at_once(grid, nodes):
    stock, ours = nodes
    for _ in range(MAX_REFUSED):
        ids = asked_again(grid, stock)
        Stock(stock).answer()
        assert len(list(grid.pull_messages(ids))) == 1
    _, ids = sent(grid, nodes)
    assert given(ours).content.keys() == {PACKED, SHARED}
    Stock(stock).answer()
    assert by_node(grid.pull_messages(ids)).keys() == {stock.id}


@pytest.mark.parametrize("then_answers", [True, False])
def test_after_one_failure_a_node_is_sent_packed_messages_again(grid, nodes, then_answers):
    """Its first answer was an error of Flower's: whether it knows packed messages is not known."""
    node = nodes[0]
    ids = asked_again(grid, node)
    again = given(node)
    reply = Message(content(TRAINED) if then_answers else Error(ErrorCode.UNKNOWN, "no"), reply_to=again)
    node.send(labelled(reply, node.id, node.link.run))
    assert len(list(grid.pull_messages(ids))) == 1
    _, ids = sent(grid, [node])
    answered(node)
    assert [reply.has_content() for reply in grid.pull_messages(ids)] == [True]
    assert node.id in grid._packs


def test_named_arrays_that_the_superlink_declines_cost_their_node_alone(grid, nodes, monkeypatch):
    _, ids = sent(grid, nodes)
    Stock(nodes[0]).answer()
    answered(nodes[1])
    Declining(monkeypatch, lambda _: True, stores=False)
    replies = list(grid.pull_messages(ids))
    assert errors_of(replies) == {nodes[0].id: "the message with named arrays could not be sent to it"}
    assert by_node(replies)[nodes[1].id].has_content()


def test_named_arrays_that_the_superlink_fails_at_are_sent_once(grid, nodes, monkeypatch):
    """A refused reply that was kept would have them sent at each look."""
    _, ids = sent(grid, nodes[:1])
    Stock(nodes[0]).answer()
    grid._client.requests.clear()
    monkeypatch.setattr(runtime_handlers, "push_messages", lambda *_: 1 / 0)
    assert errors_of(grid.pull_messages(ids)).keys() == {nodes[0].id}
    assert grid._client.requests.count("push_messages") == 1


def test_a_reply_that_was_handed_on_is_not_kept(grid, nodes):
    _, ids = sent(grid, nodes)
    answered(nodes[0])
    assert len(list(grid.pull_messages(ids))) == 1
    assert grid._asked.keys() == {ids[1]}


def half_sent(grid, node, message):
    """Send all objects of a large reply but a piece of its array; the name of that, and what sends it too."""
    large = content({"w": np.zeros(2 * PIECE + PIECE // 5, np.uint8)})
    reply = labelled(Message(RecordDict({PACKED: packed(large)}), reply_to=message), node.id, node.link.run)
    session, last = node.announce(reply).session_id, module._names(get_object_tree(reply))[0]
    objects = get_all_nested_objects(reply)
    for name in objects.keys() - {last}:
        assert node.push(session, name, objects[name].deflate())
    return last, lambda: node.push(session, last, objects[last].deflate())


def held(grid):
    """The bytes of replies that are kept from one look to the next."""
    replies = [asked.reply for asked in grid._asked.values() if asked.reply]
    assert all(reply.size == sum(map(len, reply.contents.values())) for reply in replies)
    return sum(reply.size for reply in replies)


def test_half_sent_replies_have_a_bound_together_and_what_does_not_fit_is_fetched_later(grid, nodes, monkeypatch):
    grid.maximum.arrays = 4 * PIECE
    _, ids = sent(grid, nodes)
    last = dict(half_sent(grid, node, given(node)) for node in nodes)
    names = module._names
    monkeypatch.setattr(module, "_names", lambda tree: sorted(names(tree), key=lambda name: name not in last))
    assert list(grid.pull_messages(ids[:1])) == []
    one = held(grid)
    assert one > PIECE
    monkeypatch.setattr(module, "AT_ONCE", 1)
    monkeypatch.setattr(MaximumSize, "total", one + one // 2)
    assert list(grid.pull_messages(ids)) == [] and held(grid) == one

    grid._client.requests.clear()
    assert list(grid.pull_messages(ids)) == [] and held(grid) == one
    assert grid._client.requests == ["pull_object"] * 2, "none of it is fetched before the missing object is there"
    assert all(send() for send in last.values())
    assert by_node(grid.pull_messages(ids)).keys() == {node.id for node in nodes}


def test_an_error_of_flowers_from_a_node_that_packs_is_no_reason_to_send_named_arrays(grid, nodes):
    """Its app died: a node that is known to pack is never sent anything else."""
    _, ids = sent(grid, nodes[:1])
    answered(nodes[0])
    assert len(list(grid.pull_messages(ids))) == 1
    _, ids = sent(grid, nodes[:1])
    Stock(nodes[0]).answer()
    assert errors_of(grid.pull_messages(ids)) == {nodes[0].id: "<class 'KeyError'>"}
    assert grid.transport.packed and nodes[0].next() == []


class Declining:
    """The SuperLink's function that stores parts of messages, which declines some."""

    def __init__(self, monkeypatch, declines, stores=True):
        self.push, self.declines, self.stores = runtime_handlers.push_object, declines, stores
        monkeypatch.setattr(runtime_handlers, "push_object", self)

    def __call__(self, request, *others):
        declines = self.declines(request)
        answer = PushObjectResponse() if declines and not self.stores else self.push(request, *others)
        answer.stored = answer.stored and not declines
        return answer


class TestDeclinedParts:
    def test_the_message_is_announced_again_and_is_the_same(self, grid, nodes, monkeypatch, caplog):
        """Its answer was lost. A node that has its message by then does not train twice."""
        declined = [True]
        Declining(monkeypatch, lambda _: declined and declined.pop())
        messages, ids = sent(grid, nodes)
        assert ids == [message.metadata.message_id for message in messages] and "announced again" in caplog.text
        assert [given(node).metadata.message_id for node in nodes] == ids
        assert all(node.next() == [] for node in nodes)

    def test_of_one_nodes_message_leave_that_node_out(self, grid, nodes, monkeypatch, caplog):
        """D11: it confirms its message again and again, before all of it is there."""
        hurried, other = nodes
        own = set()

        def confirms(request):
            (row,) = hurried.link.state.query(
                "SELECT message_id FROM message_ins WHERE dst_node_id = :node", {"node": uint64_to_int64(hurried.id)}
            ) or [{"message_id": ""}]
            own.add(row["message_id"])
            return request.object_id in own

        Declining(monkeypatch, confirms, stores=False)
        _, ids = sent(grid, nodes)
        assert ids[0] == "" and f"the message to node {hurried.id} was not sent" in caplog.text
        answered(other)
        assert by_node(grid.pull_messages(ids[1:])).keys() == {other.id}

    def test_of_all_messages_are_an_error(self, grid, nodes, monkeypatch):
        Declining(monkeypatch, lambda _: True, stores=False)
        with pytest.raises(ObjectPushError):
            sent(grid, nodes)

    def test_after_a_while_are_an_error(self, grid, nodes, monkeypatch):
        """The SuperLink may have forgotten the messages, and would give a node one that it has for a new one."""
        declined = [True]
        Declining(monkeypatch, lambda _: declined and declined.pop())
        clock = iter([0.0, SAFE_TO_ANNOUNCE_AGAIN - 1, SAFE_TO_ANNOUNCE_AGAIN + 1])
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(ObjectPushError):
            sent(grid, nodes)
