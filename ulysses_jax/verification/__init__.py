"""Proves on a user's own model that its sharded run is its single-device run."""
