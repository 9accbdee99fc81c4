"""Helpers for terminal output."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def can_show(console: "Console") -> bool:
    """Return True if a console is a terminal that can redraw lines."""
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter and not console.quiet


def spoken(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
