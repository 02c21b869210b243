"""The file system benchmark: 3FS against raw disks, SQLite, JuiceFS and MooseFS."""
