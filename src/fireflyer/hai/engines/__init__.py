"""Engines: `local` runs gangs on this machine, `slurm` runs them on the nodes of a partition."""
