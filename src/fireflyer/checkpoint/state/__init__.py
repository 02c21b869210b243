"""States: their trees, the leaves and boxes of tensors, and the layout that ranks share."""
