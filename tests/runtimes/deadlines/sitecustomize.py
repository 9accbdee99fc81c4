"""Shorten waits of Flower's servers and nodes under test; Python reads this file whenever a process starts.

Flower has no settings for these waits. Only their lengths change, and nothing that is done before or after them. A
node that is killed is missed, and a server that starts again is found, as ever but sooner. The time until a task's
first sign of life stays Flower's: a busy machine may need it to start a process.
"""

import sys
import time
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

BEAT = 6
"""Seconds between two signs of life that a node promises; after twice that it is offline. Flower: 30."""
AHEAD = 3
"""Seconds by which a node keeps its promise sooner than it has to. Flower: 5."""
RETRY = 2
"""Seconds between two tries to reach a SuperLink, at most. Flower: 20."""
LOOK = 0.5
"""Seconds between two looks of `flower-supernode` for messages, at most. Flower: 3."""
PARTS = 20
"""Seconds after its last part until a message that lacks others is given up. Flower: 180."""


def shorten(words: set[str]) -> None:
    """Shorten the waits of the process that starts.

    Args:
        words: of its command line, without folders, up to its first option.
    """
    if words & {"flower-superlink", "superlink"}:
        from flwr.supercore import constant

        # Before the import of modules that copy it.
        constant.OBJECT_PUSH_SESSION_TTL_SECONDS = PARTS

        from flwr.superlink.servicer.fleet import fleet_handlers

        fleet_handlers.HEARTBEAT_MIN_INTERVAL = BEAT
    if words & {"flower-supernode", "cloister.deploy.warm.supernode"}:
        from flwr.supercore import heartbeat
        from flwr.supernode import fleet_http_connection, start_client_internal

        fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = BEAT
        heartbeat.HEARTBEAT_CALL_TIMEOUT = AHEAD
        # A literal in the middle of its loop. The module uses nothing else of `time`.
        start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LOOK)))
    if words & {"flower-supernode", "cloister.deploy.warm.supernode", "flwr-serverapp", "serverapp.py"}:
        from flwr.supercore.retry import http_retry

        http_retry.MAX_RETRY_DELAY = RETRY


shorten({Path(word).name for word in takewhile(lambda word: not word.startswith("--"), sys.orig_argv)})
