"""Prometheus metrics, and the monitoring loop that serves them and calls a webhook when a problem begins or ends.

A metric is omitted, and not set to 0, if it would reveal what a claim keeps secret. Prometheus records the time of
each change. If times would reveal the cohort, metrics that change with the round are omitted while the run goes on.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from threading import Event

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.monitoring.snapshot import Finding, Places, Snapshot, findings, look
from cloister.server.reports.status import RunState
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.posting import post
from cloister.utils.text import clean

STATES = ("running", "ended", "dead")
logger = logging.getLogger("cloister.monitoring")


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
        yield from _of_federation(self.snapshot)


def registry(latest: Latest) -> CollectorRegistry:
    """Return the registry for prometheus_client's web server."""
    made = CollectorRegistry()
    made.register(latest)
    return made


def _of_federation(snapshot: Snapshot) -> Iterator[Metric]:
    run = snapshot.run
    if run and not snapshot.hides_progress:
        # Other runs on the data change these too.
        if run.epsilon is not None:
            yield _one("cloister_epsilon", "What everything in the server's ledger amounts to.", run.epsilon)
        if run.budget_left is not None:
            yield _one("cloister_epsilon_left", "What is left of privacy.max-epsilon.", run.budget_left)
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
    hidden = snapshot.hides_progress or (run is not None and run.hides_times)
    if snapshot.database_bytes is not None and not hidden:
        yield _one("cloister_database_bytes", "Size of the SuperLink's state.", snapshot.database_bytes)


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


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _by(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


@dataclass(frozen=True)
class Change:
    """Difference between two snapshots.

    Attributes:
        begun: new findings.
        ended: findings that are gone.
    """

    begun: tuple[Finding, ...]
    ended: tuple[Finding, ...]

    @property
    def content(self) -> dict[str, object]:
        """Return the JSON content for a webhook; chat services display its `text`."""
        lines = [f"{item.level}: {item.text}" for item in self.begun] + [f"over: {item.text}" for item in self.ended]
        return {
            "text": "\n".join(lines),
            "begun": [asdict(item) for item in self.begun],
            "ended": [asdict(item) for item in self.ended],
        }


def change(before: Sequence[Finding], after: Sequence[Finding]) -> Change | None:
    """Return the difference of two lists of findings, or None if they are the same.

    A finding whose text alone changes, such as a growing number of seconds, is the same.

    Args:
        before, after: findings of two snapshots.
    """
    old, new = ({(item.kind, item.about): item for item in found} for found in (before, after))
    begun = tuple(item for key, item in new.items() if key not in old)
    ended = tuple(item for key, item in old.items() if key not in new)
    return Change(begun, ended) if begun or ended else None


class Watch:
    """Monitor of a federation, which stores the last reported problems.

    Args:
        places: sources of the snapshots.
        webhook: URL that receives changes; empty: no calls.
        told: receives a line for each change.
    """

    def __init__(self, places: Places, webhook: str = "", told: Callable[[str], None] = logger.warning) -> None:
        if webhook and not webhook.startswith(("https://", "http://")):
            raise ConfigError(f"--webhook {webhook!r} must begin with https:// or http://")
        self.latest = Latest()
        self._places, self._webhook, self._told = places, webhook, told
        self._known: list[Finding] = []

    def look(self) -> None:
        """Take a snapshot, and report its changes.

        If the webhook fails, they are reported again after the next snapshot.
        """
        now = time.time()
        snapshot = look(self._places)
        found = findings(snapshot, now)
        self.latest.snapshot, self.latest.found, self.latest.when = snapshot, found, now
        changed = change(self._known, found)
        if changed is not None:
            for line in str(changed.content["text"]).splitlines():
                self._told(clean(line))
            try:
                if self._webhook:
                    post(self._webhook, changed.content)
            except FederationError as error:
                logger.warning("the change was not told by the webhook: %s", error)
                return
        self._known = found

    def serve(self, listen: tuple[str, int], every: float, ended: Event) -> None:
        """Take snapshots at an interval, and serve `/metrics`, until the event is set.

        Args:
            listen: address and port of the metrics.
            every: seconds between two snapshots.
            ended: stops the loop.

        Raises:
            ConfigError: the port is unavailable.
        """
        try:
            server, _ = start_http_server(listen[1], listen[0], registry(self.latest))
        except OSError as error:
            raise ConfigError(f"--listen {listen[0]}:{listen[1]}: {error.strerror}") from None
        try:
            self.look()
            while not ended.wait(every):
                self.look()
        finally:
            server.shutdown()
            server.server_close()
