"""Facts about this machine, and acts upon it."""
