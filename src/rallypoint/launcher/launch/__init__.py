"""The caller's side of `rallypoint.launch`, the standby agent that serves it, and the call inside a
rank."""
