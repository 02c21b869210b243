"""SVG elements as text, with escaped text and attributes. No other module writes SVG."""

from collections.abc import Iterable
from html import escape

Point = tuple[float, float]


class Markup(str):
    """Finished HTML or SVG, which templates and elements insert unescaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """Returns the text; Jinja2 looks for this method."""
        return self


def element(name: str, *inside: str, **attributes: str | float | None) -> Markup:
    """Returns an element.

    Args:
        name: name of the element.
        inside: content of the element; text that is no `Markup` is escaped.
        attributes: attributes in order; those that are None are omitted. A "_" at the end of a name
            is removed (`class_`). Every other "_" becomes "-". Numbers have at most two decimals.
    """
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not inside:
        return Markup(f"<{name}{listed}/>")
    body = "".join(each if isinstance(each, Markup) else escape(each) for each in inside)
    return Markup(f"<{name}{listed}>{body}</{name}>")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return str(value) if isinstance(value, int) else f"{value:.2f}".rstrip("0").rstrip(".")


def text(
    words: str, x: float, y: float, anchor: str | None = None, kind: str | None = None,
    transform: str | None = None,
) -> Markup:  # fmt: skip
    """Returns a line of text; `anchor` is "start", "middle" or "end", `kind` its class."""
    return element("text", words, class_=kind, x=x, y=y, text_anchor=anchor, transform=transform)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> Markup:
    """Returns a straight line of a class."""
    return element("line", class_=kind, x1=x1, x2=x2, y1=y1, y2=y2)


def rect(
    x: float, y: float, width: float, height: float, tip: str | None = None,
    **attributes: str | float | None,
) -> Markup:  # fmt: skip
    """Returns a rectangle with a tooltip."""
    inside = () if tip is None else (element("title", tip),)
    return element("rect", *inside, x=x, y=y, width=width, height=height, **attributes)


def circle(x: float, y: float, radius: float, tip: str | None = None, **attributes: str) -> Markup:
    """Returns a circle with a tooltip."""
    inside = () if tip is None else (element("title", tip),)
    return element("circle", *inside, cx=x, cy=y, r=radius, **attributes)


def joined(points: Iterable[Point]) -> str:
    """Returns the `points` attribute of a polyline or a polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def drawing(
    title: str, width: float, height: float, parts: Iterable[str], **attributes: str
) -> Markup:
    """Returns an `<svg>` element for a page; `title` is its alternative text."""
    view = f"0 0 {_value(width)} {_value(height)}"
    body = Markup("\n".join(["", element("title", title), *parts, ""]))
    return element("svg", body, class_="chart", viewBox=view, role="img", **attributes)


def file(title: str, width: float, height: float, parts: Iterable[str], style: str) -> str:
    """Returns the text of an SVG file with a white background.

    Args:
        title: alternative text of the drawing.
        width, height: size in units of the drawing.
        parts: elements.
        style: style sheet.
    """
    head = element("style", Markup(style)), rect(0, 0, width, height, fill="#fff")
    xmlns = "http://www.w3.org/2000/svg"
    return drawing(title, width, height, [*head, *parts], xmlns=xmlns) + "\n"
