"""Code that runs in a rank, around the user's program."""
