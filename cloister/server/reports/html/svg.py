"""Conversion of a matplotlib figure for an HTML page: colours, unique ids and accessible description."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

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
_COLOUR = re.compile("|".join(COLOURS))
_REFERENCE = re.compile(r"#(?=[\w.-]+\)?$)")
_FONT = re.compile(r"font(-family)?: [^;]*")


def inlined(svg: str, name: str, title: str, description: str) -> str:
    """Return a figure as an element of an HTML page.

    Args:
        svg: a complete document, as matplotlib writes it.
        name: of the figure, unique on the page, so that all ids are unique.
        title: content of the figure.
        description: the data of the figure in words, for screen readers.

    Returns:
        An `svg` element without namespaces, scripts or styles of its own.
    """
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in [each for each in parent if _local(each.tag) in ("style", "metadata")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        _settle(element, name)
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        told = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        told.text = text
        root.insert(place, told)
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _settle(element: ElementTree.Element, name: str) -> None:
    """Make ids and references unique, and use the page's colours and font."""
    attributes = {_local(key): value for key, value in element.attrib.items()}
    for key, value in attributes.items():
        if key == "id":
            attributes[key] = f"{name}-{value}"
        elif key in ("href", "clip-path"):
            attributes[key] = _REFERENCE.sub(f"#{name}-", value)
        elif key == "style":
            attributes[key] = _styled(value)
    element.attrib.clear()
    element.attrib |= attributes


def _styled(style: str) -> str:
    coloured = _COLOUR.sub(lambda found: COLOURS[found.group()], style)
    parts = [part for part in coloured.split("; ") if not part.startswith("font-family")]
    return "; ".join(_FONT.sub(_sized, part) if part.startswith("font:") else part for part in parts)


def _sized(font: re.Match[str]) -> str:
    """Return the font size only, so that the page's font applies."""
    size = re.search(r"[\d.]+px", font.group())
    return f"font-size: {size.group() if size else '9px'}"


def _local(name: str) -> str:
    return name.rpartition("}")[2]
