"""A module that the template wraps a function of, if it is there."""
