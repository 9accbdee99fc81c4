"""Print what an image installs, from pyproject.toml: `light` for the SuperLink, `all` for what runs an app."""

import sys
import tomllib

LIGHT = ("flwr", "cryptography", "pydantic", "rich", "typer")
"""What the SuperLink and the `cloister` command need; an app's own code needs the rest."""

with open("pyproject.toml", "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
for requirement in wanted:
    # Containers deploy; the Ray of flwr's simulation extra has no use in them.
    requirement = requirement.replace("flwr[simulation]", "flwr")
    if sys.argv[1] == "all" or requirement.startswith(LIGHT):
        print(requirement)
