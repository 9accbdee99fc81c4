"""`flower-supernode` that looks for messages twice a second, where Flower's own waits three seconds in between."""

import os
import sys
import time
from types import SimpleNamespace

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

POLL_SECONDS = 0.5


def main() -> None:
    """Be `flower-supernode`, with its options."""
    sys.argv[0] = "flower-supernode"
    # The module uses nothing else of `time`; the pause is a literal in the middle of its loop.
    vars(start_client_internal)["time"] = SimpleNamespace(sleep=lambda pause: time.sleep(min(pause, POLL_SECONDS)))
    # Without its executor a SuperNode would take messages that nobody works on.
    start_parent_process_monitor(os.getppid())
    flower_supernode()


if __name__ == "__main__":
    main()
