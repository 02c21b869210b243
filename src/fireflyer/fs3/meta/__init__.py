"""Names, inodes and sessions of fs3: POSIX operations as transactions. See docs/internals/fs3-meta.md."""

from fireflyer.fs3.meta.inode import Inode, Layout
from fireflyer.fs3.meta.messages import Request, User
from fireflyer.fs3.meta.service import MetaService

__all__ = ["Inode", "Layout", "MetaService", "Request", "User"]
