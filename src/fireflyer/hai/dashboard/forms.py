"""What a form sends, read with limits, and the proof that it is one of ours."""

import hmac
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request

from fireflyer.errors import ConfigError
from fireflyer.hai.dashboard.refusals import Refusals

MOST_BYTES = 16_384
MOST_FIELDS = 20

ELSEWHERE = "this form does not come from a page of this server"


async def read_form(request: Request) -> dict[str, str]:
    """The fields of an urlencoded form; of a name that comes twice, the last.

    Raises:
        ConfigError: it is too large, or no form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ConfigError("this takes a form")
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
    except ValueError:  # UnicodeError too
        raise ConfigError("the form cannot be read") from None
    return dict(fields)


def same_origin(request: Request) -> bool:
    """Whether a browser says that the request comes from a page of this server.

    Every browser of today sends Sec-Fetch-Site, over TLS and on loopback; Origin comes with every form that
    is posted. What a page of another origin can make a browser send carries neither in this form.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = urlsplit(request.headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get("host")


async def checked_form(request: Request, refusals: Refusals) -> dict[str, str]:
    """The fields of a form of the session's own pages; another is written down.

    Raises:
        PermissionDenied: it comes from elsewhere, or from a page of an earlier session.
        ConfigError: as `read_form`.
    """
    if not same_origin(request):
        raise refusals.form(request, ELSEWHERE)
    form = await read_form(request)
    given = form.pop("csrf", "")
    if not hmac.compare_digest(given.encode(), request.state.csrf.encode()):
        raise refusals.form(request, "the page is of an earlier session: load it again")
    return form
