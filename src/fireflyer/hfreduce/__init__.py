"""HFReduce: collectives that reduce on the CPU."""
