"""Reads forms with limits, and verifies that they come from this server's pages."""

import hmac
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request

from fireflyer.errors import ConfigError
from fireflyer.hai.dashboard.routes.refusal_log import RefusalLog

MOST_BYTES = 16_384
MOST_FIELDS = 20

ELSEWHERE = "this form does not come from a page of this server"


async def read_form(request: Request) -> dict[str, str]:
    """Returns the fields of an urlencoded form; if a name comes twice, its last value.

    Raises:
        ConfigError: the body is too large, or not a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ConfigError("expected a form: Content-Type must be application/x-www-form-urlencoded")
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            raise ConfigError(f"the form is larger than {MOST_BYTES} bytes")
    try:
        fields = parse_qsl(
            data.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=MOST_FIELDS,
            errors="strict",
        )
    except ValueError:  # includes UnicodeError
        raise ConfigError("the form cannot be read") from None
    return dict(fields)


def same_origin(request: Request) -> bool:
    """Returns whether a browser states that the request comes from a page of this server.

    Today's browsers send Sec-Fetch-Site over TLS and on loopback, and Origin with every posted
    form. A page of another origin cannot make a browser send either header with these values.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = urlsplit(request.headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get("host")


async def checked_form(request: Request, refusals: RefusalLog) -> dict[str, str]:
    """Returns the fields of a form of the session's own pages; logs any other form.

    Raises:
        PermissionDenied: the form comes from elsewhere, or from a page of an earlier session.
        ConfigError: as for `read_form`.
    """
    if not same_origin(request):
        raise refusals.form(request, ELSEWHERE)
    form = await read_form(request)
    given = form.pop("csrf", "")
    if not hmac.compare_digest(given.encode(), request.state.csrf.encode()):
        raise refusals.form(request, "the page is of an earlier session: load it again")
    return form
