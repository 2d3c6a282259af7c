"""An `init_method` is judged as it is written: what cannot work gets the corrected text."""

from __future__ import annotations

import pytest

from rallypoint.diagnosis import init_method


@pytest.mark.parametrize(
    ("url", "correct"),
    [
        ("file://tmp/x", "file:///tmp/x"),
        ("tcp://127.0.0.1", "tcp://127.0.0.1:29500"),
        ("tcp://127.0.0.1:99999", "tcp://127.0.0.1:29500"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:29500"),
        ("tcp://:29500", "tcp://127.0.0.1:29500"),
        ("tcp:/127.0.0.1:29501", "tcp://127.0.0.1:29501"),
        ("tcp://[::1]", "tcp://[::1]:29500"),
        ("http://node7:29500", "tcp://node7:29500"),
        ("https://node7", "tcp://node7:29500"),
        ("localhost:29500", "tcp://localhost:29500"),
        ("10.0.4.8:23456", "tcp://10.0.4.8:23456"),
        ("/shared/ddp_file", "file:///shared/ddp_file"),
        ("env", "env://"),
        ("node7", ""),
        ("file://", ""),
        ("file://./x", ""),
    ],
)
def test_an_init_method_that_cannot_work(url: str, correct: str) -> None:
    report = init_method.check(url)
    assert report is not None
    assert report.code == "init-method-invalid"
    assert url in report.headline
    if correct:
        assert report.help[0].command == f'init_method="{correct}"'
        assert init_method.check(correct) is None


@pytest.mark.parametrize(
    "url",
    [
        "env://",
        "tcp://127.0.0.1:29500",
        "tcp://[::1]:29500",
        "tcp://node7:29500?rank=0&world_size=2",
        "file:///tmp/x",
        "file:/tmp/x",
        "mine://x",
    ],
)
def test_an_init_method_that_may_work(url: str) -> None:
    assert init_method.check(url) is None
