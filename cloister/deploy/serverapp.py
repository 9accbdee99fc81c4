"""Be `flwr-serverapp`, with the task's token from the standard input: an argument is shown to every user by `ps`.

Run as a file, not as a module: nothing of this package may be loaded before the app's bundle, which brings its own.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
    from flwr.superlink.grid import http_grid

    # Only this process sees what it changes here.
    runpy.run_path(str(Path(__file__).with_name("handshakes.py")))["install"](http_grid)
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", sys.stdin.readline().strip()]
    flwr_serverapp()
