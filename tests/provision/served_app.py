"""The server's app, whose grid asks a SuperLink in this process, and nodes that answer as a SuperNode does."""

from types import SimpleNamespace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers
from httpx import HTTPStatusError, Request, Response
from open_link import MODEL, TRAINED, labelled, names_of

from cloister.client.mods import open_and_pack
from cloister.server.packed_grid import PackedGrid
from cloister.server.polling_grid import MaximumSize
from cloister.utils.arrays import from_record, to_record

HANDLERS = {
    "PushMessages": "push_messages",
    "PushObject": "push_object",
    "PullMessages": "pull_messages",
    "PullObject": "pull_object",
    "ConfirmMessageReceived": "confirm_message_received",
    "GetNodes": "get_nodes",
}


class AppClient:
    """The client of a server's app: an exception of the SuperLink is a status 500, as over HTTP.

    Attributes:
        requests: those that were made, by name.
    """

    def __init__(self, link):
        self.link, self.requests = link, []

    def __getattr__(self, name):
        handler = HANDLERS[name]
        return lambda request: self._answered(handler, request)

    def _answered(self, handler, request):
        self.requests.append(handler)
        try:
            handle = getattr(runtime_handlers, handler)
            return handle(request, self.link.state, SimpleNamespace(run_id=self.link.run))
        except Exception as error:
            failed = Request("POST", f"http://superlink/{handler}"), Response(500)
            raise HTTPStatusError(str(error), request=failed[0], response=failed[1]) from error


def grid_of(link):
    """The grid of the server's app."""
    flower = HttpGrid(token="token")
    flower._client = AppClient(link)
    flower.set_run(link.state.get_run_info(run_ids=[link.run])[0])
    maximum = MaximumSize()
    maximum.follow(to_record(MODEL))
    return PackedGrid.over(flower, maximum)


def sent(grid, nodes, arrays=MODEL):
    """Messages of one round, one for each node, and their ids."""
    model = to_record(arrays)
    content = [RecordDict({"arrays": model, "config": ConfigRecord({"server-round": 1})}) for _ in nodes]
    messages = [Message(each, node.id, "train", ttl=600.0) for each, node in zip(content, nodes, strict=True)]
    for message in messages:
        message.metadata.__dict__["_run_id"] = grid.run.run_id
    return messages, list(grid.push_messages(messages))


def given(node):
    """The next message of a node, as its app gets it."""
    (tree,) = node.next()
    contents = {name: node.pull(name).object_content for name in names_of(tree)}
    node.confirm(tree.object_id)
    message = inflate_object_from_contents(tree.object_id, contents)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def trained(message, _):
    """Answer a message as a node, which sees the model by name."""
    assert from_record(message.content["arrays"]).keys() == MODEL.keys()
    return Message(RecordDict({"arrays": to_record(TRAINED)}), reply_to=message)


def answered(node, message=None, app=trained, key="", **said):
    """The reply of a node, sent; its app packs it where the message was packed, and signs it by the key in a file."""
    message = message or given(node)
    context = SimpleNamespace(node_id=node.id, node_config={"node-key": str(key)} if key else {})
    return node.send(labelled(open_and_pack(message, context, app), node.id, node.link.run), **said)


def app_pulls(grid, name):
    """Return the SuperLink's answer to the app about an object."""
    return grid._runtime_client.PullObject(PullObjectRequest(node=grid.node, object_id=name))
