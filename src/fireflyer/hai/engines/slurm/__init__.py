"""The `slurm` engine: the jobs of a partition, and what runs on their nodes."""
