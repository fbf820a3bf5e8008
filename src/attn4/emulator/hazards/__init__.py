"""What is wrong with a program though its results may be right: found while it runs, collected, reported."""
