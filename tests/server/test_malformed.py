"""A reply that cannot be put together costs this reply, and not the round."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid import http_grid
from flwr.superlink.grid.http_grid import HttpGrid
from support import content, zeros

from cloister.aggregation.screening import screen
from cloister.core.arrays import Layout, from_record
from cloister.core.identity import assume_run
from cloister.server import malformed, reply_size
from cloister.server import run as running
from cloister.server.reply_size import FACTOR, MAX_METRICS, MAX_NAMES, SLACK, MaximumSize

MALFORMED = {
    "no head": b"no object at all",
    "an unknown class": b"Unknown  2\x00{}",
    "no children": b"Message " + b"0" * 64 + b" 2\x00{}",
    "a body that is none": b"Message  3\x00{[}",
    "another class": b"RecordDict  2\x00{}",
}


@pytest.fixture(autouse=True)
def flowers_own_function(monkeypatch):
    # Not what the module has now: a run in this process, of whatever test, has installed ours.
    for name in (malformed.NAME, malformed.PULL):
        monkeypatch.setattr(http_grid, name, getattr(inflatable_utils, name))


class Runtime:
    """What a SuperLink answers: some replies, the first of them with another root object."""

    def __init__(self, replies, broken):
        self.replies, self.contents = replies, {}
        for reply in replies:
            self.contents |= {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        self.contents[replies[0].object_id] = broken

    def PullMessages(self, request):
        found = PullAppMessagesResponse(message_object_trees=[get_object_tree(reply) for reply in self.replies])
        for reply in self.replies:
            announced = message_to_proto(remove_content_from_message(reply))
            announced.metadata.message_id = reply.object_id
            found.messages_list.append(announced)
        return found

    def PullObject(self, request):
        content = self.contents[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


def round_with(broken):
    """Messages to two nodes, and a grid with their replies, that of the first broken."""
    assume_run()
    asked = [Message(RecordDict({"arrays": ArrayRecord()}), node, "train", ttl=60.0) for node in (1, 2)]
    for number, message in enumerate(asked):
        message.metadata.__dict__["_message_id"] = f"message {number}"
    grid = HttpGrid(token="token")
    grid._client = Runtime([Message(content(zeros()), reply_to=message) for message in asked], broken)
    grid.set_run(Run.create_empty(1))
    return asked, grid


def array_of(count, size):
    """The contents of an array that names one chunk of so many bytes so often."""
    chunk = b"ArrayChunk  %d\0" % size + bytes(size)
    body = json.dumps(
        {"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * count}
    ).encode()
    name = get_object_id(chunk)
    return {name: chunk, "array": f"Array {name} {len(body)}".encode() + b"\0" + body}


class TestHowLargeAReplyBecomes:
    @pytest.fixture
    def maximum(self):
        maximum = MaximumSize()
        maximum.follow(ArrayRecord({"w": Array(np.zeros(2**20, np.float32))}))
        return maximum

    def test_is_the_size_of_its_arrays_each_time_that_a_chunk_is_named(self, maximum):
        chunk = 2**20
        most = (FACTOR * 4 * 2**20 + SLACK) // (chunk + 64)
        maximum.require(array_of(most, chunk))
        with pytest.raises(OverflowError):
            maximum.require(array_of(most + 2, chunk))

    def test_two_arrays_count_together(self, maximum):
        one = array_of(10, 2**20)
        with pytest.raises(OverflowError):
            maximum.require(one | {"another": one["array"] + b" "})

    def test_a_model_of_zeros_may_name_one_chunk_often(self):
        zeros_sent = ArrayRecord({"w": Array(np.zeros(2**24, np.float32))})
        maximum = MaximumSize()
        maximum.follow(zeros_sent)
        maximum.require({name: part.deflate() for name, part in get_all_nested_objects(zeros_sent).items()})

    @pytest.mark.parametrize(
        ("kind", "most"),
        [
            ("MetricRecord", MAX_METRICS),
            ("ConfigRecord", MAX_METRICS),
            ("RecordDict", MAX_NAMES),
            ("Message", MAX_NAMES),
        ],
    )
    def test_of_everything_else_only_so_much_is_read(self, maximum, kind, most):
        head = kind.encode() + b"  9\0"
        maximum.require({"record": head + bytes(most - len(head))})
        with pytest.raises(OverflowError):
            maximum.require({"record": head + bytes(most - len(head) + 1)})

    def test_metrics_and_settings_count_together(self, maximum):
        half = b"  9\0" + bytes(MAX_METRICS // 2)
        with pytest.raises(OverflowError):
            maximum.require({"one": b"MetricRecord" + half, "two": b"ConfigRecord" + half})

    def test_what_describes_an_array_is_short(self, maximum, monkeypatch):
        """Eight million numbers of a shape took half a gigabyte."""
        one = array_of(1, 8)
        length = len(one["array"].partition(b"\0")[2])
        monkeypatch.setattr(reply_size, "MAX_DESCRIPTION", length)
        maximum.require(one)
        monkeypatch.setattr(reply_size, "MAX_DESCRIPTION", length - 1)
        monkeypatch.setattr(reply_size.json, "loads", lambda _: pytest.fail("it is read"))
        with pytest.raises(OverflowError):
            maximum.require(one)

    def test_a_reply_that_becomes_too_large_is_not_put_together(self, monkeypatch):
        put = malformed.contained(lambda *_: pytest.fail("it is put together"))
        reply = put("root", array_of(10**4, 2**20))
        assert reply.has_error() and "OverflowError" in reply.error.reason

    def test_follows_the_model_of_the_run(self, monkeypatch):
        monkeypatch.setattr(running, "MAXIMUM", maximum := MaximumSize())
        loop = SimpleNamespace(run=lambda *_: None)
        running._driven(loop, ArrayRecord({"w": Array(np.zeros(8, np.float32))}), 1)
        assert maximum.arrays == FACTOR * 32 + SLACK + FACTOR * (len(Array(np.zeros(8, np.float32)).data) - 32)


@pytest.mark.parametrize("broken", MALFORMED.values(), ids=MALFORMED)
def test_the_other_replies_of_the_round_count(broken):
    asked, grid = round_with(broken)
    with pytest.raises(Exception):  # noqa: B017 - what this is about: Flower passes on whatever happens
        grid.pull_messages(["message 0", "message 1"])
    malformed.install()
    malformed.install()
    replies = grid.pull_messages(["message 0", "message 1"])
    layout = Layout.of(zeros())
    screening = screen(replies, asked, layout, layout.rows(zeros()))
    assert [reply.metadata.src_node_id for reply in screening.accepted] == [2]
    assert (1, "missing") in [(item.node_id, item.code) for item in screening.rejected]


def test_a_reply_that_is_whole_is_the_same():
    _, grid = round_with(b"")
    whole = grid._client
    whole.contents |= {name: part.deflate() for name, part in get_all_nested_objects(whole.replies[0]).items()}
    malformed.install()
    first, _ = grid.pull_messages(["message 0", "message 1"])
    assert first.metadata.reply_to_message_id == "message 0"
    assert from_record(next(iter(first.content.array_records.values()))).keys() == zeros().keys()


def test_an_object_that_stands_often_in_a_reply_is_fetched_once(monkeypatch):
    """As often as a client wrote it, others' replies came too late meanwhile."""
    fetched = []
    monkeypatch.setattr(http_grid, malformed.PULL, lambda object_ids, **others: fetched.append((object_ids, others)))
    malformed.install()
    malformed.install()
    http_grid.pull_objects(object_ids=["root", "chunk", "array", "chunk", "chunk"], pull_object_fn=None)
    assert fetched == [(["root", "chunk", "array"], {"pull_object_fn": None})]
    assert vars(http_grid)[malformed.PULL].plain is not None


def test_what_a_client_wrote_is_in_no_error():
    _, grid = round_with(b"Message  9\x00{secret: 1.25}")
    malformed.install()
    unreadable, _ = grid.pull_messages(["message 0", "message 1"])
    assert unreadable.has_error() and "secret" not in str(unreadable.error.reason)
