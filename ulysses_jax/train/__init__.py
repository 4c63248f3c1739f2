"""Composition: config, loss, step, optimizer, checkpoints, metrics and the loop."""
