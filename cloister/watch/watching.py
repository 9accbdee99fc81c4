"""Monitoring loop: serves metrics, and calls a webhook when a problem begins or ends."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Event

from prometheus_client import start_http_server

from cloister.core.errors import ConfigError, FederationError
from cloister.core.posting import post
from cloister.core.text import clean
from cloister.watch.findings import Finding, findings
from cloister.watch.metrics import Latest, registry
from cloister.watch.snapshot import Places, look

logger = logging.getLogger("cloister.watch")


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
        if changed is None or self._called(changed):
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

    def _called(self, changed: Change) -> bool:
        for line in str(changed.content["text"]).splitlines():
            self._told(clean(line))
        if not self._webhook:
            return True
        try:
            post(self._webhook, changed.content)
        except FederationError as error:
            logger.warning("the change was not told by the webhook: %s", error)
            return False
        return True
