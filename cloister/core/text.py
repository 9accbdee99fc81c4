"""Text that came from elsewhere, made fit for a terminal or a page, and numbers of things in words."""

import re

_PART = re.compile(r"[^_\-/. ]*[_\-/. ]+|[^_\-/. ]+")


def clean(text: str) -> str:
    """The text with whatever cannot be printed (control characters, halves of characters) replaced by a sign for it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def parts(name: str) -> list[str]:
    """A name in the parts between which a line may end: behind a space and the signs that join words."""
    return _PART.findall(name)


def counted(number: int, noun: str) -> str:
    """So many things.

    Args:
        number: ≥ 0.
        noun: of one of them; its plural ends in s.

    Examples:
        >>> counted(1, "round"), counted(0, "round")
        ('1 round', '0 rounds')
    """
    return f"{number} {noun}{'s' * (number != 1)}"
