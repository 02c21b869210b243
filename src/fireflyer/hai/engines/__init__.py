"""Engines: `local` runs gangs on this machine, `slurm` on the nodes of a partition."""
