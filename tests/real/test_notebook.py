"""`launch` in a notebook: the example, run for real; and the kernel's interrupt."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .job import GLOO, SLOW_TORCH

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
jupyter_client: Any = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
Config: Any = pytest.importorskip("traitlets.config").Config

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
DEADLINE = 100.0  # seconds for a cell; the slowest imports torch twice


def by_files(folder: Path) -> dict[str, str]:
    """Where a kernel is reached. Its ports are free when they are chosen; another test may have one
    a second later, when the kernel binds it.
    """
    return {"transport": "ipc", "ip": str(folder / "kernel")}


def said(cell: Any) -> str:
    """All that stands below a cell, one output after the other."""
    parts = []
    for output in cell.outputs:
        text = (
            output.get("text")
            or output.get("data", {}).get("text/plain")
            or "\n".join(output.get("traceback", ()))
        )
        parts.append(text if text.endswith("\n") else f"{text}\n")
    return GLOO.sub("", SLOW_TORCH.sub("", "".join(parts)))


@pytest.mark.usefixtures("torch_in_parts")
def test_the_example(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(
        notebook,
        timeout=DEADLINE,
        kernel_name="python3",
        config=Config({"KernelManager": by_files(tmp_path)}),
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    hello, summed, counted, device, failed, caught, late = (said(cell) for cell in cells)
    assert hello == "['hello from rank 0', 'hello from rank 1']\n"
    assert sorted(summed.splitlines()) == [
        *(f"[{rank}] the sum is 60.0" for rank in range(3)),
        "[60.0, 60.0, 60.0]",
    ]
    assert counted == "400\n"
    assert device == "[3.0, 3.0]\n"
    assert "error[rank-raised]: rank 1 raised ZeroDivisionError: division by zero" in failed
    assert "return 1 / (rank - 1)" in failed, "the rank knows the cell's text"
    assert caught == "(1,)\n"
    assert "sleep had returned in 0 of 2 ranks when its 1 s were over" in late
    assert all(
        cell.outputs == [] for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"
    ), "it is kept without outputs"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    manager = jupyter_client.manager.KernelManager(kernel_name="python3", **by_files(tmp_path))
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.usefixtures("without_torch")
def test_an_interrupt_stops_the_ranks_and_the_next_cell_works(kernel: tuple[Any, Any]) -> None:
    manager, client = kernel
    asked = client.execute(
        "import os, time, rallypoint\n"
        "def work():\n"
        "    print('pid', os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "rallypoint.launch(work, nproc=2)",
        stop_on_error=False,  # a kernel drops what it is asked a moment after an error otherwise
    )
    text = ""
    pidfds: list[int] = []
    while len(pidfds) < 2:
        message = client.get_iopub_msg(timeout=DEADLINE)
        assert message["msg_type"] != "error", message["content"]
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
            pidfds = (
                [os.pidfd_open(int(pid)) for pid in re.findall(r"pid (\d+)\n", text)]
                if text.count("pid") == 2
                else []
            )
    manager.interrupt_kernel()
    while (message := client.get_shell_msg(timeout=DEADLINE))["parent_header"]["msg_id"] != asked:
        continue  # a late answer to what was asked while the kernel came up
    reply = message["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    assert len(poll.poll(1000)) == 2, "the ranks are gone when the cell has ended"
    for fd in pidfds:
        os.close(fd)
    while "in work" not in text:
        message = client.get_iopub_msg(timeout=DEADLINE)
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
    assert "the job was stopped by Ctrl-C" in text

    answer = client.execute_interactive(
        "assert rallypoint.launch(lambda: 7, nproc=2) == [7, 7]", timeout=DEADLINE
    )
    assert answer["content"]["status"] == "ok"


@pytest.mark.usefixtures("without_torch")
def test_nothing_outlives_the_kernel(kernel: tuple[Any, Any], tmp_path: Path) -> None:
    manager, client = kernel
    reply = client.execute_interactive(
        "import os, rallypoint\nagent = rallypoint.launch(os.getppid)[0]\nopen('template', 'w').write(str(agent))",
        timeout=DEADLINE,
    )
    assert reply["content"]["status"] == "ok", reply
    template = os.pidfd_open(int((tmp_path / "template").read_text()))
    manager.shutdown_kernel(now=True)
    poll = select.poll()
    poll.register(template, select.POLLIN)
    assert poll.poll(20_000), "the template lives on"
    os.close(template)


@pytest.mark.usefixtures("without_torch")
def test_places_are_named_by_cell(kernel: tuple[Any, Any]) -> None:
    """A report said /tmp/ipykernel_24594/221512147.py:2, which nobody can open, and so did a
    warning of a rank's.
    """
    _, client = kernel
    client.execute_interactive(
        "def fails():\n    import warnings\n    warnings.warn('beware')\n    1 / 0",
        timeout=DEADLINE,
    )
    text: list[str] = []

    def hear(message: Any) -> None:
        content = message["content"]
        text.append(content.get("text", "") + content.get("evalue", ""))

    client.execute_interactive(
        "import rallypoint; rallypoint.launch(fails, nproc=2)", timeout=DEADLINE, output_hook=hear
    )
    said = "".join(text)
    assert re.search(r"where +Cell In\[\d+\]:4 in fails\b", said), said
    assert re.search(r"^\[\d\] Cell In\[\d+\]:3: UserWarning: beware$", said, re.MULTILINE), said
    assert 'File "Cell In[' in said
    assert not re.search("ipykernel_.*in fails", said), (
        "what IPython itself says of this process's frames is its own affair"
    )
