"""Length-prefixed messages between processes. `rpc.streams` reads them from asyncio streams."""

from fireflyer.rpc.frames import FRAME_LIMIT, FrameBuffer, frame

__all__ = ["FRAME_LIMIT", "FrameBuffer", "frame"]
