"""The coordination store's server: one thread that moves bytes between connections and the
state.
"""
