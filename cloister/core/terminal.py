"""What is said on a terminal, or to a log that stands for one."""

from rich.console import Console


def can_show(console: Console) -> bool:
    """Whether a console is a terminal that lines can be drawn anew on."""
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter and not console.quiet


def spoken(seconds: float) -> str:
    """A length of time for a person: minutes and seconds, with hours before them where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
