"""Errors about GPUs, told with what was found on the machine: torch's and NCCL's messages beside
constructed answers of NVML.

The texts are tests/stories/devices/<name>.txt; `UPDATE_STORIES=1 pytest` writes them, a person
reads them.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

from rallypoint.diagnosis import classify, render
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    JobEvidence,
    Meeting,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.report import Report
from rallypoint.diagnosis.root_cause import devices_shared, diagnose
from rallypoint.host.devices import Build, Device, Found, Look, Process, resolve

HERE = pathlib.Path(__file__).parent.parent
MESSAGES = {
    told["name"]: told
    for told in json.loads(
        (HERE / "host" / "devices" / "messages.json").read_text(encoding="utf-8")
    )
}
STORIES = HERE / "stories" / "devices"
GIB = 1 << 30
CUDA_12 = Build("2.13.0+cu126", "12.6")
MAIN = Frame("/home/ada/exp/train.py", 12, "<module>", 'model = Model().to("cuda")')


def gpus(
    number: int,
    *,
    driver: str = "550.54.14",
    cuda: str = "12.4",
    processes: dict[int, Process] | None = None,
) -> Look:
    held = processes or {}
    return Look(
        tuple(
            Device(
                f"GPU-{i}",
                "NVIDIA H100 80GB HBM3",
                int(79.6 * GIB),
                processes=(held[i],) if i in held else (),
            )
            for i in range(number)
        ),
        driver,
        cuda,
        "nvml",
    )


def found(look: Look, listed: str | None = None, build: Build | None = CUDA_12) -> Found:
    return Found(
        look, resolve(look, {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}), build
    )


def rank(
    number: int,
    message: str = "",
    *,
    how: str = "",
    device: int | None = None,
    backend: str = "nccl",
    **more: Any,
) -> RankEvidence:
    error = None
    if message:
        told = MESSAGES[message]
        place = f'  File "{MAIN.file}", line 12, in <module>\n    {MAIN.source}\n'
        text = f"Traceback (most recent call last):\n{place}{told['type']}: {told['message']}\n"
        error = Raised(told["type"], told["message"], (MAIN,), text, at=2.0)
    meeting = None
    if device is not None:
        meeting = Meeting(
            "env://",
            "127.0.0.1:41235",
            number,
            2,
            backend,
            "train.py:9",
            f"GPU-{device}",
            f"cuda:{device}",
            how,
        )
    ended = Ended(code=1, at=2.1, order=number) if message else None
    return RankEvidence(
        number, number, 24314 + number, "running", ended=ended, raised=error, said_traceback=True, meeting=meeting,
        log=f"/state/runs/a1/rank{number}.log", log_line=40, **more,
    )  # fmt: skip


def told(ranks: list[RankEvidence], devices: Found | None) -> Report:
    job = JobEvidence(
        "train.py",
        len(ranks),
        (NodeEvidence(tuple(ranks), devices=devices, run_dir="/state/runs/a1"),),
        held_address="127.0.0.1:41235",
    )
    return diagnose(job)[0]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_recognised(name: str) -> None:
    """By itself, and wherever nobody looked at the machine."""
    message = MESSAGES[name]
    report = told([rank(0, name), rank(1, sent=("SIGTERM",), how="")], None)
    assert (report.code, report.ranks) == (message["code"], (0,))
    error = Raised(message["type"], message["message"], (), "")
    assert classify.meaning(error) is classify.Meaning.OWN
    assert classify.about_devices(error) == (name != "forked")


STRANGER = Process(4711, int(70.1 * GIB), "python other.py --gpu 2", 4711)
SITUATIONS: dict[str, tuple[list[RankEvidence], Found]] = {
    "more-ranks-than-gpus": ([rank(0), rank(1, "ordinal")], found(gpus(1))),
    "torch-without-cuda": ([rank(0, "not-compiled")], found(gpus(4), build=Build("2.13.0+cpu"))),
    "nccl-and-no-gpu": ([rank(0, "nccl-without-gpus")], found(Look())),
    "visible-is-empty": ([rank(0, "no-gpus")], found(gpus(4), "")),
    "visible-is-wrong": ([rank(0), rank(1, "ordinal")], found(gpus(4), "2,7,1")),
    "driver-too-old": ([rank(0, "too-old")], found(gpus(2, driver="470.82.01", cuda="11.4"))),
    "driver-does-not-answer": (
        [rank(0, "unknown")],
        found(
            Look((Device(),), "550.54.14", "12", problem="the driver gave no answer within 1.5 s")
        ),
    ),
    "gpu-taken": ([rank(0), rank(1, "busy-newer")], found(gpus(4, processes={1: STRANGER}))),
    "no-memory-because-of-a-stranger": (
        [rank(0), rank(1, "memory")],
        found(gpus(4, processes={2: STRANGER})),
    ),
    "shared-by-choice": (
        [rank(0, how="chosen", device=0), rank(1, how="chosen", device=0)],
        found(gpus(4)),
    ),
    "shared-for-lack-of-gpus": (
        [rank(0, how="given", device=0), rank(1, how="short", device=0)],
        found(gpus(1)),
    ),
    "shared-and-nccl-was-faster": (
        [rank(0, "duplicate", how="given", device=0), rank(1, "duplicate", how="used", device=0)],
        found(gpus(4)),
    ),
    "forked-with-cuda-up": (
        [rank(0, "forked", cuda_forks=(("train.py:30", "train.py:12"),)), rank(1)],
        found(gpus(4)),
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_whole_report(name: str) -> None:
    ranks, devices = SITUATIONS[name]
    text = render.text((told(ranks, devices),), color=False)
    story = STORIES / f"{name}.txt"
    if os.environ.get("UPDATE_STORIES"):
        story.write_text(text, encoding="utf-8")
    assert text == story.read_text(encoding="utf-8")


def test_there_is_no_story_without_its_situation() -> None:
    assert {path.stem for path in STORIES.iterdir()} == set(SITUATIONS)


def test_who_shares_a_gpu() -> None:
    def meetings(*devices: str, backend: str = "nccl", size: int = -1) -> list[tuple[int, Meeting]]:
        return [
            (number, Meeting("env://", world_size=size, backend=backend, device=one))
            for number, one in enumerate(devices)
        ]

    assert devices_shared(meetings("GPU-1", "GPU-2", "GPU-1", "GPU-3", "GPU-3"), 5) == (0, 2, 3, 4)
    assert devices_shared(meetings("GPU-1", "GPU-2"), 2) == ()
    assert devices_shared(meetings("", ""), 2) == ()  # their backend needs none
    assert devices_shared(meetings("GPU-1", "GPU-1", backend="cpu:gloo,cuda:nccl"), 2) == (0, 1)
    assert (
        devices_shared(meetings("GPU-1", "GPU-1", backend="cuda:gloo"), 2) == ()
    )  # gloo does not mind
    assert devices_shared(meetings("GPU-1", "GPU-1", size=1), 2) == ()  # a group of each one's own


def test_a_cause_of_its_own_goes_before_a_shared_gpu() -> None:
    ranks = [rank(0, how="given", device=0), rank(1, "not-compiled", how="used", device=0)]
    assert told(ranks, found(gpus(2))).code == "device-missing"
