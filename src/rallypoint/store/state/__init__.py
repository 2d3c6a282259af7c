"""The coordination store's state and its rules. Pure: no socket, no clock, no thread."""
