"""Directory of this machine that shows a file system of fs3. See docs/operate/fs3-mount.md."""
