"""What Hopper and Blackwell kernels have in common."""
