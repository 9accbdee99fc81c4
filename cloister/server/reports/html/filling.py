"""Rendering of a page from a template and its context."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloister.core.text import clean, parts
from cloister.server.reports.html.template import FRAME, MACROS, STYLE

if TYPE_CHECKING:
    from markupsafe import Markup


def filled(page: str, context: Mapping[str, object], frame: str = FRAME) -> str:
    """Render a page, with all context values escaped.

    Args:
        page: the blocks of the page.
        context: values of the template's expressions.
        frame: common frame of the pages.
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
    """Return a sentence as HTML, with text between backticks as code.

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
    """Return text without control characters, and markup unchanged."""
    return clean(value) if type(value) is str else value
