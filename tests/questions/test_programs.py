"""Every program of examples/questions does what its first paragraph says: it asserts that itself,
and says so in a line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import FOLDER, Program

pytestmark = pytest.mark.torch

PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))

OTHERS = "".join(
    path.read_text(encoding="utf-8")
    for path in Path(__file__).parent.glob("test_*.py")
    if path.name != Path(__file__).name
)
"""Tests that look at single programs more closely: those are not run twice."""

SAYS = {
    "A3_spawn_without_address.py": r"3 ranks met without address and port, each returned 1\.5; of a failure rank 1 is named, .* met again",
    "A4_a_producer_that_has_gone.py": r"rank 0 took a tensor whose producer is gone: \w+: .*; through a store, and as a result, .*",
    "A5_a_worker_that_finds_nobody.py": r"nobody: port-refused; no such name: address-unresolved; a web server: store-foreign; .*",
    "B1_a_fixed_port.py": r"two jobs at once met without a port; the one that wanted a taken port was told by whom it is taken",
    "B2_a_free_port.py": r"2 ranks met on a port that a squatter could not take; 1000 ports held at once were 1000 different ones",
    "B3_a_file_on_a_shared_disk.py": r"a place was refused while its job ran, taken over after that was killed, and refused at once .*",
    "B4_a_range_of_ports.py": r"a socket, a store and a job took the 3 ports of the range; none of the 3 ports A-B is free .* holds 3",
    "B5_try_again.py": r"it worked at the fourth attempt; where nobody came: tried \d+ times in \S+ s: \d+ x ConnectionRefusedError: .*",
    "B6_an_address_of_the_scripts_own.py": r"2 ranks met at the script's own port; with a port for each rank they were told at once .*",
    "B7_an_init_method_that_cannot_work.py": r"4 methods were corrected, and a file of an earlier run was refused: store-file-stale",
    "B8_a_clean_up_that_hides_the_error.py": r"(both ranks|rank \d) found nobody at 127\.0\.0\.1:\d+: nothing listens there",
    "C1_cuda_in_the_caller.py": r"2 ranks used (cpu|cuda) while their caller had it in use",
    "C2_a_device_for_each_rank.py": r"\d+ ranks added up over (gloo, each on the CPU|nccl, each on its own GPU)",
    "C3_more_ranks_than_gpus.py": r"backend='nccl' needs a GPU for each rank(, and none can be used here|: \d+ ranks, and \d+ GPUs? .*)",
    "C4_an_error_that_is_swallowed.py": r"rank 1 caught an error of set_device and left: .*",
    "C5_start_methods_and_loaders.py": r"2 ranks set the start method themselves, and read 2 batches each from a spawned worker",
    "D1_a_tensor_and_a_counter.py": r"a tensor, a counter and 6 odd tensors went through the store and came back equal",
    "D2_average_a_parameter.py": r"the mean of 3 ranks was exact on each, and that of 2 when one did not come",
    "D3_network_interruption.py": r"8 x 1250 adds around a cut of 2 s: 10000; a frozen server cost no more than the timeout",
    "D4_lock_between_processes.py": r"4 x 25 additions under the lock are 100; it outlived a killed holder; a stopped one was refused",
    "D5_size_of_the_store.py": r"20 MiB were stored; 60 MiB more were refused: store\[\"too much\"\]: 62914565 bytes do not fit: .*",
    "D6_counter_plus_one.py": r"add 1000, update 1000, plain \+= \d+, and \d+ lost updates were noticed",
    "D7_state_dict.py": r"9 tensors and an optimizer's state went over; the next losses are equal: 0\.\d+",
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OTHERS])
def test_it_does_what_it_promises(program: Program, name: str) -> None:
    said = program(name)
    if name in SAYS:
        assert re.fullmatch(SAYS[name], "\n".join(said)), said
    assert said, "it says what it found"


def test_none_is_missing() -> None:
    """The list in README.md has every program that is there, and those of SAYS are there."""
    listed = set(
        re.findall(r"\[([A-D]\d_\w+\.py)\]", (FOLDER / "README.md").read_text(encoding="utf-8"))
    )
    assert listed == set(PROGRAMS)
    assert set(SAYS) <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_says_how_to_start_it(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert re.search(
        rf"^    (python|rallypoint run .*) examples/questions/{name}\b", text, re.MULTILINE
    )
