"""Loading: verified reads of saved boxes, and states assembled from them."""
