"""Statements of the operator for the officer's page, read strictly from a small TOML file."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cloister.config.errors import checked
from cloister.config.section import Section
from cloister.core.files import atomic_path, read_json

STATED = "statements.json"
"""File in the run directory with the latest statements, for later reports."""
LONGEST = 240
"""Maximum characters of one statement; nine of them share one page with the facts."""
Stated = Annotated[str, Field(max_length=LONGEST)]


class Statements(Section):
    """Statements of the operator, one for each question; an empty one is marked as open.

    Args:
        parameters: the reason for this ε and δ, and who decided on them.
        unit: the real-world meaning of a unit (a client, an example, a group), and the number of units of a person.
        mechanism: other processing of the data before or after the mechanism.
        utility: the purpose of the model, the accuracy it requires, and the groups of people that were evaluated.
        trust: the operator of the server, and why the sites trust it.
        composition: other past or future releases about the same data, outside of this ledger.
        implementation: maintenance of the machines, access for measurements, and reviewers of the code.
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
    """Return the stored statements about a run; empty without any.

    Raises:
        ConfigError: the file contains anything else.
    """
    path = directory / STATED
    return checked(Statements, read_json(path), f"{path}: ") if path.is_file() else Statements()
