"""One job on several machines: its messages, joining, and the lead."""
