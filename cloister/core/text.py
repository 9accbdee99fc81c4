"""Text that came from elsewhere, made fit for a terminal or a page."""


def clean(text: str) -> str:
    """The text with whatever cannot be printed (control characters, halves of characters) replaced by a sign for it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
