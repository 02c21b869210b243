"""Implementation of `fireflyer dashboard`."""

import sys
import webbrowser
from html import escape
from pathlib import Path

from fireflyer.cli.printing import show_result
from fireflyer.errors import ConfigError
from fireflyer.hai.client import Client
from fireflyer.hai.home import write_private

FILE = "dashboard.html"


def show(home: Path | None, *, open_browser: bool, json: bool) -> None:
    """Prints the sign-in link, or opens it in the browser.

    Raises:
        ConfigError: no browser can be opened.
    """
    client = Client(home)
    link = client.dashboard_link()
    if not open_browser:
        show_result({"link": link}, lambda: sys.stdout.write(f"{link}\n"), json=json)
        return
    client.home.create()
    file = client.home.path / FILE
    text = f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(link)}">\n'
    write_private(file, text.encode())
    if not webbrowser.open(file.as_uri()):
        raise ConfigError("no browser can be opened here; `fireflyer dashboard` prints the link")
    show_result({"link": None}, lambda: None, json=json)
