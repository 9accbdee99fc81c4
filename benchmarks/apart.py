"""Whether the time of a reply tells its node that another one has sent an array which it guesses.

python benchmarks/apart.py [folder of the database, or `memory`]

Nodes call the SuperLink's functions in this process, so that no network hides anything. In every second exchange one
node sends the array that the other one's reply has. An attacker sees one time: from the announcement of the reply to
the answer to its last part. What counts is how often the longer of two times is that of an array that was new (AUC).
"""

import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import machine, table
from flwr.app import Message
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "provision"))
from open_link import Client, SuperLink, content, labelled, nodes_of

from cloister.deploy.superlink.apart import OwnMessages

SIZES = {10: 60, 7850: 60, 1_000_000: 30}
"""Numbers of the array -> exchanges."""


def seconds(node: Client, message: Message, array: np.ndarray) -> float:
    """The time of a reply with an array."""
    reply = labelled(Message(content({"x": array}), reply_to=message), node.id, node.link.run)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    began = time.perf_counter()
    answer = node.announce(reply)
    for name, data in parts.items():
        assert node.push(answer.session_id, name, data)
    return time.perf_counter() - began


def exchange(link: SuperLink, sender: Client, curious: Client, array: np.ndarray, is_sent: bool) -> float:
    """One message to each of two nodes, and the time of the second one's reply."""
    messages = [link.send(node) for node in (sender, curious)]
    for node in (sender, curious):
        node.confirm(node.fetch())
    sender.reply(messages[0], {"x": array if is_sent else array + 1})
    return seconds(curious, messages[1], array)


def main(place: str = "") -> None:
    """Print the times, and what one of them tells."""
    machine()
    logging.disable(logging.CRITICAL)
    OwnMessages().install()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=None if place == "memory" else place or None) as folder:
        link = SuperLink(FLWR_IN_MEMORY_DB_NAME if place == "memory" else str(Path(folder) / "state.db"))
        nodes, rows = nodes_of(link), []
        for size, exchanges in SIZES.items():
            was_sent = [number % 2 == 1 for number in range(exchanges)]
            times = [exchange(link, *nodes, rng.normal(size=size).astype(np.float32), sent) for sent in was_sent]
            medians = [
                1e3 * statistics.median(t for t, sent in zip(times, was_sent, strict=True) if sent == kind)
                for kind in (False, True)
            ]
            auc = roc_auc_score([not sent for sent in was_sent], times)
            rows.append([size, *(f"{median:.1f}" for median in medians), f"{auc:.2f}"])
    table(["numbers", "ms if new: median", "ms if another node sent it", "AUC of one time"], rows)


if __name__ == "__main__":
    main(*sys.argv[1:2])
