"""Truncation of times to the day, since the duration of a round reveals the size of its cohort."""

import io
import json
import os
import time
import zipfile
from pathlib import Path

from cloister.core.files import atomic_path
from cloister.privacy.accounting.ledger import today

KERAS_FACTS = "metadata.json"
"""Part of a `.keras` file that contains the time of saving."""


def stamp(coarse: bool) -> str:
    """Return the time for a line of a log, to the second or to the day."""
    return time.strftime("%Y-%m-%d" if coarse else "%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def settle(path: Path) -> None:
    """Set the times of a file, or a whole folder, to the beginning of the day.

    The inode's change time cannot be set. It stays on the disk, and copies do not carry it.
    """
    inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for found in (*inside, path):
        os.utime(found, (today(), today()), follow_symlinks=False)


def settle_archive(path: Path) -> None:
    """Truncate all times inside a `.keras` or `.npz` archive to the day."""
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
