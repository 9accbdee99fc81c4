"""Import the modules of Flower that Flower does not document, each with the reason for it.

Flower documents `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and their parts. Every other module may change with a
release. A test counts the names imported here, and refuses such an import elsewhere. `messages` is for every process,
`http_grid` for a server's app, `control` for an operator's commands, `executor` for executors of apps. `superlink` and
`supernode` are for the process of that name. `serverapp` is run as a file, without this package.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

TESTED_WITH = ("1.41", "1.42")
"""Releases of Flower with which every test runs, or a smoke test."""
log = logging.getLogger("flwr").log
"""Log a line as Flower does: on the console, and in the log of a run."""


def command(name: str) -> Callable[[], None]:
    """Return the function of one of Flower's commands, which reads `sys.argv`.

    Args:
        name: of the command, as Flower documents it.
    """
    from importlib.metadata import distribution

    found: Callable[[], None] = distribution("flwr").entry_points.select(group="console_scripts")[name].load()
    return found


def flower_home() -> Path:
    """Return the folder of Flower's settings, which `FLWR_HOME` names."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
