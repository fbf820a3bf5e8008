"""The vocabulary: channels, shared memory, copies, products and arithmetic."""
