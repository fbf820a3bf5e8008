"""The forward pass on Hopper, a file a role."""
