"""Ends well and leaves a process behind."""

import subprocess

print("left", subprocess.Popen(["sleep", "1003"]).pid, flush=True)
