"""Ulysses sequence parallelism for training transformers on long sequences in JAX."""
