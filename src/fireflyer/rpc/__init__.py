"""Length-prefixed messages between processes."""

from fireflyer.rpc.frames import FRAME_LIMIT, FrameBuffer, frame, read_frame

__all__ = ["FRAME_LIMIT", "FrameBuffer", "frame", "read_frame"]
