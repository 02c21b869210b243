"""HaiScale: parallel training over HFReduce (paper section V).

`ddp.DistributedDataParallel` replicates a module and averages its gradients while backward runs.
"""
