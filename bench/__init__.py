"""Every published figure, with the peer measured in the same run."""
