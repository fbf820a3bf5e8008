"""What the machine remembers: registers, memories, barriers, blocks."""
