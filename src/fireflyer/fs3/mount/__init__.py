"""Mount of an fs3 file system at a directory of this machine. See docs/operate/fs3-mount.md."""
