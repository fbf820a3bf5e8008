"""What a launch did, counted: by kernel, by role, by class of instruction."""
