"""Nodes at a SuperLink of Flower's own, one of which asks for what another one has sent."""

import itertools
import os
from uuid import uuid4

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_id,
    get_object_tree,
)
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import (
    MODEL,
    TRAINED,
    SuperLink,
    begin,
    content,
    finish,
    labelled,
    names_of,
    nodes_of,
    objects_of,
)

from cloister.core.arrays import from_record, to_record
from cloister.deploy.superlink import uploads
from cloister.deploy.superlink.cleanup import delete_expired
from cloister.deploy.superlink.handover import MAX_ATTEMPTS
from cloister.deploy.superlink.interrupted import expire_message
from cloister.deploy.superlink.unfinished import WholeReplies
from cloister.deploy.superlink.uploads import Upload


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


def test_a_reply_with_another_name_than_its_own_is_refused(link, nodes):
    reply, other = (
        labelled(Message(Error(1, why), reply_to=link.send(nodes[0])), nodes[0].id, link.run) for why in "ab"
    )
    with pytest.raises(HTTPException, match="the id of the message is not that of the object"):
        nodes[0].announce(reply, ObjectTree(object_id=other.object_id))


def test_a_reply_that_names_parts_in_two_ways_is_refused(link, nodes):
    reply = labelled(Message(content(TRAINED), reply_to=link.send(nodes[0])), nodes[0].id, link.run)
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id=tree.children[0].object_id, children=[ObjectTree(object_id="f" * 64)]))
    with pytest.raises(HTTPException, match="in two ways"):
        nodes[0].announce(reply, tree)


def test_a_part_whose_name_is_no_hash_is_refused(link, nodes):
    reply = labelled(Message(content(TRAINED), reply_to=link.send(nodes[0])), nodes[0].id, link.run)
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id="f" * 10_000))
    with pytest.raises(HTTPException, match="no SHA-256"):
        nodes[0].announce(reply, tree)


def test_a_reply_in_the_name_of_another_is_refused(link, nodes):
    message = link.send(nodes[0])
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    with pytest.raises(HTTPException, match="src_node_id is not the node that sends"):
        nodes[1].announce(reply, src_node_id=nodes[0].id)


def test_a_part_that_flower_would_refuse_is_refused_before_it_is_handed_the_reply(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    poison = b"Bogus  3\0abc"
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id=get_object_id(poison)))
    answer = nodes[0].announce(reply, tree)
    assert not nodes[0].push(answer.session_id, get_object_id(poison), poison)


def test_flower_is_not_handed_a_reply_without_end(link, nodes, monkeypatch, caplog):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(Error(1, "why"), reply_to=message), nodes[0].id, link.run)
    answer = nodes[0].announce(reply)
    monkeypatch.setattr(link.state, "store_object", lambda *_: False)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(HTTPException):
            nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
    assert nodes[0].push(answer.session_id, reply.object_id, reply.deflate())
    assert link.own.nodes[nodes[0].id].upload.is_told
    assert "is dropped: the database did not take it" in caplog.text and not link.is_complete(message)


def test_flower_is_not_handed_ever_new_replies_to_one_message(link, nodes, monkeypatch):
    """Each could be timed: it tells a little of whether another node has sent what it names. One is handed on."""
    handed, push = [], link.own.inner["push_messages"]
    monkeypatch.setitem(link.own.inner, "push_messages", lambda **given: handed.append(1) or push(**given))
    message = link.send(nodes[0])
    nodes[0].fetch()
    for number in range(5):
        nodes[0].reply(message, {"bias": np.full(3, number, np.float32)})
    assert len(handed) == 1
    another = link.send(nodes[0])
    nodes[0].fetch()
    nodes[0].reply(another)
    assert link.is_complete(another)


def test_a_reply_that_is_announced_once_more_keeps_its_parts(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    answer, (first, *others) = nodes[0].announce(reply), get_all_nested_objects(reply).items()
    assert nodes[0].push(answer.session_id, first[0], first[1].deflate())
    nodes[0].announce(reply)
    for name, part in others:
        assert nodes[0].push(answer.session_id, name, part.deflate())
    assert link.is_complete(message)


@pytest.mark.parametrize("kept", ["in memory", "in a file"])
class TestAnnouncedPartsThatAreNone:
    """A hostile node says of an object that it can predict that an array which it guesses is a part of it."""

    @pytest.fixture
    def link(self, guarded, kept, tmp_path, monkeypatch):
        monkeypatch.setattr(runtime_handlers, "pull_messages", runtime_handlers.pull_messages)
        WholeReplies(guarded.handover.unfinished).install()
        return SuperLink(FLWR_IN_MEMORY_DB_NAME if kept == "in memory" else str(tmp_path / "state.db"))

    @staticmethod
    def announce(link, node, predicted, guess):
        """Have a node name the object in the announcement of a reply, and show whatever it has."""
        message = link.send(node)
        node.confirm(node.fetch())
        own = RecordDict({"arrays": to_record({"b": np.zeros(3, np.float32)})})
        reply = labelled(Message(own, reply_to=message), node.id, link.run)
        tree, objects = get_object_tree(reply), {**get_all_nested_objects(reply), predicted.object_id: predicted}
        tree.children.append(ObjectTree(object_id=predicted.object_id, children=[ObjectTree(object_id=guess)]))
        answer = node.announce(reply, tree)
        taken = {name: node.push(answer.session_id, name, one.deflate()) for name, one in objects.items()}
        assert not taken[predicted.object_id] and not taken[reply.object_id]

    def test_the_servers_app_sends_that_object_as_ever(self, link):
        hostile, other = nodes_of(link)
        guess = next(name for name, one in objects_of(TRAINED["bias"]).items() if not one.children)
        self.announce(link, hostile, ConfigRecord({"number": 2}), guess)
        for node in (other, hostile):
            message, answer = begin(link, node, 2)
            finish(link, message, answer)
            (tree,) = node.next()
            assert tree == get_object_tree(message)
            assert all(node.pull(name).object_available for name in names_of(tree))
        asked = link.send(other)
        other.fetch()
        other.reply(asked)
        assert not hostile.pull(guess).object_found

    def test_another_node_sends_that_object_as_ever(self, link):
        hostile, other = nodes_of(link)
        self.announce(link, hostile, ConfigRecord({"server-round": 1}), "f" * 64)
        message = link.send(other)
        other.confirm(other.fetch())
        reply = other.reply(message)
        assert link.heard(message) == {message.object_id} and link.is_there(reply.object_id)


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


class TestTheSameWork:
    """Of a reply that another node has sent parts of, and of one that is new: its time would tell which it is."""

    @pytest.fixture
    def link(self, guarded, tmp_path):
        return SuperLink(str(tmp_path / "state.db"))

    @pytest.fixture
    def written(self, link, monkeypatch):
        """The parts that Flower's database is given."""
        names, put = [], link.state.object_store.put

        def note(name, data):
            names.append(name)
            put(name, data)

        monkeypatch.setattr(link.state.object_store, "put", note)
        return names

    def test_all_parts_are_written_whoever_has_sent_them(self, sent, written):
        reply = sent.curious.reply(sent.message, {"bias": TRAINED["bias"]})
        assert sorted(written) == sorted(get_all_nested_objects(reply))
        assert sent.curious.link.is_complete(sent.message)

    def test_what_others_sent_is_there_when_the_database_fails_meanwhile(self, link, nodes, monkeypatch):
        sent = Sent(link, nodes, TRAINED["bias"])
        theirs = {name: link.store.get(name) for name in sent.guess if link.store.get(name)}
        monkeypatch.setattr(link.state, "store_object", lambda *_: False)
        with pytest.raises(HTTPException, match="busy"):
            sent.curious.reply(sent.message, {"bias": TRAINED["bias"]})
        assert theirs and all(link.store.get(name) == data for name, data in theirs.items())


class TestAReplyThatFlowerDeclines:
    """It says so by asking for no part: everything of others that the reply names has to be there as before."""

    @pytest.fixture
    def link(self, guarded, tmp_path):
        return SuperLink(str(tmp_path / "state.db"))

    @pytest.mark.parametrize("said", [{"ttl": 1e9}, {"ttl": -1.0}, {"created_at": 1.0}, {}])
    def test_empties_no_object_of_others(self, link, nodes, said):
        mine, theirs = link.send(nodes[0]), link.send(nodes[1])
        nodes[0].fetch()
        nodes[0].reply(mine, MODEL, **said)
        nodes[0].reply(mine, MODEL | {"bias": TRAINED["bias"]}, **said)
        (tree,) = nodes[1].next()
        assert tree.object_id == theirs.object_id
        assert all(nodes[1].pull(name).object_available for name in names_of(tree))
        assert link.heard(mine) == ({mine.object_id} if not said else set())

    def test_nor_one_of_a_message_that_has_expired(self, link, nodes):
        mine, theirs = link.send(nodes[0]), link.send(nodes[1])
        nodes[0].fetch()
        expire_message(link.state, mine.object_id)
        nodes[0].reply(mine, MODEL)
        assert link.is_there(theirs.object_id)


def test_an_array_that_stands_twice_in_a_reply_is_sent_once(guarded, tmp_path):
    link = SuperLink(str(tmp_path / "state.db"))
    node, _ = nodes_of(link)
    message = link.send(node)
    node.fetch()
    twice = content(TRAINED)
    twice["again"] = to_record({"kernel": TRAINED["kernel"]})
    node.send(labelled(Message(twice, reply_to=message), node.id, link.run))
    assert link.is_complete(message)


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
    reply.metadata.__dict__["_message_id"] = name
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


class TestAModelThatAnotherNodeHasNotFetched:
    """Flower keeps it for that node: whoever may still ask for it hears whether there is one."""

    @pytest.fixture
    def link(self, guarded, tmp_path):
        link = SuperLink(str(tmp_path / "state.db"))
        link.own = guarded
        return link

    def confirmed(self, link, node, message):
        node.confirm(message.object_id)

    def replied(self, link, node, message):
        node.reply(message)

    def expired(self, link, node, message):
        expire_message(link.state, message.object_id)
        link.state.query("UPDATE message_ins SET ttl = 0")
        delete_expired(link.state, link.run)

    @pytest.mark.parametrize("over", [confirmed, replied, expired])
    def test_is_not_told_of_by_the_answers_to_a_node_that_has_done_with_it(self, link, nodes, over):
        answers = []
        for others in ([], nodes[1:]):
            message = link.send(nodes[0])
            for other in others:
                link.send(other)
            (tree,) = nodes[0].next()
            assert all(nodes[0].pull(name).object_available for name in names_of(tree))
            over(self, link, nodes[0], message)
            answers.append([nodes[0].pull(name).object_found for name in names_of(tree)])
        assert answers[0] == answers[1] == [False] * len(answers[0])

    def test_nor_by_the_answer_to_a_request_that_its_confirmation_overtakes(self, link, nodes, monkeypatch):
        """Flower waits for the database before it reads the part."""
        message, _ = link.send(nodes[0]), link.send(nodes[1])
        (tree,) = nodes[0].next()
        assert all(nodes[0].pull(name).object_available for name in names_of(tree))
        pull = link.own.inner["pull_object"]
        monkeypatch.setitem(
            link.own.inner, "pull_object", lambda **given: nodes[0].confirm(message.object_id) or pull(**given)
        )
        assert not any(nodes[0].pull(name).object_found for name in names_of(tree))

    def test_nor_by_how_long_a_confirmation_takes(self, link, nodes, monkeypatch):
        message, _ = link.send(nodes[0]), link.send(nodes[1])
        (tree,) = nodes[0].next()
        found = []
        monkeypatch.setitem(
            link.own.inner,
            "confirm_message_received",
            lambda **_: found.extend(nodes[0].pull(name).object_found for name in names_of(tree)),
        )
        nodes[0].confirm(message.object_id)
        assert found == [False] * len(names_of(tree))


class TestANodeThatHurries:
    """Parts of a message that is deleted cannot be stored any more: the app of the server would end the run."""

    @pytest.fixture(params=[FLWR_IN_MEMORY_DB_NAME, "state.db"])
    def link(self, request, guarded, tmp_path):
        link = SuperLink(request.param if request.param.startswith(":") else str(tmp_path / request.param))
        link.own = guarded
        return link

    def test_and_confirms_a_message_before_all_of_it_is_there(self, link, nodes):
        message, answer = begin(link, nodes[0], 1)
        (tree,) = nodes[0].next()
        nodes[0].confirm(tree.object_id)
        finish(link, message, answer)
        assert link.is_there(message.object_id)
        nodes[0].confirm(tree.object_id)
        assert message.object_id not in link.store

    def test_and_replies_before_all_of_it_is_there(self, link, nodes):
        message, answer = begin(link, nodes[0], 1)
        nodes[0].next()
        nodes[0].reply(message)
        assert link.is_complete(message)
        finish(link, message, answer)


def test_a_part_with_millions_of_names_is_refused_before_it_is_parsed(link, nodes, monkeypatch):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    long = b"ArrayChunk " + b",".join([b"0" * 64] * 10**4) + b" 0" + HEAD_BODY_DIVIDER
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id=get_object_id(long)))
    answer = nodes[0].announce(reply, tree)
    monkeypatch.setattr(uploads, "validate_object_content", lambda _: pytest.fail("it is parsed"))
    assert not nodes[0].push(answer.session_id, get_object_id(long), long)


def test_the_part_that_names_the_others_is_short(link, nodes, monkeypatch):
    """Parsed, empty items in it took thirty times what was sent."""
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    root = reply.deflate()
    answer = nodes[0].announce(reply)
    monkeypatch.setattr(uploads, "MAX_ROOT", len(root) - 1)
    assert not nodes[0].push(answer.session_id, reply.object_id, root)
    monkeypatch.setattr(uploads, "MAX_ROOT", len(root))
    assert nodes[0].push(answer.session_id, reply.object_id, root)


def test_an_announcement_holds_no_content(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    request = PushMessagesRequest(
        node=Node(node_id=nodes[0].id),
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[get_object_tree(reply)],
    )
    request.messages_list[0].content.items.add()
    with pytest.raises(HTTPException) as refused:
        fleet_handlers.push_messages(request=request, state=link.state)
    assert refused.value.status_code == 400


def test_the_last_part_of_a_reply_leaves_the_next_message_alone(link, nodes, monkeypatch):
    """A part can wait for the database, or for another part, until the node has been given another message."""
    message = link.send(nodes[0])
    nodes[0].fetch()
    given, check = [], Upload.is_valid_part

    def late(self, name, content):
        found = check(self, name, content)
        if len(self._places) == len(self._children) - 1 and not given:
            link.send(nodes[0])
            given.extend(nodes[0].next())
        return found

    monkeypatch.setattr(Upload, "is_valid_part", late)
    nodes[0].reply(message)
    (tree,) = given
    assert all(nodes[0].pull(name).object_available for name in names_of(tree))


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


@pytest.mark.parametrize("failure", ["it says so", "it fails"])
def test_what_a_busy_database_did_not_take_is_sent_again(guarded, tmp_path, monkeypatch, failure):
    """Flower's own stores an object or says that it did not, for whatever reason."""
    link = SuperLink(str(tmp_path / "state.db"))
    nodes = nodes_of(link)
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
    *others, last = objects
    for name in others:
        assert nodes[0].push(answer.session_id, name, objects[name].deflate())
    stored, calls = link.state.store_object, itertools.count()

    def busy(*words):
        if next(calls) == 1:
            return stored(*words)
        if failure == "it fails":
            raise TimeoutError
        return False

    monkeypatch.setattr(link.state, "store_object", busy)
    with pytest.raises(HTTPException if failure == "it says so" else TimeoutError):
        nodes[0].push(answer.session_id, last, objects[last].deflate())
    assert link.heard(message) == set(), "Flower has all of a reply, or nothing"
    monkeypatch.setattr(link.state, "store_object", stored)
    assert nodes[0].push(answer.session_id, last, objects[last].deflate())
    assert link.is_complete(message)


def test_what_a_full_disk_did_not_take_is_sent_again(link, nodes, monkeypatch):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = labelled(Message(content(TRAINED), reply_to=message), nodes[0].id, link.run)
    answer, objects = nodes[0].announce(reply), get_all_nested_objects(reply)
    for name in objects:
        with monkeypatch.context() as full, pytest.raises(HTTPException, match="No space left"):
            full.setattr(os, "pwrite", lambda file, data, start, write=os.pwrite: write(file, data[:3], start))
            nodes[0].push(answer.session_id, name, objects[name].deflate())
        assert nodes[0].push(answer.session_id, name, objects[name].deflate())
    assert link.is_complete(message)


def test_what_two_nodes_send_at_the_same_time_reaches_flower_once(link, nodes, monkeypatch):
    messages = [link.send(node) for node in nodes]
    for node in nodes:
        node.fetch()
    stored = link.state.store_object

    def store(*words):
        monkeypatch.setattr(link.state, "store_object", stored)
        nodes[1].reply(messages[1])
        return stored(*words)

    monkeypatch.setattr(link.state, "store_object", store)
    nodes[0].reply(messages[0])
    assert all(link.is_complete(message) for message in messages)


def test_what_the_server_reads_is_what_was_sent(link, nodes):
    message = link.send(nodes[0])
    nodes[0].fetch()
    reply = nodes[0].reply(message)
    arrays = from_record(reply.content.array_records["arrays"])
    assert all(link.store.get(name) for array in arrays.values() for name in objects_of(array))
