"""Error messages of torch, NCCL, gloo, Python and schedulers, and the fact that each one states."""
