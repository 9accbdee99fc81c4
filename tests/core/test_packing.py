"""Packed messages: what they hold comes back, and nothing of them can be guessed by name."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failures

from cloister.flower.messages import assume_run
from cloister.utils import wire
from cloister.utils.arrays import from_record, to_record
from cloister.utils.errors import FederationError
from cloister.utils.keys import SIGNATURE
from cloister.utils.wire import (
    MAX_HEADER,
    MAX_IN_RECORD,
    PACKED,
    PIECE,
    SALT,
    SHARED,
    SIGNED,
    STYPE,
    VALUE,
    opened,
    packed,
)

LIMIT = 2**18
REST = len(packed(RecordDict({"a": to_record({"w": np.zeros(2 * MAX_IN_RECORD, np.uint8)})}))[VALUE].data) - 2**21
"""Bytes of a value beside the numbers of its one array, whose length has seven digits."""


def model(size=10):
    return RecordDict({"arrays": to_record({"w": np.arange(size, dtype=np.float32), "b": np.float64([[1, 2]])})})


def everything(size=10):
    config = ConfigRecord({"whole": 2, "is": True, "list": [0.5, 2.0], "bytes": b"\0x", "text": "é", "none": []})
    return RecordDict({**model(size), "config": config, "metrics": MetricRecord({"n": 2**63, "loss": [0.5, -1.0]})})


def message(content, **shared):
    assume_run()
    return Message(RecordDict({PACKED: packed(content), **shared}), 1, "train")


def of_length(size):
    """A content whose value would have so many bytes."""
    return RecordDict({"a": to_record({"w": np.zeros(size - REST, np.uint8)})})


@pytest.mark.parametrize("size", [10, 2**20])
def test_what_is_packed_comes_back(size):
    found = wire.unpacked(packed(everything(size)), LIMIT)
    assert found["config"] == everything()["config"] and found["metrics"] == everything()["metrics"]
    assert type(found["config"]["is"]) is bool
    arrays, sent = from_record(found["arrays"]), from_record(model(size)["arrays"])
    assert list(arrays) == ["w", "b"] and all(arrays[name].dtype == sent[name].dtype for name in sent)
    for name in sent:
        np.testing.assert_array_equal(arrays[name], sent[name])


def test_an_error_comes_back():
    assert wire.unpacked(packed(Error(4, "no room")), 0) == Error(4, "no room")
    assert wire.unpacked(packed(Error(4)), 0).reason == ""


@given(size=st.integers(0, 40), large=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_no_name_of_one_packing_is_that_of_another_or_of_the_plain_message(size, large):
    """Every name, from the message down to the last piece, is that of fresh random bytes."""
    content = everything(size + 3 * PIECE // 8 * large)
    one, other = ({*get_all_nested_objects(message(content))} for _ in range(2))
    plain = {*get_all_nested_objects(Message(content, 1, "train"))}
    assert not one & other and not (one | other) & plain


def test_one_value_is_three_objects_of_a_message_and_a_large_one_five_beside_further_pieces():
    """For any number of arrays, each object costs four requests on its way to a node and back."""
    many = RecordDict({"a": to_record({str(number): np.zeros(9, np.float32) for number in range(30)})})
    assert len(get_all_nested_objects(message(many))) == 3
    many["a"]["last"] = Array(np.zeros(MAX_IN_RECORD, np.uint8))
    assert len(get_all_nested_objects(message(many))) == 5


@pytest.mark.parametrize(("size", "kind"), [(MAX_IN_RECORD, ConfigRecord), (MAX_IN_RECORD + 1, ArrayRecord)])
def test_a_value_above_one_mebibyte_is_an_array(size, kind):
    assert isinstance(packed(of_length(size)), kind)


def test_no_piece_is_shorter_than_the_salt():
    """A last piece of one byte has one of 256 names."""

    def check(over):
        value = packed(of_length(PIECE + over))
        last = value[VALUE].slice_array()[-1][1]
        assert (
            len(last.data) >= SALT
            and len(value[VALUE].data) - PIECE in (over, SALT)
            and wire.unpacked(value, 0).keys() == {"a"}
        )

    assert not failures(range(-1, SALT + 1), check)


def sign(value):
    """A signature that is none, of the right length."""
    return value[:SIGNATURE].ljust(SIGNATURE, b"!")


@pytest.mark.parametrize("size", [10, 2**20])
def test_a_signature_follows_the_value_that_it_signs(size):
    value = packed(model(size), sign)
    signed, signature = wire.signed_part(value)
    assert [*value] == [SIGNED] and signature == sign(bytes(signed))
    assert wire.unpacked(value, 0).keys() == {"arrays"} and wire.signed_part(packed(model(size))) is None


@pytest.mark.parametrize("over", [1 - SIGNATURE, 1])
def test_a_signature_makes_no_short_piece(over):
    last = packed(of_length(PIECE + over), sign)[SIGNED].slice_array()[-1][1]
    assert len(last.data) >= SALT


def test_a_value_that_a_signature_makes_too_long_for_a_record_is_an_array():
    assert len(packed(of_length(MAX_IN_RECORD), sign)[SIGNED].data) == MAX_IN_RECORD + SIGNATURE


def test_the_pieces_of_a_model_of_zeros_differ():
    pieces = [name for name, _ in packed(of_length(4 * PIECE))[VALUE].slice_array()]
    assert len(set(pieces)) == len(pieces) > 3


def test_messages_of_a_round_share_a_value_and_have_one_of_their_own():
    shared = packed(model())
    one, other = (message(RecordDict({"config": ConfigRecord({"round": 1})}), **{SHARED: shared}) for _ in range(2))
    common = {*get_all_nested_objects(one)} & {*get_all_nested_objects(other)}
    assert common == {shared.object_id}
    assert opened(one.content, LIMIT).keys() == {"config", "arrays"}
    assert len([*iterate_object_tree(get_object_tree(one))]) == 4


def test_a_record_beside_the_packed_ones_is_refused():
    content = message(model()).content
    content["config"] = ConfigRecord()
    with pytest.raises(FederationError, match="records that are not packed"):
        opened(content, LIMIT)


@pytest.mark.parametrize("shared", [model(), Error(1, "x")])
def test_what_is_shared_holds_other_records(shared):
    content = message(model(), **{SHARED: packed(shared)}).content
    with pytest.raises(FederationError, match="twice, or shares"):
        opened(content, LIMIT)


def value_of(header, *parts, salt=bytes(SALT), length=None):
    """A value with this header, whatever it says."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(encoded) if length is None else length
    return ConfigRecord({VALUE: b"".join([salt, size.to_bytes(4, "big"), encoded, *parts])})


def records(*found):
    return {"records": [*found]}


ARRAY = ["w", "float32", [1], "numpy.ndarray", 4]
WRONG = {
    "no value": ConfigRecord(),
    "two values": ConfigRecord({VALUE: bytes(99), "x": 1}),
    "text": ConfigRecord({VALUE: "x" * 99}),
    "metrics": MetricRecord({VALUE: 1}),
    "short": ConfigRecord({VALUE: bytes(SALT - 1)}),
    "no header": ConfigRecord({VALUE: bytes(SALT)}),
    "cut header": value_of(records(), length=99),
    "no JSON": value_of(b"{"),
    "deep": value_of(b"[" * 10**5),
    "a list": value_of([]),
    "another key": value_of({"records": [], "error": []}),
    "no error": value_of({"error": ["1", "x"]}),
    "more after an error": value_of({"error": [1, "x"]}, b"y"),
    "an error below 0": value_of({"error": [-1, "x"]}),
    "an error that is true": value_of({"error": [True, "x"]}),
    "an error without text": value_of({"error": [1, 2]}),
    "an unknown kind": value_of(records(["x", "Message", 3]), b"abc"),
    "a name that is none": value_of(records([1, "arrays", []])),
    "one record twice": value_of(records(["x", "arrays", []], ["x", "arrays", []])),
    "one array twice": value_of(records(["x", "arrays", [ARRAY, ARRAY]]), bytes(8)),
    "a length below 0": value_of(records(["x", "arrays", [[*ARRAY[:4], -4]]]), bytes(4)),
    "a length with a fraction": value_of(records(["x", "arrays", [[*ARRAY[:4], 4.0]]]), bytes(4)),
    "a shape of text": value_of(records(["x", "arrays", [["w", "float32", ["1"], "", 4]]]), bytes(4)),
    "a shape that is none": value_of(records(["x", "arrays", [["w", "float32", {}, "", 4]]]), bytes(4)),
    "too short": value_of(records(["x", "arrays", [ARRAY]]), bytes(3)),
    "too long": value_of(records(["x", "arrays", [ARRAY]]), bytes(4 + SALT)),
    "more that is no padding": value_of(records(["x", "arrays", [ARRAY]]), bytes(4), b"\1"),
    "no record of metrics": value_of(records(["x", "metrics", 9]), b"x" * 9),
    "settings for metrics": value_of(
        records(["x", "metrics", len(ConfigRecord().deflate())]), ConfigRecord().deflate()
    ),
    "a long header": value_of(b" " * MAX_HEADER + b" {}"),
    "an array of its own": ArrayRecord({VALUE: Array("uint8", (99,), STYPE, bytes(99))}),
    "another array": ArrayRecord({VALUE: Array(np.zeros(2**21, np.uint8))}),
    "too large for a record": ConfigRecord({VALUE: packed(of_length(MAX_IN_RECORD))[VALUE] + bytes(1)}),
}


def test_what_nobody_packs_is_refused_in_our_words():
    def check(wrong):
        with pytest.raises(FederationError, match="packed message") as error:
            wire.unpacked(wrong, LIMIT)
        assert error.value.__cause__ is None

    assert failures(WRONG.values(), check) == []


def test_only_so_much_of_metrics_and_settings_is_read():
    content = RecordDict({"m": MetricRecord({"x": 1.0}), "c": ConfigRecord({"y": "secret"})})
    size = sum(len(record.deflate()) for record in content.values())
    wire.unpacked(packed(content), size)
    with pytest.raises(FederationError, match="may have") as error:
        wire.unpacked(packed(content), size - 1)
    assert "secret" not in str(error.value)
