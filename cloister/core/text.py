"""Text that came from elsewhere, made fit for a terminal or a page."""

import re

_PART = re.compile(r"[^_\-/. ]*[_\-/. ]+|[^_\-/. ]+")


def clean(text: str) -> str:
    """The text with whatever cannot be printed (control characters, halves of characters) replaced by a sign for it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def parts(name: str) -> list[str]:
    """A name in the parts between which a line may end: behind a space and the signs that join words."""
    return _PART.findall(name)
