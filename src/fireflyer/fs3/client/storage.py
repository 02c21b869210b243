"""Storages by URL: the function that `fireflyer.storage` calls for URLs of fs3."""

from fireflyer.errors import ConfigError
from fireflyer.fs3.client.connection import connect
from fireflyer.fs3.client.directory_storage import Fs3Storage
from fireflyer.fs3.client.discovery import attach

__all__ = ["Fs3Storage", "open_url"]

SCHEME = "fs3://"


def open_url(url: str) -> Fs3Storage:
    """Opens the storage fs3://HOST:PORT[,HOST:PORT...]/PATH; the secret comes from the environment.

    fs3:///PATH uses the file system of FIREFLYER_FS: the folder of `fireflyer fs up --dir`, a
    cluster.toml, or addresses.

    Raises:
        ConfigError: the URL has another form.
        WireError: no manager answers.
    """
    servers, slash, path = url.removeprefix(SCHEME).partition("/")
    if not url.startswith(SCHEME) or not servers + slash:
        raise ConfigError(f"{url!r} is not of the form fs3://HOST:PORT/PATH or fs3:///PATH")
    client = connect(servers.split(",")) if servers else attach()
    return Fs3Storage(client, slash + path or "/", url=url, open_url=open_url)
