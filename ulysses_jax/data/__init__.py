"""Text or token files → memory-mapped token stores → batches → global device arrays."""
