"""The `slurm` engine: jobs of a partition, and the programs that run on their nodes."""
