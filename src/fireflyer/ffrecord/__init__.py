"""FFRecord: record files with random batch reads.

A file holds N samples of any length, each with its CRC32; `FileReader` reads any batch of samples
in one call. Format v1 is that of High-Flyer's ffrecord, byte for byte (docs/guide/ffrecord.md).
Format v2 adds commits, columns, compression and alignment (docs/internals/ffrecord-v2.md).
The PyTorch interface is `fireflyer.ffrecord.torch`; importing this package does not import torch.
"""

from fireflyer import __version__
from fireflyer.ffrecord import utils
from fireflyer.ffrecord.chunk_cache import ChunkCache
from fireflyer.ffrecord.compat import checkFsAlign, install_as_ffrecord
from fireflyer.ffrecord.folder import PackedFolder, open_folder, pack_folder
from fireflyer.ffrecord.reader import FileReader
from fireflyer.ffrecord.remote import RemoteFiles, open_records
from fireflyer.ffrecord.writer import FileWriter, dump

__all__ = [
    "ChunkCache",
    "FileReader",
    "FileWriter",
    "PackedFolder",
    "RemoteFiles",
    "__version__",
    "checkFsAlign",
    "dump",
    "install_as_ffrecord",
    "open_folder",
    "open_records",
    "pack_folder",
    "utils",
]
