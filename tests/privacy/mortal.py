"""A server that dies at a chosen point of a round: run as a script by `test_kill.py`.

    python mortal.py LEDGER PUBLISHED MECHANISM POINT COUNT

dies with SIGKILL the COUNT-th time it reaches POINT, and publishes each model it aggregates with a synced line.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from flwr.app import MetricRecord, RecordDict

from cloister.core.arrays import to_record
from cloister.local.grid import LocalGrid
from cloister.privacy import books, decorators, ledger
from cloister.privacy.books import Books
from cloister.privacy.decorators import GlobalDP, MetricDP
from cloister.privacy.ledger import Ledger
from cloister.strategies.averaging import FedAvg
from cloister.strategies.sampling import Sampling

ROUNDS = 3
MECHANISMS = {"global-dp": (GlobalDP, {}), "metric": (MetricDP, {"release": "private"})}


def main(ledger_path, published, mechanism, point, count):
    """Run rounds until the end, whichever it is."""
    _arm(point, int(count))
    kind, options = MECHANISMS[mechanism]
    account = Books(Ledger(Path(ledger_path)), f"run-{os.getpid()}")
    strategy = kind(
        FedAvg(train=Sampling(min_nodes=1)), noise_multiplier=1.0, clipping_norm=1.0, books=account, **options
    )
    model = {"weights": np.zeros(8, np.float32)}
    grid = LocalGrid(_client, {}, [{}, {}, {}])
    for number in range(1, ROUNDS + 1):
        messages = strategy.configure_train(number, to_record(model), _config(), grid)
        strategy.aggregate_train(number, grid.send_and_receive(messages))
        _publish(published, number)


def _publish(path, number):
    with Path(path).open("a") as file:
        file.write(f"{number}\n")
        file.flush()
        os.fsync(file.fileno())


def _client(message, context):
    from flwr.app import Message

    arrays = {"weights": np.full(8, context.node_id, np.float32)}
    return Message(RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord()}), reply_to=message)


def _config():
    from flwr.app import ConfigRecord

    return ConfigRecord()


def _arm(point, count):
    """Put the death sentence where it belongs."""
    left = [count]

    def die_before(function):
        def wrapped(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    def die_after(function):
        def wrapped(*arguments, **options):
            result = function(*arguments, **options)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    def half_a_line(content):
        left[0] -= 1
        if left[0]:
            return real_dumps(content, sort_keys=True)
        file = Path(sys.argv[1])
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as torn:
            torn.write(real_dumps(content, sort_keys=True)[:60].encode())
            torn.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    real_dumps = ledger.json.dumps
    places = {
        "before open": (Ledger, "open", die_before),
        "after open": (Ledger, "open", die_after),
        "before sync": (ledger.os, "fsync", die_before),
        "after noise": (decorators, "noisy_mean", die_after),
        "before noise": (decorators, "noisy_mean", die_before),
        "before done": (Ledger, "done", die_before),
        "after done": (Ledger, "done", die_after),
        "before publication": (sys.modules[__name__], "_publish", die_before),
        "after publication": (sys.modules[__name__], "_publish", die_after),
    }
    if point == "half a line":
        ledger.json = type(
            "Json", (), {"loads": ledger.json.loads, "dumps": staticmethod(lambda c, **_: half_a_line(c))}
        )
        return
    owner, name, deadly = places[point]
    setattr(owner, name, deadly(getattr(owner, name)))


if __name__ == "__main__":
    assert books
    main(*sys.argv[1:])
