"""Loading: verified reads of saved boxes, and states put together from them."""
