"""Frames on asyncio streams.

Separate from `frames`, because processes that must not load asyncio (10 MB) import `frames`.
"""

import asyncio

from fireflyer.errors import PeerLost
from fireflyer.rpc.frames import PREFIX, length


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Returns the next payload, or None if the stream ends between two frames.

    Raises:
        PeerLost: the stream ends or breaks inside a frame.
        ProtocolMismatch: the length is over the limit.
    """
    try:
        prefix = await reader.readexactly(PREFIX)
        return await reader.readexactly(length(prefix))
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == PREFIX:
            return None
        raise PeerLost("the connection ended inside a frame") from error
    except ConnectionError as error:
        raise PeerLost(f"the connection broke: {error.strerror}") from error
