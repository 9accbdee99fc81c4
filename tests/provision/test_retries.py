"""A server's app is asked to send again what a busy or full database did not take: it would end the run."""

import sqlite3
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.servicer.runtime import runtime_handlers
from open_link import SuperLink, content, labelled, nodes_of

from cloister.deploy.superlink import database
from cloister.deploy.superlink.retries import RetryWhenBusy

pytestmark = pytest.mark.usefixtures("flower_as_it_was")


class TestABusyDatabase:
    """A server's app is asked to send again what was not stored: an answer that it was not ends the run."""

    @pytest.fixture
    def begun(self, tmp_path, monkeypatch):
        """An app that has announced a message, and has its parts to send."""
        monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
        database.set_up(2 * 10**6)
        RetryWhenBusy().install()
        link = SuperLink(str(tmp_path / "state.db"))
        large = Message(content({"large": np.ones(200_000, np.float32)}), nodes_of(link)[0].id, "train")
        return link, labelled(large, SUPERLINK_NODE_ID, link.run), tmp_path / "state.db"

    def announce(self, link, message):
        request = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return runtime_handlers.push_messages(request, link.state, SimpleNamespace(run_id=link.run))

    def push(self, link, session, name, part):
        request = PushObjectRequest(
            node=Node(node_id=SUPERLINK_NODE_ID),
            run_id=link.run,
            object_id=name,
            object_content=part.deflate(),
            session_id=session,
        )
        return runtime_handlers.push_object(request, link.state, SimpleNamespace(run_id=link.run)).stored

    def locked(self, path):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return closing(other)

    def test_that_is_locked(self, begun):
        link, message, path = begun
        with self.locked(path), pytest.raises(database.HTTPException) as announced:
            self.announce(link, message)
        session = self.announce(link, message).session_id
        with self.locked(path), pytest.raises(database.HTTPException) as pushed:
            self.push(link, session, message.object_id, message)
        assert announced.value.status_code == pushed.value.status_code == 503
        assert self.push(link, session, message.object_id, message)

    def test_that_is_full(self, begun):
        link, message, _ = begun
        session = self.announce(link, message).session_id
        link.state.query("CREATE TABLE ballast AS SELECT zeroblob(1000000) AS content")
        (name, part) = max(get_all_nested_objects(message).items(), key=lambda each: len(each[1].deflate()))
        with pytest.raises(database.HTTPException, match="full: try again") as error:
            self.push(link, session, name, part)
        link.state.query("DROP TABLE ballast")
        assert error.value.status_code == 503 and self.push(link, session, name, part)

    def test_what_was_not_asked_for_is_no_trouble(self, begun):
        link, message, _ = begun
        assert not self.push(link, "no session", message.object_id, message)
