"""Two nodes whose data differ in one row, answering the same server.

Everything random that the server does not see is coupled: both nodes draw the same batches and keys; their ledgers have
the same ids of releases, and name the same place of data; and where noise meets data, the second node releases what the
first one did. Then all that leaves must be equal to the bit, unless something leaves past the noise; and what the noise
was added to may differ by no more than what the ledgers were charged for.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from cloister.client import ledgers
from cloister.client.app import app
from cloister.client.dp_sgd import NoiseSource
from cloister.flower.messages import assume_run
from cloister.privacy.accounting import ledger
from cloister.privacy.accounting.events import to_json
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.dpsgd import local_steps, noise
from cloister.privacy.mechanisms.discrete import sampler
from cloister.privacy.mechanisms.noise import Maker
from cloister.privacy.mechanisms.selection import PrivateChoice
from cloister.utils.arrays import from_record, to_record

ROWS = 12
POLICY = """
mechanisms = ["dp-sgd", "gaussian", "laplace"]
tasks = ["digits"]
public-size = 12
min-dp-sgd-noise-multiplier = 0.5
min-gaussian-noise-multiplier = 0.5
min-laplace-noise-multiplier = 0.5
min-radius = 1e-30
max-example-epsilon = {budget}
"""


def rows_of_digits(rng, count):
    """Pixels from 0 to 1 and classes from 1 to 9: class 0 is the one that a target has."""
    return rng.uniform(0, 1, (count, 64)).astype(np.float32), rng.integers(1, 10, count)


@dataclass
class Released:
    """Numbers just before noise, and the standard deviation of it."""

    values: np.ndarray
    std: float


@dataclass
class Coupling:
    """Common part of both nodes, and the observations of each."""

    message: int = 0
    replaying: bool = False
    noised: list[tuple] = field(default_factory=list)
    seen: list[list[Released]] = field(default_factory=lambda: [[], []])
    scores: list[list] = field(default_factory=lambda: [[], []])
    at: int = 0

    def begin(self, replaying):
        self.replaying, self.at = replaying, 0
        if not replaying:
            self.message += 1
            self.noised, self.seen, self.scores = [], [[], []], [[], []]

    def release(self, values, std, make):
        """Remember what noise is added to; give the first node's release to both."""
        self.seen[self.replaying].append(Released(np.array(values, np.float64), std))
        if not self.replaying:
            self.noised.append(make())
        self.at += 1
        return self.noised[self.at - 1] if self.at <= len(self.noised) else make()

    def noise(self, shape):
        return np.random.default_rng([self.message, self.at]).standard_normal(shape)

    # --- in place of what the product draws and adds ---

    def poisson(self, count, rate, steps, seed=None):
        for step in range(steps):
            drawn = np.random.default_rng([self.message, step]).random(4 * ROWS) < rate
            yield np.flatnonzero(drawn[:count])

    def noised_sum(self, total, grid, _, out):
        """Noise is added to the sum on its grid, and covers its roundings too."""
        flat, std = np.rint(np.concatenate(total) / grid.step) * grid.step, grid.scale * grid.step
        released = self.release(flat, std, lambda: flat + std * self.noise(len(flat)))
        for piece, part in zip(out, np.split(released, np.cumsum([len(piece) for piece in total])[:-1]), strict=True):
            piece[:] = part

    def add_on_grid(self, target, std):
        target[:] = self.release(target, std, lambda: target + std * self.noise(len(target)))

    def add_whole(self, maker, target, places):
        scale = float(maker._tables.scale)
        noise = lambda: target + np.rint(scale * self.noise(len(target)))  # noqa: E731
        target[:] = self.release(target, scale, noise)

    def choose(self, mechanism, losses, groups=None, **_):
        self.scores[self.replaying].append([mechanism._score(each, groups) for each in losses])
        return self.message % len(losses)


@contextmanager
def coupled(coupling):
    with (
        mock.patch.object(local_steps, "poisson", coupling.poisson),
        mock.patch.object(noise, "noised_sum", coupling.noised_sum),
        mock.patch.object(Maker, "add_on_grid", lambda maker, target, std, *_: coupling.add_on_grid(target, std)),
        mock.patch.object(sampler.Maker, "add", lambda *given: coupling.add_whole(*given)),
        mock.patch.object(NoiseSource, "secret", lambda *_: str(coupling.message).encode()),
        mock.patch.object(PrivateChoice, "choose", lambda self, *args, **given: coupling.choose(self, *args, **given)),
    ):
        yield


class Twins:
    """The nodes, one with all rows and one with the last row missing or exchanged."""

    def __init__(self, folder: Path, x, y, other_x, other_y, budget=60.0):
        assume_run()
        self.folder, self.coupling, self.states = folder, Coupling(), [RecordDict(), RecordDict()]
        self.nodes = []
        for number, (rows, labels) in enumerate(((x, y), (other_x, other_y))):
            home = folder / str(number)
            home.mkdir(parents=True)
            np.savez(home / "own.npz", x=rows, y=labels)
            (home / "policy.toml").write_text(POLICY.format(budget=budget))
            # One key for both: which rows are kept back to score with must not differ by chance.
            (home / "ledgers").mkdir()
            (home / "ledgers" / "split.key").write_bytes(bytes(32))
            self.nodes.append(
                {
                    "data-path": str(home / "own.npz"),
                    "policy": str(home / "policy.toml"),
                    "ledger-dir": str(home / "ledgers"),
                    "data-identity": "own",
                }
            )

    def ask(self, run_config, arrays, fields, kind="train"):
        """Both answers to one message."""
        return [self._answer(number, run_config, arrays, fields, kind) for number in (0, 1)]

    def _answer(self, number, run_config, arrays, fields, kind):
        self.coupling.begin(replaying=bool(number))
        record = arrays if isinstance(arrays, ArrayRecord) else to_record(arrays)
        message = Message(RecordDict({"arrays": record, "config": ConfigRecord(fields)}), 1, kind)
        message.metadata.__dict__["_message_id"] = str(uuid4())
        context = Context(1, 1, dict(self.nodes[number]), self.states[number], dict(run_config))
        ids = (SimpleNamespace(hex=f"{self.coupling.message} {each}") for each in count())
        with (
            coupled(self.coupling),
            mock.patch.object(ledger, "uuid4", lambda: next(ids)),
            mock.patch.object(ledgers, "place_of", lambda *_: "place"),
        ):
            return app(message, context)

    def ledger(self, number):
        return Ledger(Path(self.nodes[number]["ledger-dir"]) / "own.jsonl")

    def events(self, number):
        return [(entry.unit, json.dumps(to_json(entry.event))) for entry in self.ledger(number).entries]


def content_of(reply):
    """Everything that a reply says, to compare."""
    if reply.has_error():
        return reply.error.code, reply.error.reason
    arrays = {
        name: {path: (array.dtype, array.shape, array.tobytes()) for path, array in from_record(record).items()}
        for name, record in reply.content.array_records.items()
    }
    metrics = {name: dict(record) for name, record in reply.content.metric_records.items()}
    configs = {name: dict(record) for name, record in reply.content.config_records.items()}
    return arrays, metrics, configs
