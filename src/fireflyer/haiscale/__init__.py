"""HaiScale: parallel training over HFReduce (paper section V).

`ddp.DistributedDataParallel` replicates a module and averages its gradients while backward runs;
`fsdp.FullyShardedDataParallel` shards it; `mesh` names the dimensions of a mesh of ranks.
"""
