"""Everything that knows about devices: mesh, sharding policy, head plan and exchange."""
