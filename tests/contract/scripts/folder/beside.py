"""A module beside the program."""
