"""A packed message is opened on the node, and its reply leaves as one salted value."""

import pytest
from asking import context_of, message_of
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from cloister.client.app import app
from cloister.client.mods import open_and_pack
from cloister.deploy.credentials import new_node_key
from cloister.utils.keys import Answered, new_signing_key
from cloister.utils.wire import PACKED, SHARED, VALUE, opened, packed, signed_part

SECRET = RecordDict({"metrics": MetricRecord({"num-examples": 4711})})


def asked(content):
    """A message of the server with this content, as it is there on the node."""
    message = message_of()
    message.content = content
    message.metadata.__dict__["_message_id"] = "0" * 64
    return message


def packed_message():
    plain = message_of().content
    shared = RecordDict({"arrays": plain["arrays"]})
    own = RecordDict({name: record for name, record in plain.items() if name != "arrays"})
    return asked(RecordDict({PACKED: packed(own), SHARED: packed(shared)}))


def test_the_app_sees_named_records_and_one_value_leaves():
    def answer(message, _):
        assert message.content.keys() == message_of().content.keys()
        assert message.metadata.message_id == "0" * 64
        return Message(SECRET, reply_to=message)

    reply = open_and_pack(packed_message(), context_of(), answer)
    assert reply.content.keys() == {PACKED} and reply.metadata.reply_to_message_id == "0" * 64
    assert opened(reply.content, 2**18) == SECRET


def test_the_text_of_an_error_is_in_the_value():
    def fail(message, _):
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "PolicyError: no"), reply_to=message)

    reply = open_and_pack(packed_message(), context_of(), fail)
    assert reply.has_content()
    assert opened(reply.content, 0) == Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "PolicyError: no")


def test_a_message_that_is_not_packed_is_answered_as_it_is():
    reply = open_and_pack(asked(SECRET), context_of(), lambda message, _: Message(SECRET, reply_to=message))
    assert reply.content == SECRET


@pytest.mark.parametrize("value", [ConfigRecord({VALUE: bytes(40)}), packed(Error(1, "x"))])
def test_what_cannot_be_opened_is_an_error_in_a_value(value):
    reply = open_and_pack(asked(RecordDict({PACKED: value})), context_of(), pytest.fail)
    assert opened(reply.content, 0).reason.startswith("FederationError: ")


def test_the_app_packs_whatever_it_answers_and_no_two_answers_have_an_object_in_common():
    message = packed_message()
    names = [{*get_all_nested_objects(app(message, context_of()))} for _ in range(2)]
    assert app(message, context_of()).content.keys() == {PACKED} and not names[0] & names[1]


def test_a_node_with_a_key_signs_what_leaves_for_the_message_that_it_answers(tmp_path):
    private, public = new_node_key()
    (tmp_path / "node.key").write_bytes(private)
    context = context_of(node={"node-key": str(tmp_path / "node.key")}, node_id=5)
    reply = open_and_pack(packed_message(), context, lambda message, _: Message(SECRET, reply_to=message))
    key = load_ssh_public_key(public).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    value, signature = signed_part(reply.content[PACKED])
    assert Answered(packed_message().metadata.run_id, 5, "0" * 64).is_signed(value, signature, key)
    assert opened(reply.content, 2**18) == SECRET


@pytest.mark.parametrize("content", [None, b"no key", new_signing_key()], ids=["no file", "no key", "a signing key"])
def test_a_node_that_cannot_sign_does_not_train_and_names_the_file_in_its_log_alone(tmp_path, content, caplog):
    path = tmp_path / "node.key"
    if content:
        path.write_bytes(content)
    reply = open_and_pack(packed_message(), context_of(node={"node-key": str(path)}), pytest.fail)
    assert opened(reply.content, 0).reason == "NodeConfigError: details are in the log of the node"
    assert f"node-key {path}" in caplog.text and signed_part(reply.content[PACKED]) is None
