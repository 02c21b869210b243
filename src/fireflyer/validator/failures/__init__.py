"""Statistics of hardware failures: classes, tables, rates, and traces drawn from rates."""
