"""Rounds of a private federation in a process that kills itself: `python killed_rounds.py FOLDER MECHANISM`.

At every place where a crash could matter there is a point. The first child dies (SIGKILL) at the first point that it
passes, the second at the second, and so on, until one comes through alive; child k leaves what it wrote in FOLDER/k.
Imports are paid for once: children are forked.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from flwr.app import Context, RecordDict
from support import all_nodes, content, flat, grid_of, one_round, random_models

import cloister.privacy.accounting.accountants  # noqa: F401  once, before the children are forked
from cloister.client.budget import keep_budget
from cloister.client.node import Node
from cloister.client.request import TrainRequest
from cloister.config.run import parse
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.mechanisms import gaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.metric import DistanceScaled
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import from_record

ROUNDS = 2
CLIENTS = 3
Z = 4.0
OPTIONS = {"noise_multiplier": Z, "clipping_norm": 1.0}
PRIVATE_DISTANCE = {"release": "private", "distance_multiplier": Z}
MAX_EPSILON = 50.0


class Points:
    """Counts the points that are passed; at one of them, ends the process."""

    def __init__(self, fatal: int, log: Path) -> None:
        self.fatal, self.passed, self.log = fatal, 0, log

    def __call__(self, name: str, last_deed: Callable[[], object] = lambda: None) -> None:
        self.passed += 1
        if self.passed == self.fatal:
            last_deed()
            self.log.write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file that may die after half a write."""

    def __init__(self, file, point: Points, name: str) -> None:
        self.file, self.point, self.name = file, point, name

    def write(self, data: bytes) -> None:
        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.point(f"half of {self.name}", half)
        self.file.write(data)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def note(path: Path) -> None:
    """One more: what SIGKILL does not take back, unlike a crash of the machine."""
    with path.open("a") as file:
        file.write("x")


def instrument(point: Points, noised: Path) -> None:
    """Put points around everything between the decision to release and its end."""
    append, open_, done, sync = Ledger._append, Ledger.open_all, Ledger.done, os.fsync

    def appended(self, file, kind, *lines):
        append(self, Torn(file, point, f"a line of kind {kind}"), kind, *lines)

    def opened(self, *arguments, **options):
        point("before the ledger")
        releases = open_(self, *arguments, **options)
        point("after the ledger")
        return releases

    def finished(self, *releases):
        point("before done")
        done(self, *releases)
        point("after done")

    def synced(handle):
        point("before a sync")
        sync(handle)
        point("after a sync")

    def watched(make):
        def made(*arguments):
            note(noised)
            result = make(*arguments)
            point("after the noise")
            return result

        return made

    Ledger._append, Ledger.open_all, Ledger.done, os.fsync = appended, opened, finished, synced
    gaussian.noisy_mean = watched(gaussian.noisy_mean)
    gaussian.noisy_total = watched(gaussian.noisy_total)
    gaussian.noisy_trimmed_mean = watched(gaussian.noisy_trimmed_mean)
    DistanceScaled.noised = watched(DistanceScaled.noised)


def strategy(mechanism: str, folder: Path, run: str) -> GlobalDP:
    budget = PrivacyBudget(Ledger(folder / "ledger.jsonl"), run, max_epsilon=MAX_EPSILON)
    if mechanism == "rule":
        options = OPTIONS | {"clipping_norm": AdaptiveClip(1.0)}
        return GlobalDP(all_nodes(FedMedian), budget=budget, placement="rule", **options)
    if mechanism == "metric":
        return MetricDP(all_nodes(), budget=budget, **OPTIONS, **PRIVATE_DISTANCE)
    return GlobalDP(all_nodes(), budget=budget, **OPTIONS)


def rounds(mechanism: str, folder: Path, run: str, point: Callable = lambda *_: None) -> None:
    """Train, and publish the model of every round: a line in a file, synced."""
    private = strategy(mechanism, folder, run)
    sent, *models = random_models(CLIENTS + 1)
    for number in range(1, ROUNDS + 1):
        arrays, _ = one_round(private, grid_of(lambda node, _: content(models[node - 1]), CLIENTS), sent, number)
        publish(folder, point, flat(arrays).tobytes())
        sent = from_record(arrays)


def publish(folder: Path, point: Callable, data: bytes) -> None:
    point("before publication")
    with (folder / "published").open("ab") as file:
        Torn(file, point, "a publication").write((data.hex() + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    point("after publication")


def node_rounds(folder: Path, run: str, point: Callable = lambda *_: None) -> None:
    """Replies of one node that keeps a ledger: what it trained goes into the releases that the server promised."""
    said = {"ledger-dir": str(folder), "data-identity": "ledger", "max-epsilon": MAX_EPSILON}
    config = parse({"privacy.server": "global-dp"})

    for number in range(1, ROUNDS + 1):
        request = TrainRequest(config, run, number, 0, (random_models(1)[0],), promise=(Gaussian(Z),))
        with keep_budget(request, Node.of(Context(LOCAL_RUN, 1, said, RecordDict(), {}))):
            note(folder / "noised")
            point("after the noise")
        publish(folder, point, f"{run} {number} {os.urandom(8).hex()}".encode())


def main(folder: Path, mechanism: str) -> None:
    fatal, killed = 0, True
    DiscreteGaussian().integers(1)  # its tables and its kernel: once, like imports
    while killed:
        fatal += 1
        mine = folder / str(fatal)
        mine.mkdir(parents=True)
        if (child := os.fork()) == 0:
            status = 1
            try:
                point = Points(fatal, mine / "died")
                instrument(point, mine / "noised")
                run = node_rounds if mechanism == "node" else functools.partial(rounds, mechanism)
                run(mine, "killed", point)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        if not killed and status:
            raise SystemExit(f"child {fatal} failed")
    print(fatal - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
