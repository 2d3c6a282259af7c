"""The stand-in's groups and stores."""

from __future__ import annotations

from .distributed_c10d import destroy_process_group, init_process_group, is_initialized

__all__ = ["TCPStore", "destroy_process_group", "init_process_group", "is_initialized"]


class TCPStore:
    """The store that the job's host serves on its held socket. It answers nobody."""

    def __init__(self, host_name: str, port: int, **options: object) -> None:
        pass
