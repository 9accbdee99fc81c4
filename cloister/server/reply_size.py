"""How much memory a reply takes, known before it is put together.

An array names its chunks, each as often as it says, and a record of metrics takes thirty times what it is written in:
a reply of a megabyte could fill the memory of the server's app.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from cloister.core.packing import MAX_IN_RECORD
from cloister.flower.grid import get_object_head_values_from_object_content

FACTOR, SLACK = 2, 8 * 2**20
"""Arrays of a reply may have this many times the bytes of the model that was sent, and so many bytes more."""
MAX_NAMES = 4 * 2**20
"""Bytes of everything that is no chunk of an array, as it is written: names, and what describes arrays."""
MAX_DESCRIPTION = 2**16
"""Bytes of what describes one array."""
MAX_METRICS = 2**18
"""Bytes of metrics and settings: read, they take thirty times as much."""
MAX_ROOT = 2**18
"""Bytes of the object that names all others, and holds the text of an error."""
CHUNK = "ArrayChunk"
"""What Flower calls a part of an array. Under another name, parts would count as names, of which few may be."""
DIVIDER = b"\0"
"""What Flower puts between the head of an object and its body."""
MAX_PACKED = MAX_IN_RECORD + 2**10
"""Bytes of the records of a reply, of which one may be a packed value, as they are written."""


@dataclass
class MaximumSize:
    """How large a reply may be.

    Attributes:
        arrays: bytes of its arrays.
    """

    arrays: int = SLACK

    @property
    def total(self) -> int:
        """Return how many bytes the objects of a reply may have together."""
        return self.arrays + MAX_NAMES

    def follow(self, sent: ArrayRecord) -> None:
        """Take replies of the size of a model, and more by `FACTOR` and `SLACK`.

        Args:
            sent: the model that nodes are sent.
        """
        self.arrays = FACTOR * sum(len(array.data) for array in sent.values()) + SLACK

    def require(self, contents: Mapping[str, bytes]) -> None:
        """Refuse a reply that would be larger.

        Args:
            contents: its objects, by name.

        Raises:
            OverflowError: it would be.
            Exception: an object cannot be read.
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
"""Of the replies to the run of this process."""


def _bytes_of_array(content: bytes, contents: Mapping[str, bytes]) -> int:
    """Of the chunks that an array names, each as often as it names it; 0 of another object.

    Raises:
        OverflowError: it takes more than `MAX_DESCRIPTION` to describe the array.
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
