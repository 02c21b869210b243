"""Types of the parameters in the addresses of pages."""

from typing import Annotated

from fastapi import Query
from pydantic import AfterValidator

from fireflyer.hai.model.admission import check_line

Number = Annotated[int, Query(ge=0, lt=1 << 31)]


def _line(text: str) -> str:
    check_line("this text of the address", text, 200)
    return text


Text = Annotated[str, Query(), AfterValidator(_line)]
"""Text without control characters. Queries may contain the text, and PostgreSQL accepts no NUL."""
