"""The checks of `rallypoint doctor`: each looks (facts of this machine) and judges (facts to findings, pure)."""
