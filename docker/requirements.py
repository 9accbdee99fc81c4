"""Print what an image installs, by pyproject.toml: `light` for the SuperLink, `all` EXTRA... for what runs an app."""

import sys
import tomllib

LIGHT = ("flwr", "cryptography", "pydantic", "rich", "typer")
"""What the SuperLink and the `cloister` command need; an app's own code needs the rest."""

which, *extras = sys.argv[1:]
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"]
for extra in extras:
    wanted += project["optional-dependencies"][extra]
for requirement in wanted:
    # Containers deploy; the Ray of flwr's simulation extra has no use in them.
    requirement = requirement.replace("flwr[simulation]", "flwr")
    if which == "all" or requirement.startswith(LIGHT):
        print(requirement)
