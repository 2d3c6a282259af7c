"""The checks of `rallypoint doctor`: each reads facts of this machine and judges them. The judging
is pure."""
