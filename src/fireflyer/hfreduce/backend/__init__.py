"""The torch backend: the process group, its handles, and tensors on hosts and devices."""
