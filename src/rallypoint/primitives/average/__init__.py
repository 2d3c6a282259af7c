"""Weighted means of tensors over the ranks of a job."""
