"""Payloads between the caller of `launch` and its ranks: checks, pickling and unpickling."""
