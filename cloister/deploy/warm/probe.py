"""Unauthenticated checks of a SuperLink: difference of the clocks, and end of its TLS certificate.

Flower's SuperLink refuses requests if the clock of the signer is more than 5 s fast or 305 s slow. It answers with a
plain 401, after which a SuperNode ends as if on request.
"""

import http.client
import ssl
import time
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from cloister.deploy.credentials import EXPIRY_WARNING_DAYS
from cloister.flower.control import read_superlink_connection
from cloister.utils.files import DAY

FASTEST = 4.0
"""Largest number of seconds by which a node's clock may be fast: Flower's 5, less the error of the comparison."""
SLOWEST = 300.0
SUSPICIOUS = 2.0
SECONDS = 5.0
"""Timeout in seconds for an answer of the SuperLink."""


@dataclass(frozen=True)
class SuperLinkProbe:
    """Result of the checks.

    Attributes:
        ahead: seconds by which this machine's clock is fast; negative if it is slow. Accurate to a second.
        days: until the SuperLink's certificate ends; None without TLS.
    """

    ahead: float
    days: float | None = None

    @property
    def refusal(self) -> str:
        """Return the reason for which the SuperLink would refuse this node, if any."""
        if -SLOWEST <= self.ahead <= FASTEST:
            return ""
        return (
            f"the clock of this machine is {self._apart()} that of the SuperLink: set both by NTP; it may be at most "
            f"{FASTEST:.0f} s ahead or {SLOWEST:.0f} s behind"
        )

    @property
    def warnings(self) -> list[str]:
        """Return warnings about upcoming problems."""
        said = []
        if abs(self.ahead) > SUSPICIOUS and not self.refusal:
            said.append(f"the clock of this machine is {self._apart()} that of the SuperLink: set both by NTP")
        if self.days is not None and self.days < EXPIRY_WARNING_DAYS:
            said.append(f"the SuperLink's certificate ends in {self.days:.0f} days: its operator has to renew it")
        return said

    def _apart(self) -> str:
        return f"{abs(self.ahead):.0f} s {'ahead of' if self.ahead > 0 else 'behind'}"


def probe_superlink(superlink: str, root_certificates: str | None, insecure: bool) -> SuperLinkProbe | None:
    """Compare the clock with the SuperLink's, and read the end of its certificate.

    Args:
        superlink: host:port.
        root_certificates: path of the CA certificate that issued its certificate; None: those of the system.
        insecure: use plain HTTP.

    Returns:
        None if it is unreachable or not trusted: the SuperNode logs the reason in more detail.
    """
    host, _, port = superlink.rpartition(":")
    try:
        if insecure:
            link = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SECONDS)
        else:
            context = ssl.create_default_context(cafile=root_certificates)
            link = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=SECONDS, context=context)
        with closing(link):
            link.connect()
            certificate = link.sock.getpeercert() if isinstance(link.sock, ssl.SSLSocket) else None
            days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / DAY if certificate else None
            before = time.time()
            link.request("GET", "/health")
            said = link.getresponse().headers["Date"]
            # The time in an answer is truncated to whole seconds. It is compared with the middle of the request.
            told = parsedate_to_datetime(said or "").timestamp() + 0.5
            return SuperLinkProbe((before + time.time()) / 2 - told, days)
    except (OSError, OverflowError, http.client.HTTPException, ValueError):
        return None


def warnings_of(connection: str) -> list[str]:
    """Return the problems with the SuperLink of a connection in `config.toml`."""
    link = read_superlink_connection(connection)
    found = probe_superlink(link.address or "", link.root_certificates, link.insecure)
    return [*filter(None, [found.refusal]), *found.warnings] if found else []
