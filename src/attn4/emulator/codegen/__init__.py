"""A kernel's basic blocks as generated Python functions over numpy registers."""
