"""Starting, supervising, stopping."""
