"""Code that runs in the agent: one process on each node that starts, watches and stops the
ranks.
"""
