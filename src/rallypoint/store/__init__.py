"""The coordination store."""
