"""`flower-supernode` that looks for messages when some are likely; Flower's own waits three seconds in between."""

import os
import sys

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode.cli import flower_supernode

from cloister.deploy.warm.polling import Polling


def main() -> None:
    """Be `flower-supernode`, with its options; before them stand the fastest and the slowest pause in seconds."""
    fastest, slowest = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    Polling(fastest, slowest).install()
    # Without its executor a SuperNode would take messages that nobody works on.
    start_parent_process_monitor(os.getppid())
    flower_supernode()


if __name__ == "__main__":
    main()
