"""Replies that Flower would take, and that would harm others: what is refused, and when."""

from itertools import product

import pytest
from fastapi import HTTPException
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from open_link import MODEL, TRAINED, SuperLink, content, labelled, names_of

from cloister.core.arrays import to_record
from cloister.deploy.superlink import handover
from cloister.deploy.superlink.apart import MAX_RUNTIME


@pytest.fixture
def link(guarded, tmp_path):
    """A SuperLink in a file: what is kept there is what Flower's app reads."""
    link = SuperLink(str(tmp_path / "state.db"))
    link.own = guarded
    return link


def answer_to(message, node, arrays=TRAINED):
    return labelled(Message(content(arrays), reply_to=message), node.id, node.link.run)


def test_a_time_that_is_no_number_is_refused(link, nodes):
    """The database keeps NaN as nothing: the app could hear of no reply any more, of no node."""
    mine, theirs = link.send(nodes[0]), link.send(nodes[1])
    nodes[0].fetch()
    for name, value in product(("created_at", "ttl"), (float("nan"), float("inf"), -float("inf"))):
        with pytest.raises(HTTPException, match="created_at and ttl must be finite"):
            nodes[0].announce(answer_to(mine, nodes[0]), **{name: value})
    nodes[1].fetch()
    nodes[1].reply(theirs)
    assert link.heard(mine, theirs) == {theirs.object_id}


def test_the_message_to_another_node_is_no_part_of_a_reply(link, nodes):
    """Flower would delete it with the reply: the other node could not fetch it."""
    mine, theirs = link.send(nodes[0]), link.send(nodes[1])
    nodes[0].fetch()
    copy = get_all_nested_objects(theirs)
    reply = answer_to(mine, nodes[0], MODEL)
    tree = get_object_tree(reply)
    tree.children.append(get_object_tree(theirs))
    session = nodes[0].announce(reply, tree).session_id
    assert not nodes[0].push(session, theirs.object_id, copy[theirs.object_id].deflate())
    nodes[1].fetch()


def test_a_part_of_the_message_is_no_message_to_reply_to(link, nodes):
    mine = link.send(nodes[0])
    nodes[0].fetch()
    part = get_object_tree(mine).children[0].object_id
    with pytest.raises(HTTPException, match="no reply to the message"):
        nodes[0].announce(answer_to(mine, nodes[0]), reply_to_message_id=part)


def test_a_part_that_is_named_twice_in_one_is_refused(link, nodes):
    reply = answer_to(link.send(nodes[0]), nodes[0])
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id=tree.children[0].object_id, children=tree.children[0].children))
    with pytest.raises(HTTPException, match="twice"):
        nodes[0].announce(reply, tree)


def test_equal_arrays_in_one_record_are_no_such_part(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    equal = RecordDict({"arrays": to_record({"a": MODEL["bias"], "b": MODEL["bias"]})})
    nodes[0].send(labelled(Message(equal, reply_to=message), nodes[0].id, link.run))
    assert link.is_complete(message)


@pytest.mark.parametrize("said", [{"ttl": 1e9}, {}])
def test_no_part_is_touched_for_a_reply_that_is_declined(link, nodes, monkeypatch, said):
    """Its time told whether another node had sent a part, as emptying one takes longer than finding none."""
    taken, take_out = [], handover._take_out
    monkeypatch.setattr(handover, "_take_out", lambda state, names: taken.append(names) or take_out(state, names))
    message = link.send(nodes[0])
    nodes[0].fetch()
    if not said:
        nodes[0].reply(message, MODEL)
        link.own.handover.settled.clear()  # as if it had been the first one
    before = len(taken)
    nodes[0].reply(message, MODEL | {"bias": TRAINED["bias"]}, **said)
    assert len(taken) == before == (not said)


@pytest.mark.parametrize(("seconds", "told"), [(3.0, 3.0), (float("nan"), 0.0), (-1.0, 0.0), (MAX_RUNTIME + 1, 0.0)])
def test_operators_are_shown_a_sum_of_times_that_can_be(link, nodes, seconds, told):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = answer_to(message, nodes[0])
    answer = nodes[0].announce(reply, seconds=seconds)
    for name in names_of(get_object_tree(reply)):
        assert nodes[0].push(answer.session_id, name, get_all_nested_objects(reply)[name].deflate())
    (run,) = link.state.get_run_info(run_ids=[link.run])
    assert run.clientapp_runtime == told and link.is_complete(message)


def test_the_file_of_a_reply_is_given_back_when_its_run_is_over(link, nodes, monkeypatch):
    message = link.send(nodes[0])
    nodes[0].fetch()

    def over(**_):
        raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, "stopped")

    monkeypatch.setitem(link.own.inner, "push_messages", over)
    with pytest.raises(FlowerError):
        nodes[0].reply(message)
    upload = link.own.nodes[nodes[0].id].upload
    assert upload.is_told and upload._file is None


@pytest.mark.parametrize("status", [503, 507])
def test_a_reply_that_a_busy_or_full_database_did_not_take_is_sent_again(link, nodes, monkeypatch, status):
    message = link.send(nodes[0])
    nodes[0].fetch()

    def trouble(**_):
        raise HTTPException(status, "trouble")

    with monkeypatch.context() as patch, pytest.raises(HTTPException) as error:
        patch.setitem(link.own.inner, "push_messages", trouble)
        nodes[0].reply(message)
    assert error.value.status_code == 503
    nodes[0].reply(message)
    assert link.is_complete(message)
