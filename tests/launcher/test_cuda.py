"""Which GPU a rank joins with, by the answers of a torch that is not there: no test here
has a GPU.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.launcher.worker import cuda
from rallypoint.launcher.worker.cuda import RankDevice, take_device


class Torch:
    """torch.cuda's answers."""

    def __init__(
        self,
        gpus: int,
        *,
        up: bool = False,
        current: int = 0,
        allocated: int = 0,
        uuids: bool = True,
    ) -> None:
        self.gpus, self.up, self.current, self.allocated, self.uuids = (
            gpus,
            up,
            current,
            allocated,
            uuids,
        )

    def is_initialized(self) -> bool:
        return self.up

    def is_available(self) -> bool:
        return self.gpus > 0

    def device_count(self) -> int:
        return self.gpus

    def current_device(self) -> int:
        self.up = True
        return self.current

    def memory_allocated(self, device: int) -> int:
        return self.allocated if device == 0 else 0

    def set_device(self, device: int) -> None:
        self.current = device

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=f"{device:08x}") if self.uuids else SimpleNamespace()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take the device as this local rank, with these answers."""

    def take(
        local_rank: int, torch: Torch, backend: str = "nccl", *, chosen: bool = False
    ) -> RankDevice:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setitem(sys.modules, "torch.cuda", torch)
        monkeypatch.setattr(cuda, "_chosen", chosen)
        return take_device(backend)

    return take


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "cuda:gloo"])
def test_a_rank_that_has_not_chosen_gets_its_own(rank: Any, backend: str) -> None:
    torch = Torch(4)
    assert rank(2, torch, backend) == RankDevice("GPU-00000002", "cuda:2", "given")
    assert torch.current == 2
    assert rank(0, torch := Torch(4), backend) == RankDevice("GPU-00000000", "cuda:0", "given")


@pytest.mark.parametrize("backend", ["gloo", "mpi", "cpu:gloo", ""])
def test_a_group_on_the_cpu_touches_no_gpu(rank: Any, backend: str) -> None:
    torch = Torch(4)
    assert rank(2, torch, backend) == RankDevice()
    assert not torch.up


def test_torchs_default_backend_once_cuda_is_up(rank: Any) -> None:
    assert rank(2, Torch(4, up=True), "").name == "cuda:2"


def test_the_programs_choice_stays(rank: Any) -> None:
    torch = Torch(4, up=True)
    assert rank(2, torch, chosen=True) == RankDevice("GPU-00000000", "cuda:0", "chosen")
    assert torch.current == 0
    assert rank(2, Torch(4, up=True, current=3)) == RankDevice("GPU-00000003", "cuda:3", "chosen")


def test_what_cuda_means_does_not_change_under_a_program(rank: Any) -> None:
    torch = Torch(4, up=True, allocated=4096)
    assert rank(2, torch) == RankDevice("GPU-00000000", "cuda:0", "used")
    assert torch.current == 0


def test_more_ranks_than_gpus(rank: Any) -> None:
    assert rank(1, Torch(1)) == RankDevice("GPU-00000000", "cuda:0", "short")


def test_no_gpu_at_all(rank: Any) -> None:
    torch = Torch(0)
    assert rank(1, torch) == RankDevice()  # torch says itself what is missing
    assert not torch.up


def test_one_gpu_from_another_without_a_uuid(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert rank(1, Torch(2, uuids=False)).uuid == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert rank(1, Torch(2, uuids=False)).uuid == "1"
