"""Times that tell no more than the day: how long a round takes tells how many took part in it."""

import io
import json
import os
import time
import zipfile
from pathlib import Path

from cloister.core.files import atomic_path
from cloister.privacy.accounting.ledger import today

KERAS_FACTS = "metadata.json"
"""The part of a `.keras` file that holds the moment of saving."""


def stamp(coarse: bool) -> str:
    """The moment for a line of a log: to the second, or the day alone."""
    return time.strftime("%Y-%m-%d" if coarse else "%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def settle(path: Path) -> None:
    """Give a file, or a folder with everything in it, the times of the beginning of the day.

    The time of the last change of the inode cannot be set: it stays on the disk itself, and no copy carries it.
    """
    inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for found in (*inside, path):
        os.utime(found, (today(), today()), follow_symlinks=False)


def settle_archive(path: Path) -> None:
    """Rewrite a zip archive (a `.keras` or `.npz` file) so that its entries and its facts know the day alone."""
    content = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            kept = zipfile.ZipInfo(entry.filename, (*time.gmtime(today())[:3], 0, 0, 0))
            kept.compress_type = entry.compress_type
            new.writestr(kept, _without_moment(data) if entry.filename == KERAS_FACTS else data)
    with atomic_path(path) as partial:
        partial.write_bytes(content.getvalue())


def _without_moment(data: bytes) -> bytes:
    facts = json.loads(data)
    return json.dumps(facts | {"date_saved": stamp(coarse=True)}).encode()
