"""A log of any launcher as evidence of why a job failed."""
