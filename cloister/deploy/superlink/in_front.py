"""Methods in front of the functions of Flower's SuperLink, and the three small ones: node keys, revoked keys, runs."""

import re
import time
from base64 import b64decode
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from cloister.flower.superlink import ApiErrorCode, FlowerError, control_handlers, fleet_handlers, node_auth

PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\n([A-Za-z0-9+/=\n]{1,400})-----END PUBLIC KEY-----\n")
CURVES = {
    "P-256": "3059301306072a8648ce3d020106082a8648ce3d030107034200",
    "P-384": "3076301006072a8648ce3d020106052b81040022036200",
    "P-521": "30819b301006072a8648ce3d020106052b8104002303818600",
}
"""The first bytes of a key on each curve in DER; its point follows (RFC 5480)."""
REVOKED = "its node was unregistered"
"""Text of the answer for the key of a revoked node; `register.sh` looks for it."""
SECONDS = 1.0
"""Seconds for which a running run is remembered. So long after its end, nodes may still fetch and send parts."""


class InFront:
    """Methods that take the place of Flower's functions of the same names, which they call.

    Attributes:
        handlers: Flower's module of those functions.
        names: of those functions.
        inner: the functions by name, as they were when this was made.
    """

    handlers: ClassVar[ModuleType] = fleet_handlers
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.inner: dict[str, Callable[..., Any]] = {name: vars(self.handlers)[name] for name in self.names}

    def install(self) -> None:
        """Put this in front of the functions."""
        for name in self.inner:
            vars(self.handlers)[name] = getattr(self, name)


class NodeKeys(InFront):
    """Refusal of keys that are no key of a node, before Flower reads them.

    Flower reads the key of a request before it knows the sender. For a Diffie-Hellman key it checks that a number is
    prime, which takes seconds to minutes and stops everything else.
    """

    handlers: ClassVar[ModuleType] = node_auth
    names = ("bytes_to_public_key",)

    def bytes_to_public_key(self, public_key_bytes: bytes) -> Any:
        """Return the key that a node shows.

        Raises:
            ValueError: it is on none of the `CURVES`.
        """
        found = PEM.fullmatch(public_key_bytes)
        if not found or not b64decode(found[1]).startswith(tuple(map(bytes.fromhex, CURVES.values()))):
            raise ValueError("no key of a node")
        return self.inner["bytes_to_public_key"](public_key_bytes)


class RevokedKeys(InFront):
    """An answer that tells an operator that a key was revoked.

    Flower keeps an unregistered key in its database, and answers "already in use" for it and for a registered one.
    """

    handlers: ClassVar[ModuleType] = control_handlers
    names = ("register_node",)

    def register_node(self, request: Any, account: Any, state: Any) -> Any:
        """Register a node.

        Raises:
            FlowerError: as Flower's, with `REVOKED` in it for the key of a revoked node.
        """
        try:
            return self.inner["register_node"](request, account, state)
        except FlowerError as error:
            taken = error.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE
            if taken and state.get_node_id_by_public_key(request.public_key) is None:
                raise FlowerError(error.code, error.message, public_details=REVOKED) from None
            raise


class RunningRuns(InFront):
    """Memory of which runs are running, for `SECONDS`. Flower asks its database for each part of each message.

    Args:
        clock: gives seconds.
    """

    names = ("check_abort",)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.until: dict[int, float] = {}

    def check_abort(self, run_id: int, *others: object) -> str | None:
        """Return why a node gets nothing of a run; None while the run is running. An ended run is always looked up."""
        now = self.clock()
        if now < self.until.get(run_id, now):
            return None
        found: str | None = self.inner["check_abort"](run_id, *others)
        if found is None:
            self.until[run_id] = now + SECONDS
        return found
