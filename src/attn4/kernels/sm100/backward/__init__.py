"""The backward pass on Blackwell, a file a role."""
