"""The coordination store's client, in the process that uses it."""
