"""Settings: dataclasses beside their owners, read from TOML and `--set a.b=c`."""
