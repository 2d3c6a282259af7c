"""What another launcher's log says of why a job failed."""
