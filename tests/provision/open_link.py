"""The state of a SuperLink of Flower's, and nodes that speak its Fleet interface, in one process."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.flower.messages import assume_run
from cloister.utils.arrays import to_record

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
        """Return whether the server's app can read the reply to a message."""
        found = self.state.get_message_res({message.metadata.message_id}, self.run)
        return bool(found) and self.is_there(found[0].metadata.message_id)

    def is_there(self, name):
        """Return whether an object is stored, with all its parts."""
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
        """Return the SuperLink's status of the run."""
        request = GetRunRequest(node=Node(node_id=self.id), run_id=self.link.run)
        return fleet_handlers.get_run(request=request, state=self.link.state).run

    def announce(self, reply, tree=None, seconds=None, **said):
        """Return the objects that a SuperLink requests of a reply with these parts, time and metadata."""
        wire = message_to_proto(remove_content_from_message(reply))
        for name, value in ({"src_node_id": self.id} | said).items():
            setattr(wire.metadata, name, value)
        request = PushMessagesRequest(
            node=Node(node_id=self.id),
            messages_list=[wire],
            message_object_trees=[get_object_tree(reply) if tree is None else tree],
            clientapp_runtime_list=[] if seconds is None else [seconds],
        )
        return fleet_handlers.push_messages(request=request, state=self.link.state)

    def push(self, session, name, content):
        request = PushObjectRequest(
            node=Node(node_id=self.id), run_id=self.link.run, object_id=name, object_content=content, session_id=session
        )
        return fleet_handlers.push_object(request=request, state=self.link.state).stored

    def reply(self, message, arrays=TRAINED, without=(), first=None, **said):
        """Answer with these arrays, as a SuperNode does."""
        reply = labelled(Message(content(arrays), reply_to=message), self.id, self.link.run)
        return self.send(reply, without, first, **said)

    def send(self, reply, without=(), first=None, **said):
        """Announce a reply, and send its parts."""
        answer, objects = self.announce(reply, **said), get_all_nested_objects(reply)
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


def nodes_of(link):
    found = []
    for number in range(2):
        node = link.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, bytes([number]) * 33, 0)
        link.state.activate_node(node, 1000.0)
        found.append(Client(link, node))
    return found


def begin(link, node, number):
    """Send all of a message but its parts."""
    message = Message(RecordDict({"config": ConfigRecord({"number": number})}), node.id, "train")
    message = labelled(message, SUPERLINK_NODE_ID, link.run)
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
    )
    return message, runtime_handlers.push_messages(request, link.state, SimpleNamespace(run_id=link.run))


def finish(link, message, answer):
    """Send its parts."""
    for name in answer.objects_to_push:
        part = get_all_nested_objects(message)[name].deflate()
        assert link.state.store_object(link.run, answer.session_id, name, part)
