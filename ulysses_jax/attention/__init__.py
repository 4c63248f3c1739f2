"""What one device computes: attention over whole sequences, with no knowledge of meshes."""
