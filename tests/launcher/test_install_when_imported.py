"""What a fresh interpreter does to torch, and when: with a small package in torch's place, whose
parts cannot be imported too early.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# AttributeError while torch is being imported, as in torch's own parts
NEEDS_ALL_OF_TORCH = "import torch\nassert torch.whole\n"
PARTS = {
    "autograd": NEEDS_ALL_OF_TORCH + "def backward(tensors): pass\n",
    "cuda": NEEDS_ALL_OF_TORCH + "def set_device(device): pass\n",
    "multiprocessing": NEEDS_ALL_OF_TORCH + "def start_processes(fn): pass\n",
    "distributed": "from torch.distributed.distributed_c10d import destroy_process_group, init_process_group\n",
    "distributed/distributed_c10d": "def init_process_group(): pass\ndef destroy_process_group(): pass\n",
}


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """torch's `__init__.py`; beside it the parts that we touch."""
    package = tmp_path / "torch"
    for name, text in PARTS.items():
        place = package / f"{name}.py" if "/" in name else package / name / "__init__.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (package / "__init__.py").write_text("whole = True\n")
    return package / "__init__.py"


def in_fresh_interpreter(torch: Path, program: str) -> str:
    """What a program prints after the lines that `worker.fresh` comes to before it."""
    lines = [
        "import sys",
        "from rallypoint.launcher.worker import torch_hooks as hooks",
        f"sys.path.insert(0, {str(torch.parent.parent)!r})",
    ]
    lines += ["hooks.install_when_imported()", program]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WRAPPED = """
import torch.distributed as dist, torch.distributed.distributed_c10d as c10d
print([hasattr(one, "__wrapped__") for one in (dist.init_process_group, c10d.init_process_group, torch.multiprocessing.start_processes)])
"""
FINDS_ALL = """
class Finder:  # as the hooks of profilers and lazy importers are: it asks all others
    def find_spec(self, name, path, target=None):
        if name.startswith("torch") and not self.asking:
            self.asking = True
            try:
                return next((found for one in sys.meta_path if one is not self and (found := one.find_spec(name, path, target))), None)
            finally:
                self.asking = False
    asking = False
sys.meta_path.insert(%d, Finder())
import torch.distributed
"""


@pytest.mark.parametrize(
    "early", [True, False], ids=["torch-imports-distributed", "the-program-imports-distributed"]
)
@pytest.mark.parametrize(
    "program",
    [
        "import torch, torch.distributed",
        "from torch.distributed import init_process_group; import torch",
        "import importlib.util; assert importlib.util.find_spec('torch'); import torch.distributed",
        FINDS_ALL % 0,
        FINDS_ALL % 1,
    ],
    ids=["plainly", "by-a-part", "looked-for-before", "finder-before-ours", "finder-after-ours"],
)
def test_torch_is_left_alone_until_it_is_imported(torch: Path, program: str, early: bool) -> None:
    """torch 2.15 imports torch.distributed while it is being imported. With that we imported
    torch.multiprocessing, which needs all of torch: every rank of `--fresh` failed at `import
    torch`."""
    torch.write_text(("import torch.distributed\n" if early else "") + "whole = True\n")
    assert in_fresh_interpreter(torch, f"{program}\n{WRAPPED}") == "[True, True, True]"


def test_an_import_that_failed_is_tried_again(torch: Path) -> None:
    """The first attempt took our place among the finders away, so that nothing was seen of the
    program that tried again.
    """
    torch.write_text(
        "import os\nif 'AGAIN' not in os.environ: raise ImportError('libcudart')\nimport torch.distributed\nwhole = True\n"
    )
    program = "try:\n    import torch\nexcept ImportError:\n    import os\n    os.environ['AGAIN'] = '1'\n    import torch.distributed"
    assert in_fresh_interpreter(torch, f"{program}\n{WRAPPED}") == "[True, True, True]"


@pytest.mark.parametrize("program", ["import torch", "import torch.distributed"])
def test_a_torch_without_distributed_is_no_trouble(torch: Path, program: str) -> None:
    (torch.parent / "distributed" / "__init__.py").write_text("")
    assert (
        in_fresh_interpreter(
            torch, f"{program}\nprint(torch.whole, 'torch.multiprocessing' in sys.modules)"
        )
        == "True False"
    )


def test_a_torch_that_was_there_before(torch: Path) -> None:
    """A `.pth` file or sitecustomize may have imported it."""
    program = "import torch\nprint(hasattr(torch.distributed.init_process_group, '__wrapped__'))"
    torch.write_text("import torch.distributed\nwhole = True\n")
    lines = f"import sys; sys.path.insert(0, {str(torch.parent.parent)!r})\nimport torch\nfrom rallypoint.launcher.worker import torch_hooks as hooks"
    done = subprocess.run(
        [sys.executable, "-c", f"{lines}\nhooks.install_when_imported()\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_fork_while_torch_is_being_imported(torch: Path) -> None:
    """The look at CUDA before each fork of the program's met a torch.cuda of which nothing was
    there yet: Python wrote "Exception ignored in: <bound method Hooks.forking ...>" with a
    traceback."""
    (torch.parent / "cuda" / "__init__.py").write_text(
        "import os\nif not os.fork(): os._exit(0)\nos.wait()\n" + PARTS["cuda"]
    )
    torch.write_text("whole = True\nimport torch.cuda\n")
    lines = [
        "import socket, sys",
        "from rallypoint.launcher.worker.worker_hooks import Hooks",
        f"sys.path.insert(0, {str(torch.parent.parent)!r})",
    ]
    lines += [
        "seen = Hooks(socket.socketpair()[0], held='', began=0.0, single=False)",
        "import torch",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("before", ["enable", "disable"])
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_looked_for_while_torch_is_imported(
    torch: Path, before: str, fails: bool
) -> None:
    """A sixth of that import's time was the collector's."""
    torch.write_text("import gc\nprint(gc.isenabled())\n" + "1 / 0\n" * fails)
    program = f"import gc\ngc.{before}()\ntry: import torch\nexcept ZeroDivisionError: pass\nprint(gc.isenabled())"
    assert in_fresh_interpreter(torch, program).split() == ["False", str(before == "enable")]
