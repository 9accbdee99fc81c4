"""From a template and what is to stand in it to a page."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloister.core.text import clean, parts
from cloister.server.reports.html.template import FRAME, MACROS, STYLE

if TYPE_CHECKING:
    from markupsafe import Markup


def filled(page: str, context: Mapping[str, object], frame: str = FRAME) -> str:
    """A page, with everything that comes from elsewhere escaped.

    Args:
        page: the blocks that it puts into the frame.
        context: what its expressions name.
        frame: what every page of its kind has.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
        loader=DictLoader({"frame": frame, "page": PARTS + page, "macros": MACROS}),
    )
    environment.filters |= {"parts": parts, "code": code}
    return environment.get_template("page").render({"style": STYLE, **context})


def code(text: str) -> "Markup":
    """A sentence in which commands stand between backticks, as a page shows it.

    Args:
        text: not escaped.

    Examples:
        >>> code("see `cloister plan` <here>")
        Markup('see <code>cloister plan</code> &lt;here&gt;')
    """
    from markupsafe import Markup, escape

    pieces = map(escape, clean(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(one) if at % 2 else one for at, one in enumerate(pieces))


PARTS = """{% extends "frame" %}{% from "macros" import figure, numbers, parted %}"""


def _finalized(value: object) -> object:
    """Text of a run as it may stand on a page; markup of ours as it is."""
    return clean(value) if type(value) is str else value
