"""Bytes to messages and back: the protocol without IO."""
