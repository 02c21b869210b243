"""HaiScale: parallel training over HFReduce."""
