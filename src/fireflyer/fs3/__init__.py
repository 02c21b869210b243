"""The distributed file system of the paper (3FS): manager, meta, storage, client. See docs/fs3.md."""
