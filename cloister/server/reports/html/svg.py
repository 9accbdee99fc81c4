"""What makes a figure of matplotlib part of a page: its colours, its names, and what a screen reader says of it."""

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
"""Colours that figures are drawn in, and what of the page stands for them: it knows whether it is light or dark."""
INK, LINE, FIRST, SECOND, THIRD, FOURTH = COLOURS
_COLOUR = re.compile("|".join(COLOURS))
_REFERENCE = re.compile(r"#(?=[\w.-]+\)?$)")
_FONT = re.compile(r"font(-family)?: [^;]*")


def inlined(svg: str, name: str, title: str, description: str) -> str:
    """A figure as an element of an HTML page.

    Args:
        svg: a whole document, as matplotlib writes it.
        name: of the figure: no other on the page has it, so that no two elements share an id.
        title: what it shows.
        description: what is to be seen there, for those who do not see it.

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
    """Rename the ids of an element and those that it refers to, and let the page choose its colours and its font."""
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
    """The size alone, and whatever font the page has."""
    size = re.search(r"[\d.]+px", font.group())
    return f"font-size: {size.group() if size else '9px'}"


def _local(name: str) -> str:
    return name.rpartition("}")[2]
