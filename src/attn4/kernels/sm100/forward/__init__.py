"""The forward pass on Blackwell, a file a role."""
