"""Directory of this machine that shows a file system of fs3. See docs/fs3-mount.md."""
