"""Comparison of an app bundle with the installed package. If they are equal, a client need not unpack and import it."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import cloister

SUFFIX = ".py"


def sources() -> dict[str, bytes]:
    """Return the Python files of the installed package by their names in a bundle."""
    package = Path(cloister.__path__[0])
    files = package.rglob(f"*{SUFFIX}")
    return {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in files}


def is_installed(bundle: bytes, imported: Mapping[str, bytes]) -> bool:
    """Return whether a bundle and the installed package have the same Python files.

    They are compared byte for byte.

    Args:
        bundle: an app bundle of Flower, a zip archive.
        imported: `sources` when this process imported the package. The current files on disk are compared too: after an
            upgrade, a client would import files that the bundle does not contain.
    """
    with ZipFile(BytesIO(bundle)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(SUFFIX)]
        # Compare sizes first, so that a huge bundle is not read into memory.
        if {member.filename: member.file_size for member in members} != {n: len(s) for n, s in imported.items()}:
            return False
        carried = {member.filename: archive.read(member) for member in members}
    return carried == dict(imported) == sources()
