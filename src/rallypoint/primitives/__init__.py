"""Locks, barriers, queues, averages: what is built on the store's client, by its public methods
alone.
"""
