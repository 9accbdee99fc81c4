"""Conversion of a matplotlib figure to an element of an HTML page: colours, unique ids and accessible description."""

import html
import re
from collections.abc import Mapping

COLOURS: Mapping[str, str] = {
    "#010101": "var(--ink)",
    "#020202": "var(--line)",
    "#030303": "var(--series-1)",
    "#040404": "var(--series-2)",
    "#050505": "var(--series-3)",
    "#060606": "var(--series-4)",
}
"""Placeholder colours of figures, and the page's CSS colours that replace them in both colour schemes."""
INK, LINE, FIRST, SECOND, THIRD, FOURTH = COLOURS
_TAG = re.compile(r"<[^>]*>")
_NOT_SHOWN = re.compile(r"<(style|metadata)\b.*?</\1>|<!--.*?-->", re.DOTALL)
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')


def inlined(svg: str, name: str, title: str, description: str) -> str:
    """Return a figure as an element of an HTML page.

    Args:
        svg: a complete document, as matplotlib writes it; its texts are escaped.
        name: of the figure, unique on the page, so that all ids are unique.
        title: content of the figure.
        description: the data of the figure in words, for screen readers.

    Returns:
        An `svg` element without namespaces and styles of its own.
    """

    def adapted(found: re.Match[str]) -> str:
        tag = _ID.sub(rf"\1{name}-", found.group().replace("xlink:", ""))
        for placeholder, colour in COLOURS.items():
            tag = tag.replace(placeholder, colour)
        return tag

    _, opening, rest = svg.partition("<svg")
    attributes, _, body = rest.partition(">")
    box = attributes.partition('viewBox="')[2].partition('"')[0]
    return (
        f'{opening} viewBox="{box}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(description)}</desc>'
        f"{_TAG.sub(adapted, _NOT_SHOWN.sub('', body))}"
    )
