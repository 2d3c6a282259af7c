"""Why it failed, and what to do."""
