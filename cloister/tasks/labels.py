"""Mapping from the labels in a site's files to class numbers."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloister.utils.text import only_text

NO_CLASS = -1
"""Number of a label that matches no class. `Task.usable` leaves such a row out, `Task.checked` refuses it."""

TOO_LARGE = 10**9
WHOLE = re.compile(r"(\d{1,9})(?:\.0*)?")
"""Whole number below `TOO_LARGE`, in the notation of spreadsheets too (`3.0`)."""


def classes_of(labels: NDArray | Sequence[str], classes: int, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Map labels to class numbers by the task's names.

    The mapping is independent of the other contents of the file. Each site has only some of the classes. A mapping
    derived from a site's data would give a number another meaning at every site. It would also reveal which classes a
    site has.

    | labels | class number |
    |---|---|
    | text that is one of `names`, shape (n,) | its place in `names` |
    | whole numbers, as numbers or as text, where all names are whole numbers, such as ("1", "2", "3") | the same |
    | other whole numbers, as numbers or as text, shape (n,) | themselves |
    | one-hot rows, shape (n, classes), where there are names | the column of the 1 |
    | anything else | `NO_CLASS` |

    Args:
        labels: n of them, each mapped by itself, so that an unreadable label changes no other.
        classes: number of classes.
        names: of the classes, in the order of their numbers; empty: the task has no names.

    Returns:
        Shape (n,).
    """
    numbered = bool(names) and all(name.isdecimal() for name in names)
    if isinstance(labels, np.ndarray):
        if labels.ndim == 2:
            if not names:
                return np.full(len(labels), NO_CLASS, np.int64)
            is_hot = ((labels == 1).sum(axis=1) == 1) & ((labels == 0).sum(axis=1) == classes - 1)
            return np.where(is_hot & (labels.shape[1] == classes), labels.argmax(axis=1), NO_CLASS).astype(np.int64)
        if labels.dtype.kind in "iu" and not numbered:
            return np.where(labels < TOO_LARGE, labels, NO_CLASS).astype(np.int64)
        labels = (only_text(labels) if labels.dtype.kind == "U" else labels).tolist()
    places = {name: number for number, name in enumerate(names)}
    found: list[int] = []
    for label in labels:
        # Undecodable bytes become a character that no class name contains.
        text = (label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label)).strip()
        if text in places:
            found.append(places[text])
        elif whole := WHOLE.fullmatch(text):
            # If the names are numbers, a number stands for the class of that name.
            found.append(places.get(whole[1], NO_CLASS) if numbered else int(whole[1]))
        else:
            found.append(NO_CLASS)
    return np.array(found, np.int64)


def described(classes: int, names: tuple[str, ...]) -> str:
    """Describe the labels that a task accepts, in words.

    Args:
        classes: number of classes.
        names: of the classes; empty: the task has no names.
    """
    if not names or classes > 10:
        return f"from 0 to {classes - 1}"
    if all(name.isdecimal() for name in names):
        *most, last = names
    else:
        *most, last = (f"{number} ({name})" for number, name in enumerate(names))
    return f"{', '.join(most)} or {last}"
