"""How a problem is solved on a machine: the choice, its checks, its bounds and its explanation."""
