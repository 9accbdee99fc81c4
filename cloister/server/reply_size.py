"""Bounds on the memory of a reply, checked before the reply is assembled.

An array may list the same chunk many times, and a parsed record of metrics takes thirty times its encoded size. Without
bounds, a reply of one megabyte could exhaust the memory of the ServerApp.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from cloister.core.packing import MAX_IN_RECORD
from cloister.flower.grid import get_object_head_values_from_object_content

FACTOR, SLACK = 2, 8 * 2**20
"""Bounds on the arrays of a reply: this factor of the sent model's bytes, plus this slack in bytes."""
MAX_NAMES = 4 * 2**20
"""Encoded bytes of all objects other than array chunks: names and descriptions of arrays."""
MAX_DESCRIPTION = 2**16
"""Bytes of the description of one array."""
MAX_METRICS = 2**18
"""Bytes of metrics and settings; parsed, they take thirty times as much."""
MAX_ROOT = 2**18
"""Bytes of the object that names all others, and holds the text of an error."""
CHUNK = "ArrayChunk"
"""Flower's type name for a part of an array. Objects of another type count as names, of which a reply may have few."""
DIVIDER = b"\0"
"""Flower's separator between the head of an object and its body."""
MAX_PACKED = MAX_IN_RECORD + 2**10
"""Encoded bytes of the records of a reply, one of which may be a packed value."""


@dataclass
class MaximumSize:
    """Maximum size of a reply.

    Attributes:
        arrays: bytes of its arrays.
    """

    arrays: int = SLACK

    @property
    def total(self) -> int:
        """Return the maximum bytes of all objects of a reply together."""
        return self.arrays + MAX_NAMES

    def follow(self, sent: ArrayRecord) -> None:
        """Set the maximum from the size of the sent model, `FACTOR` and `SLACK`.

        Args:
            sent: the model that nodes receive.
        """
        self.arrays = FACTOR * sum(len(array.data) for array in sent.values()) + SLACK

    def require(self, contents: Mapping[str, bytes]) -> None:
        """Refuse a reply that exceeds the maximum.

        Args:
            contents: its objects, by name.

        Raises:
            OverflowError: the reply exceeds it.
            Exception: an object cannot be parsed.
        """
        sizes = Counter[str]()
        for content in contents.values():
            kind, *_ = get_object_head_values_from_object_content(content)
            sizes[kind] += len(content)
        names = sizes.total() - sizes[CHUNK]
        records = sizes[MetricRecord.__qualname__] + sizes[ConfigRecord.__qualname__]
        if names > MAX_NAMES or records > MAX_PACKED or sizes[Message.__qualname__] > MAX_ROOT:
            raise OverflowError
        if sum(_bytes_of_array(content, contents) for content in contents.values()) > self.arrays:
            raise OverflowError


MAXIMUM = MaximumSize()
"""Maximum for the replies to the run of this process."""


def _bytes_of_array(content: bytes, contents: Mapping[str, bytes]) -> int:
    """Return the bytes of an array; 0 for other objects.

    Each chunk counts as often as it is listed.

    Raises:
        OverflowError: the description of the array exceeds `MAX_DESCRIPTION`.
    """
    kind, chunks, _ = get_object_head_values_from_object_content(content)
    if kind != Array.__qualname__:
        return 0
    # As Flower reads it: what an object says of its own length is its client's word.
    _, _, description = content.partition(DIVIDER)
    if len(description) > MAX_DESCRIPTION:
        raise OverflowError
    sizes = [len(contents[name]) for name in chunks]
    return sum(sizes[number] for number in json.loads(description)["arraychunk_ids"])
