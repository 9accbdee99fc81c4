"""Register the nodes whose public keys lie in a folder: python registering.py CONNECTION FOLDER."""

import sys
from pathlib import Path

from cloister.deploy.sites import control

if __name__ == "__main__":
    with control(sys.argv[1]) as opened:
        for path in Path(sys.argv[2]).glob("*.pub"):
            opened.register(path.stem, path.read_bytes())
