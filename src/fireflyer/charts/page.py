"""HTML pages from Jinja2 templates. A page is one file: it loads no other file and runs no script.

Templates escape whatever they insert, except `Markup`. A package keeps its templates in its folder
`templates`; they extend `page.html` of this package, which holds the style sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fireflyer.charts.svg import Markup

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = "fireflyer.charts"


@dataclass(frozen=True)
class Section:
    """Section of a page: a heading ("": none), plain paragraphs, and finished HTML or SVG parts.

    Sections that are not `wide` stand side by side on a wide screen.
    """

    heading: str
    text: Sequence[str] = ()
    parts: Sequence[str] = ()
    wide: bool = True


class Note(NamedTuple):
    """Cell of a table: a value, with a small remark below it."""

    value: object
    remark: str


@cache
def environment(package: str = HERE) -> "Environment":
    """Returns the templates of a package, together with the templates of `fireflyer.charts`.

    Jinja2 is imported when the first page is made, so that commands without pages start faster.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, HERE))]),
        autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    made.filters["cell"] = _cell
    return made


def render(name: str, package: str = HERE, **values: Any) -> str:
    """Renders a template of a package with values; returns the document."""
    return environment(package).get_template(name).render(values) + "\n"


def page(title: str, sections: Sequence[Section], lead: Sequence[str] = ()) -> str:
    """Returns a page of sections below a title and paragraphs."""
    return render("page.html", title=title, lead=lead, sections=sections)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "") -> Markup:
    """Returns a table of texts, numbers and `Note`s.

    All columns except the first are right-aligned. If `kind` is "words", all columns are left-aligned,
    and text of the last column continues on further lines.
    """
    macros: Any = environment().get_template("macros.html").module
    return Markup(macros.table(heads, rows, kind))


def key(colours: dict[str, str]) -> Markup:
    """Returns the legend of a drawing: a mark in the colour of each name."""
    macros: Any = environment().get_template("macros.html").module
    return Markup(macros.key(colours))


@cache
def style_sheet() -> str:
    """Returns the style sheet of all pages."""
    return environment().get_template("page.css").render()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
