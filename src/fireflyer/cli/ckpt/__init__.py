"""`fireflyer ckpt`."""
