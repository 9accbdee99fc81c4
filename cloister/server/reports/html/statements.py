"""What the operator states for the officer's page, read strictly from a small TOML file."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cloister.config.errors import checked
from cloister.config.section import Section
from cloister.core.files import atomic_path, read_json

STATED = "statements.json"
"""In the run directory: what was stated last, for the reports that are written after it."""
LONGEST = 240
"""Characters of one statement: nine of them have to leave room for the facts on one page."""
Stated = Annotated[str, Field(max_length=LONGEST)]


class Statements(Section):
    """One statement for each question; empty: it is marked as still to be stated.

    Args:
        parameters: why this ε and δ, and who decided on them.
        unit: who or what a unit (a client, an example, a group) is in the world, and how many of them a person has.
        mechanism: what else is done to the data before or after the mechanism.
        utility: what the model is for, what accuracy that needs, and which groups of people were looked at.
        trust: who runs the server, and why the sites believe them.
        composition: what else was or will be released about the same data, outside of this ledger.
        implementation: how the machines are kept, who can measure them, and who has reviewed the code.
        access: who may see the model, this page, the run directory and the ledger.
        collection: how the data was collected, on what grounds, and for how long it is kept.
    """

    parameters: Stated = ""
    unit: Stated = ""
    mechanism: Stated = ""
    utility: Stated = ""
    trust: Stated = ""
    composition: Stated = ""
    implementation: Stated = ""
    access: Stated = ""
    collection: Stated = ""


def keep(directory: Path, statements: Statements) -> None:
    """Write statements into a run directory, for later reports.

    Args:
        directory: of the run.
        statements: of the operator.
    """
    content = {name: stated for name, stated in statements.model_dump().items() if stated}
    with atomic_path(directory / STATED) as partial:
        partial.write_text(json.dumps(content, indent=2), encoding="utf-8")


def kept(directory: Path) -> Statements:
    """What was stated last about a run; nothing where nobody has stated anything.

    Raises:
        ConfigError: the file holds something else.
    """
    path = directory / STATED
    return checked(Statements, read_json(path), f"{path}: ") if path.is_file() else Statements()
