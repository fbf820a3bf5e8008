"""What each instruction does to a whole warp: a file for each chapter of the PTX manual."""
