"""Tracebacks that Rich draws in a box, and what stands below them."""

from __future__ import annotations

import pytest
from bench.log_soak import told

_BECAUSE = "The above exception was the direct cause of the following exception:"


def box(*lines: str, width: int = 80) -> str:
    """Draw a box as Rich does."""
    title = " Traceback (most recent call last) "
    rows = [f"│ {line:<{width - 4}} │" for line in lines]
    return "\n".join((f"╭{title:─^{width - 2}}╮", *rows, f"╰{'─' * (width - 2)}╯", ""))


FRAME = ("/srv/train.py:12 in main", "", "❱ 12 │   step(batch)")


def test_frames_and_a_message_that_is_broken_between_words() -> None:
    message = "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98\n- Address already in use).\n"
    report = told(box(*FRAME) + message)
    assert (report.code, report.where) == ("port-in-use", "train.py:12 in main")


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        'Traceback (most recent call last):\n  File "/srv/b.py", line 1, in <module>\n    f()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        "srun: error: gpu03: task 3: Out Of Memory\n",
    ],
)
@pytest.mark.parametrize("width", [80, 100])
def test_what_begins_below_a_long_message_is_not_part_of_it(line: str, width: int) -> None:
    text = box(*FRAME, width=width) + "KeyError: '" + "k" * (width + 10) + "'\n" + line
    assert told(text).code in ("rank-raised", "rank-out-of-memory")
    assert "OutOfMemory" not in told(text).headline


def test_a_training_goes_on_below_a_long_message() -> None:
    steps = "".join(f"step {i:5d} " + "loss 0.12 " * 11 + "\n" for i in range(3000))
    report = told(box(*FRAME, width=100) + f"ValueError: {'x ' * 60}\n" + steps)
    assert report.confidence == "possible"
    assert "step     1 " not in str(report.said), (
        "one line may be taken for the rest of the message"
    )


def test_a_syntax_error_has_its_line_in_a_second_box() -> None:
    second = f"╭{'─' * 78}╮\n│ {'x = = 1':<76} │\n│ {'    ▲':<76} │\n╰{'─' * 78}╯\n"
    report = told(box(*FRAME) + second + "SyntaxError: invalid syntax\n")
    assert report.code == "rank-raised"
    assert "SyntaxError" in report.headline


def test_a_chain_in_a_narrow_box() -> None:
    between = "\nThe above exception was the direct cause of the following \nexception:\n\n"
    text = box(*FRAME, width=60) + "KeyError: 'b'\n" + between + box(*FRAME, width=60)
    assert "ValueError" in told(f"{text}ValueError: no such size\n").headline
    wide = text.replace(between, f"\n{_BECAUSE}\n\n")
    assert "ValueError" in told(f"{wide}ValueError: no such size\n").headline


def test_rows_without_an_end() -> None:
    """A box that is cut, and a table of many rows below it."""
    rows = "".join(f"│ model.layer.{i} │ Linear │ 4096 │\n" for i in range(8000))
    cut = box(*FRAME).rpartition("╰")[0]
    assert told(f"{cut}{rows}").code == "cause-unknown"
