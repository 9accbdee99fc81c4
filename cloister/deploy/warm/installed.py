"""Whether an app bundle is the package that is installed here: then a client need not unpack and import it anew."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import cloister

SUFFIX = ".py"


def sources() -> dict[str, bytes]:
    """The Python files of the installed package as they are on disk, by the names that they have in a bundle."""
    package = Path(cloister.__path__[0])
    files = package.rglob(f"*{SUFFIX}")
    return {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in files}


def is_installed(bundle: bytes, imported: Mapping[str, bytes]) -> bool:
    """Whether every Python file of a bundle is one of the installed package, byte for byte, and none is left out.

    Args:
        bundle: an app bundle of Flower, a zip archive.
        imported: `sources` when this process imported the package. Whoever upgrades it on disk meanwhile would have a
            client import files that the bundle does not have, so they are compared with the files of today too.
    """
    with ZipFile(BytesIO(bundle)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(SUFFIX)]
        # Sizes first: a bundle that would fill the memory is not read.
        if {member.filename: member.file_size for member in members} != {n: len(s) for n, s in imported.items()}:
            return False
        carried = {member.filename: archive.read(member) for member in members}
    return carried == dict(imported) == sources()
