"""Client of fs3: names, open files, batched reads and writes. See docs/guide/fs3.md.

with connect("host:4500") as fs, fs.open("/a", "wb") as file:
    file.write(data)
"""

from fireflyer.fs3.client.connection import Client, connect
from fireflyer.fs3.client.file import File
from fireflyer.fs3.client.settings import Settings

__all__ = ["Client", "File", "Settings", "connect"]
