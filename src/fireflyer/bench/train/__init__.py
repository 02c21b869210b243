"""The training benchmark: steps of data parallelism against torch's."""
