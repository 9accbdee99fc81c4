"""What a node or an operator can tell about a SuperLink without signing in: how far clocks are apart, when TLS ends.

Flower's SuperLink refuses requests signed by a clock that is more than 5 s fast or 305 s slow, with a plain 401, on
which a SuperNode ends as if it had been asked to.
"""

import http.client
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from cloister.core.files import DAY
from cloister.deploy.certificates import EXPIRY_WARNING_DAYS
from cloister.flower.control import read_superlink_connection

FASTEST = 4.0
"""Seconds by which a node's clock may be fast: Flower's 5, less what the comparison is wrong by."""
SLOWEST = 300.0
SUSPICIOUS = 2.0
SECONDS = 5.0
"""For an answer of the SuperLink."""


@dataclass(frozen=True)
class Meeting:
    """What was found.

    Attributes:
        ahead: seconds by which this machine's clock is fast; below 0 it is slow. Good to a second.
        days: until the SuperLink's certificate ends; None without TLS.
    """

    ahead: float
    days: float | None = None

    @property
    def refusal(self) -> str:
        """Why the SuperLink would not let this node in; empty if it would."""
        if -SLOWEST <= self.ahead <= FASTEST:
            return ""
        return (
            f"the clock of this machine is {self._apart()} that of the SuperLink: set both by NTP; it may be at most "
            f"{FASTEST:.0f} s ahead or {SLOWEST:.0f} s behind"
        )

    @property
    def warnings(self) -> list[str]:
        """What will be a trouble soon."""
        said = []
        if abs(self.ahead) > SUSPICIOUS and not self.refusal:
            said.append(f"the clock of this machine is {self._apart()} that of the SuperLink: set both by NTP")
        if self.days is not None and self.days < EXPIRY_WARNING_DAYS:
            said.append(f"the SuperLink's certificate ends in {self.days:.0f} days: its operator has to renew it")
        return said

    def _apart(self) -> str:
        return f"{abs(self.ahead):.0f} s {'ahead of' if self.ahead > 0 else 'behind'}"


def meet(superlink: str, root_certificates: str | None, insecure: bool) -> Meeting | None:
    """Ask a SuperLink for the time.

    Args:
        superlink: host:port.
        root_certificates: path of the CA certificate that vouches for it; None: those of the system.
        insecure: use plain HTTP.

    Returns:
        None if it cannot be reached now, or is not to be trusted: the SuperNode says that better.
    """
    host, _, port = superlink.rpartition(":")
    try:
        context = None if insecure else ssl.create_default_context(cafile=root_certificates)
        return _asked(host.strip("[]"), int(port), context)
    except (OSError, OverflowError, http.client.HTTPException, ValueError):
        return None


def warnings_of(connection: str) -> list[str]:
    """What will be a trouble soon with the SuperLink of a connection in Flower's `config.toml`."""
    link = read_superlink_connection(connection)
    found = meet(link.address or "", link.root_certificates, link.insecure)
    return [*filter(None, [found.refusal]), *found.warnings] if found else []


def _asked(host: str, port: int, context: ssl.SSLContext | None) -> Meeting:
    """Compare the time of an answer, which is whole seconds cut off, with the middle of the time it took."""
    if context is None:
        link = http.client.HTTPConnection(host, port, timeout=SECONDS)
    else:
        link = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
    try:
        link.connect()
        days = _days_left(link.sock)
        before = time.time()
        link.request("GET", "/health")
        said = link.getresponse().headers["Date"]
        middle = (before + time.time()) / 2
        told = parsedate_to_datetime(said or "").timestamp() + 0.5
        return Meeting(middle - told, days)
    finally:
        link.close()


def _days_left(link: object) -> float | None:
    certificate = link.getpeercert() if isinstance(link, ssl.SSLSocket) else None
    if not certificate:
        return None
    return (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / DAY
