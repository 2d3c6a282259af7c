from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.store.limits import SHARE, limits, memory, size


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5G", 3 << 29),
        ("500MB", 500_000_000),
        ("500mib", 500 << 20),
        ("64k", 65536),
        ("7", 7),
        ("7b", 7),
        ("1TiB", 1 << 40),
        (12345, 12345),
    ],
)
def test_sizes(text: int | str, meant: int) -> None:
    assert size(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1e9",
        "2 parsecs",
        "2GiBB",
        "1,5G",
        "0x10",
        "1..5G",
        "²",
        -1,
        True,
        None,
        1.5,
    ],
)
def test_what_is_no_size(text: int | str) -> None:
    with pytest.raises(UsageError, match="is not a size in bytes"):
        size(text)


@given(st.text())
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert size(text) >= 0
    except UsageError:
        pass


def test_the_default_is_a_quarter_of_the_memory() -> None:
    assert limits().store_bytes == limits().value_bytes == memory() // SHARE
    assert limits("2MiB").store_bytes == 2 << 20


def test_a_store_that_holds_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="a store of 2 bytes") as caught:
        limits("2")
    assert caught.value.help == (("give the unit", "--max-bytes 2GiB"),)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b", {"a/b/memory.max": "5000000", "a/memory.max": "max"}, 5_000_000),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4000000"}, 4_000_000),
        ("0::/", {"memory.max": "3000000"}, 3_000_000),
        ("4:memory:/j\n0::/", {"memory/j/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ("4:memory:/j", {"memory/memory.limit_in_bytes": "1000000"}, 1_000_000),
        ("4:cpu:/j", {"cpu/j/memory.limit_in_bytes": "10"}, 0),
        ("0::/gone", {}, 0),
    ],
)
def test_the_limit_of_the_control_group(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    found = memory(str(tmp_path))
    assert found == expected if expected else found > 100_000_000
