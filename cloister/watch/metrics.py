"""The same for Prometheus. A metric that a claim keeps secret is not there, rather than 0."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.core.files import DAY
from cloister.server.reports.status import RunState
from cloister.watch.findings import Finding
from cloister.watch.sight import Sight

STATES = ("running", "ended", "dead")


class Latest(Collector):
    """Hands out the metrics of the last look.

    Attributes:
        sight: what was seen.
        found: what is wrong.
        when: of the look, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.sight, self.found, self.when = Sight(), list[Finding](), 0.0

    def collect(self) -> Iterator[Metric]:
        """The metrics, one family after the other."""
        yield _one("cloister_last_look_seconds", "When the federation was looked at, in seconds since 1970.", self.when)
        yield _by("cloister_findings", "What is wrong now.", ("kind", "level"), _kinds(self.found))
        if self.sight.run:
            yield from _of_run(self.sight.run, self.when)
        yield from _of_federation(self.sight)


def registry(latest: Latest) -> CollectorRegistry:
    """What a web server of prometheus_client serves."""
    made = CollectorRegistry()
    made.register(latest)
    return made


def _of_run(run: RunState, now: float) -> Iterator[Metric]:
    yield _one("cloister_round", "The last finished round.", run.round)
    yield _one("cloister_rounds", "Rounds that the run is to have.", run.rounds)
    states = [((state,), float(run.state == state)) for state in STATES]
    yield _by("cloister_run_state", "1 for the state of the newest run.", ("state",), states)
    if run.replies:
        replies = [(("accepted",), float(run.replies[0])), *(((code,), float(n)) for code, n in run.codes.items())]
        yield _by("cloister_replies", "Replies of the last round, by what became of them.", ("kind",), replies)
    if run.seconds is not None:
        yield _one("cloister_round_seconds", "Seconds of the last finished round.", run.seconds)
    if run.written % DAY:
        yield _one("cloister_round_age_seconds", "Seconds since a round was finished.", now - run.written)
    if run.epsilon is not None:
        yield _one("cloister_epsilon", "What everything in the server's ledger amounts to.", run.epsilon)
    if run.budget_left is not None:
        yield _one("cloister_epsilon_left", "What is left of privacy.max-epsilon.", run.budget_left)


def _of_federation(sight: Sight) -> Iterator[Metric]:
    if sight.nodes is not None:
        names = [((node["name"] or node["node-id"],), float(node["status"] == "online")) for node in sight.nodes]
        yield _by("cloister_site_online", "Whether a registered site is online.", ("site",), names)
    if sight.spent:
        shares = [((ledger, unit), share) for (ledger, unit), share in sight.spent.items()]
        yield _by("cloister_budget_spent", "Share of a budget that is spent.", ("ledger", "unit"), shares)
    if sight.database_bytes is not None:
        yield _one("cloister_database_bytes", "Size of the SuperLink's state.", sight.database_bytes)


def _kinds(found: Iterable[Finding]) -> list[tuple[tuple[str, ...], float]]:
    return [(key, float(count)) for key, count in Counter((item.kind, item.level) for item in found).items()]


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _by(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
