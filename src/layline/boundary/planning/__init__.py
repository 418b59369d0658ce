"""From contracts to operations. Nothing in this package imports torch."""
