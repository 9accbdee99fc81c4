"""Prometheus metrics. A metric is omitted, and not set to 0, if it would reveal what a claim keeps secret.

Prometheus records the time of each change. If times would reveal the cohort, metrics that change with the round are
omitted while the run goes on.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.core.text import clean
from cloister.server.reports.status import RunState
from cloister.watch.findings import Finding
from cloister.watch.snapshot import Snapshot

STATES = ("running", "ended", "dead")


class Latest(Collector):
    """Collector of the metrics of the last snapshot.

    Attributes:
        snapshot: of the federation.
        found: its problems.
        when: time of the snapshot, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.snapshot, self.found, self.when = Snapshot(), list[Finding](), 0.0

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, one family after the other."""
        yield _one("cloister_last_look_seconds", "When the federation was looked at, in seconds since 1970.", self.when)
        counted = Counter((item.kind, item.level) for item in self.found)
        kinds = [(key, float(count)) for key, count in counted.items()]
        yield _by("cloister_findings", "What is wrong now.", ("kind", "level"), kinds)
        if self.snapshot.run:
            yield from _of_run(self.snapshot.run, self.when)
            if not self.snapshot.hides_progress:
                # Other runs on the data change these too.
                if self.snapshot.run.epsilon is not None:
                    told = "What everything in the server's ledger amounts to."
                    yield _one("cloister_epsilon", told, self.snapshot.run.epsilon)
                if self.snapshot.run.budget_left is not None:
                    left = self.snapshot.run.budget_left
                    yield _one("cloister_epsilon_left", "What is left of privacy.max-epsilon.", left)
        yield from _of_federation(self.snapshot)


def registry(latest: Latest) -> CollectorRegistry:
    """Return the registry for prometheus_client's web server."""
    made = CollectorRegistry()
    made.register(latest)
    return made


def _of_run(run: RunState, now: float) -> Iterator[Metric]:
    yield _one("cloister_rounds", "Rounds that the run is to have.", run.rounds)
    states = [((state,), float(run.state == state)) for state in STATES]
    yield _by("cloister_run_state", "1 for the state of the newest run.", ("state",), states)
    if run.seconds is not None:
        yield _one("cloister_round_seconds", "Seconds of the last finished round.", run.seconds)
    if not run.hides_times:
        yield _one("cloister_round_age_seconds", "Seconds since a round was finished.", now - run.written)
    if run.hides_progress:
        return
    yield _one("cloister_round", "The last finished round.", run.round)
    if run.replies:
        replies = {"accepted": run.replies[0], **run.codes}
        counted = [((clean(code),), float(count)) for code, count in replies.items()]
        yield _by("cloister_replies", "Replies of the last round, by what became of them.", ("kind",), counted)


def _of_federation(snapshot: Snapshot) -> Iterator[Metric]:
    if snapshot.nodes is not None:
        online: dict[str, float] = {}
        for node in snapshot.nodes:  # while a site gets a new key, two nodes have its name
            name = clean(node["name"] or node["node-id"])
            online[name] = max(online.get(name, 0.0), float(node["status"] == "online"))
        names = [((name,), value) for name, value in online.items()]
        yield _by("cloister_site_online", "Whether a registered site is online.", ("site",), names)
    if snapshot.spent and not snapshot.hides_progress:
        shares = [((clean(ledger), unit), share) for (ledger, unit), share in snapshot.spent.items()]
        yield _by("cloister_budget_spent", "Share of a budget that is spent.", ("ledger", "unit"), shares)
    # The database contains a message for each client of the cohort.
    hidden = snapshot.hides_progress or (snapshot.run is not None and snapshot.run.hides_times)
    if snapshot.database_bytes is not None and not hidden:
        yield _one("cloister_database_bytes", "Size of the SuperLink's state.", snapshot.database_bytes)


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _by(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
