"""The size of a reply is known before it is put together."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

from cloister.server import polling_grid
from cloister.server import run as running
from cloister.server.polling_grid import FACTOR, MAX_NAMES, MAX_PACKED, MAX_ROOT, SLACK, MaximumSize
from cloister.utils.wire import MAX_IN_RECORD


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
            ("MetricRecord", MAX_PACKED),
            ("ConfigRecord", MAX_PACKED),
            ("RecordDict", MAX_NAMES),
            ("Message", MAX_ROOT),
        ],
    )
    def test_of_everything_else_only_so_much_is_read(self, maximum, kind, most):
        head = kind.encode() + b"  9\0"
        maximum.require({"record": head + bytes(most - len(head))})
        with pytest.raises(OverflowError):
            maximum.require({"record": head + bytes(most - len(head) + 1)})

    def test_metrics_and_settings_count_together(self, maximum):
        half = b"  9\0" + bytes(MAX_PACKED // 2)
        with pytest.raises(OverflowError):
            maximum.require({"one": b"MetricRecord" + half, "two": b"ConfigRecord" + half})

    def test_what_describes_an_array_is_short(self, maximum, monkeypatch):
        """Eight million numbers of a shape took half a gigabyte."""
        one = array_of(1, 8)
        length = len(one["array"].partition(b"\0")[2])
        monkeypatch.setattr(polling_grid, "MAX_DESCRIPTION", length)
        maximum.require(one)
        monkeypatch.setattr(polling_grid, "MAX_DESCRIPTION", length - 1)
        monkeypatch.setattr(polling_grid.json, "loads", lambda _: pytest.fail("it is read"))
        with pytest.raises(OverflowError):
            maximum.require(one)

    def test_a_packed_value_that_is_just_no_array_is_read(self, maximum):
        size = MAX_IN_RECORD
        maximum.require({"record": b"ConfigRecord  9\0" + bytes(size)})

    def test_follows_the_model_of_the_run(self, monkeypatch):
        monkeypatch.setattr(running, "MAXIMUM", maximum := MaximumSize())
        loop = SimpleNamespace(run=lambda *_: None)
        running.run_rounds(loop, ArrayRecord({"w": Array(np.zeros(8, np.float32))}), 1)
        assert maximum.arrays == FACTOR * 32 + SLACK + FACTOR * (len(Array(np.zeros(8, np.float32)).data) - 32)
