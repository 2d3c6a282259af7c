"""What all ranks import of torch, the next start imports once: for scripts, for `launch`, and never
to the program's harm.

The parts of torch here are made up, so that a test takes no seconds: a finder puts them into torch
for the template and the ranks alike.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.launcher.preload_parts import LEAST

from .conftest import Write
from .job import RALLYPOINT, Result, environment, left_behind, run_job

pytestmark = pytest.mark.usefixtures("without_torch")

FINDER = """
import importlib.util, os, sys
class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        file = os.path.join(os.path.dirname(__file__), name + ".py")
        if name.startswith(("torch.late_", "torch._dynamo")) and os.path.exists(file):
            return importlib.util.spec_from_file_location(name, file)
sys.meta_path.insert(0, Finder)
"""
SLOW = "import time\ntime.sleep(0.11)\n"  # worth learning
# The program's work lies in a module of its own: the text of the script says nothing of it.
WORK = "import sys\nprint('early' if 'torch.late_part' in sys.modules else 'late', 'torch' in sys.modules)\nimport torch.late_part\n"

TIMES_IT = """\
import time
began = time.monotonic()
import torch.late_quick
print(time.monotonic() - began)
"""

Start = Callable[..., Result]


@pytest.fixture
def start(tmp_path: Path, write: Write) -> Start:
    """Start `train.py`, which imports a part of torch by way of the project, with one state for all
    starts.
    """
    write("site-packages/sitecustomize.py", FINDER)
    write("site-packages/torch.late_part.py", SLOW)
    write("project/__init__.py", "")
    write("project/work.py", WORK)
    program = write("train.py", "import project.work\n")

    def run(*options: str, **env: str) -> Result:
        paths = os.pathsep.join([str(tmp_path / "site-packages"), os.environ["PYTHONPATH"]])
        return run_job(
            ["-n", "2", *options, program],
            state=tmp_path / "state",
            env={"PYTHONPATH": paths, **env},
            fork=True,
            cwd=tmp_path,
        )

    return run


def remembered(tmp_path: Path) -> dict[str, object]:
    (file,) = (tmp_path / "state" / "rallypoint" / "learnt").iterdir()
    return dict(json.loads(file.read_text()))


def said(result: Result) -> tuple[int, set[str], str]:
    return result.rc, {line.partition("] ")[2] for line in result.lines}, result.err


def test_the_second_start_imports_once_what_all_ranks_imported(
    start: Start, tmp_path: Path
) -> None:
    """Only the script's own text was searched, so a project whose main imports another module paid
    torch._dynamo in every rank.
    """
    assert said(start()) == (0, {"late True"}, "")
    assert remembered(tmp_path)["parts"] == ["torch.late_part"]
    assert said(start()) == (0, {"early True"}, "")
    shown = start("--dry-run")
    assert re.search(r"^start .*, torch\.late_part$", shown.out, re.MULTILINE), shown.everything
    assert "torch.late_part is imported once" in shown.out


def test_it_can_be_switched_off(start: Start) -> None:
    def says_late(*option: str) -> None:
        torch = "--fresh" not in option
        assert said(start(*option)) == (0, {f"late {torch}"}, ""), option

    says_late("--preload", "none")
    says_late("--plain")
    says_late("--fresh")
    assert said(start()) == (0, {"late True"}, "")  # nothing was learnt
    says_late("--preload", "none")  # and nothing is used; by --fresh there is no template for it
    says_late("--plain")


def test_what_one_rank_imports_alone_is_not_learnt(
    start: Start, write: Write, tmp_path: Path
) -> None:
    write(
        "project/work.py",
        f"import os\nif os.environ['RANK'] == '0':\n    {SLOW.splitlines()[0]}\n    import torch.late_part\n",
    )
    assert said(start()) == (0, set(), "")
    assert not (tmp_path / "state" / "rallypoint" / "learnt").exists()


def test_a_quick_one_and_one_that_brings_another_package_are_not_learnt(
    start: Start, write: Write, tmp_path: Path
) -> None:
    """A package may read RANK when it is imported, or change the root logger: it is left to the
    ranks, or to --preload.
    """
    write("site-packages/torch.late_quick.py", "")
    write("site-packages/torch.late_guest.py", SLOW + "import guest\n")
    write("site-packages/guest.py", "")
    write("project/work.py", TIMES_IT + "import torch.late_guest\n")
    learnt = tmp_path / "state" / "rallypoint" / "learnt"
    for _ in range(5):
        code, lines, err = said(start())
        assert (code, err) == (0, "")
        if max(map(float, lines)) < LEAST:
            break
        shutil.rmtree(learnt, ignore_errors=True)  # on a busy machine it was not quick
    else:
        pytest.skip(f"the import of an empty module took {LEAST:g} s five times")
    assert not learnt.exists()


def test_one_inside_another_package_is_learnt(start: Start, write: Write, tmp_path: Path) -> None:
    write("site-packages/guest.py", "import torch.late_part\n")
    write("project/work.py", "import guest\n")
    assert start().rc == 0
    assert remembered(tmp_path)["parts"] == ["torch.late_part"]


IN_THE_TEMPLATE = "import os\nif 'RANK' not in os.environ:\n    "


SPOILS = {
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "raises": "raise RuntimeError('not here')",
    "exits": "raise SystemExit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "leaves": "os._exit(3)",
    # Its deadline comes sooner.
    "hangs": "import signal, time; assert signal.alarm(1) > 1; time.sleep(1000)",
}


def test_one_that_spoils_the_template_is_left_to_the_ranks_for_good(
    start: Start, write: Write, tmp_path: Path
) -> None:
    """The job goes on without a word, forked from another template: the user has not asked for that
    import.
    """
    assert said(start()) == (0, {"late True"}, "")
    (learnt,) = (tmp_path / "state" / "rallypoint" / "learnt").iterdir()
    before = learnt.read_bytes()
    for name, text in SPOILS.items():
        learnt.write_bytes(before)
        write("site-packages/torch.late_part.py", SLOW + IN_THE_TEMPLATE + text + "\n")
        assert said(start()) == (0, {"late True"}, ""), name
        found = remembered(tmp_path)
        assert found["parts"] == [], name
        assert list(dict(found["spoilt"])) == ["torch.late_part"], name  # type: ignore[call-overload]
    again = start("--run-dir", str(tmp_path / "again"))
    assert said(again) == (0, {"late True"}, "")
    # It was not tried again.
    assert "template-renewed" not in (tmp_path / "again" / "events.jsonl").read_text()


def test_one_that_was_removed_since_is_forgotten(
    start: Start, write: Write, tmp_path: Path
) -> None:
    start()
    (tmp_path / "site-packages" / "torch.late_part.py").unlink()
    write("project/work.py", "print('well')\n")
    assert said(start()) == (0, {"well"}, "")
    assert remembered(tmp_path)["parts"] == []


def test_a_program_that_sets_what_it_reads_keeps_it_to_itself(
    start: Start, write: Write, tmp_path: Path
) -> None:
    write("project/work.py", "import os\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\n" + WORK)
    assert said(start()) == (0, {"late True"}, "")
    assert not (tmp_path / "state" / "rallypoint" / "learnt").exists()


def test_a_program_that_sets_it_later_is_told_and_heard_the_next_time(
    start: Start, write: Write, tmp_path: Path
) -> None:
    assert said(start()) == (0, {"late True"}, "")
    write("project/work.py", "import os\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\n" + WORK)
    line = "rallypoint: project/work.py:2 sets TORCHDYNAMO_VERBOSE after torch.late_part was imported in the template: "
    assert said(start()) == (0, {"early True"}, f"{line}export it, or --preload none\n")
    assert said(start()) == (0, {"late True"}, "")


def test_what_is_left_to_the_ranks_is_not_offered_for_preload_and_a_preloaded_one_is_told(
    start: Start, write: Write, tmp_path: Path
) -> None:
    """The line said to type --preload torch._dynamo, and with it the program's variable had no
    effect, without a word.
    """
    write("site-packages/torch._dynamo.py", "import time\ntime.sleep(1.1)\n")
    write(
        "project/work.py",
        "import os\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\nimport torch._dynamo\n",
    )
    assert said(start()) == (0, set(), "")
    line = "rallypoint: project/work.py:2 sets TORCHDYNAMO_VERBOSE after torch._dynamo was imported in the template: "
    early = said(start("--preload", "torch._dynamo"))
    assert early == (0, set(), f"{line}export it, or --preload none\n")


def test_the_environment_is_as_it_was_given(start: Start, write: Write) -> None:
    """torch._dynamo sets TORCHINDUCTOR_CACHE_DIR when it is imported: a program that then gave a
    default of its own was not heard.
    """
    write(
        "site-packages/torch.late_part.py",
        SLOW
        + "import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '/torchs'\nos.environ.pop('GIVEN', None)\n",
    )
    write(
        "project/work.py",
        WORK
        + "import os\nprint(os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', '/mine'), os.environ.get('GIVEN'))\n",
    )
    assert said(start(GIVEN="yes")) == (0, {"late True", "/torchs None"}, "")
    assert said(start(GIVEN="yes")) == (0, {"early True", "/mine yes"}, "")


def test_where_nothing_can_be_kept_the_line_says_what_to_type(
    start: Start, write: Write, tmp_path: Path
) -> None:
    write("site-packages/torch.late_part.py", "import time\ntime.sleep(1.1)\n")
    write("state/rallypoint/learnt", "a file where the folder should be")
    for _ in range(2):
        result = start()
        assert result.rc == 0
        assert re.fullmatch(
            r"rallypoint: torch\.late_part was imported 2 times, [0-9.]+ s each: --preload torch\.late_part\n",
            result.err,
        ), result.everything


def test_two_jobs_of_one_program_at_once(start: Start, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(tmp_path / "site-packages"), os.environ["PYTHONPATH"]])
    env = environment(tmp_path / "state", str(tmp_path), {"PYTHONPATH": paths})
    both = [
        subprocess.Popen(
            [*RALLYPOINT, "-n", "2", "train.py"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    said_by = [job.communicate(timeout=100)[1] for job in both]  # both, before one is looked at
    assert [(job.returncode, err) for job, err in zip(both, said_by, strict=True)] == [(0, b"")] * 2
    assert left_behind(str(tmp_path)) == []
    assert remembered(tmp_path)["parts"] == ["torch.late_part"]
    assert said(start())[1] == {"early True"}


# --- launch
# --------------------------------------------------------------------------------------------------

CALLS = """
import rallypoint
def work():
    import sys
    early = 'torch.late_part' in sys.modules
    import torch.late_part
    with open('/proc/self/stat') as file:
        parent = int(file.read().rpartition(')')[2].split()[1])
    return early, parent
found = [rallypoint.launch(work, nproc=2, preload=PRELOAD) for _ in range(3)]
print(*('early' if all(early for early, _ in call) else 'late' for call in found), len({parent for call in found for _, parent in call}))
"""


def calls(tmp_path: Path, text: str = CALLS, preload: str = "()", said: str = "") -> list[str]:
    paths = os.pathsep.join([str(tmp_path / "site-packages"), os.environ["PYTHONPATH"]])
    (tmp_path / "calls.py").write_text(text.replace("PRELOAD", preload))
    env = environment(tmp_path / "state", str(tmp_path), {"PYTHONPATH": paths})
    done = subprocess.run(
        [sys.executable, "calls.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, said), done.stderr
    assert left_behind(str(tmp_path)) == []
    return done.stdout.split()


def test_the_second_call_imports_once_what_all_ranks_of_the_first_imported(
    start: Start, tmp_path: Path
) -> None:
    """Each call of a warm `launch` paid torch._dynamo in every rank as soon as its function had an
    optimizer: 1.2 s in place of 0.1.
    """
    assert calls(tmp_path) == ["late", "early", "early", "1"]  # of one template
    assert calls(tmp_path, preload="['none']") == ["late", "late", "late", "1"]
    assert calls(tmp_path) == ["early", "early", "early", "1"]  # another start of that program


@pytest.mark.parametrize(
    "text",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import ctypes; ctypes.string_at(0)",
    ],
    ids=["thread", "crashes"],  # the others are in `test_one_that_spoils_the_template_...`
)
def test_calls_go_on_when_a_part_spoils_the_template(
    start: Start, write: Write, tmp_path: Path, text: str
) -> None:
    write("site-packages/torch.late_part.py", SLOW + IN_THE_TEMPLATE + text + "\n")
    assert calls(tmp_path) == ["late", "late", "late", "2"]  # it is tried once
    assert calls(tmp_path) == ["late", "late", "late", "1"]


SETS = CALLS.replace(
    "    import torch.late_part\n",
    "    import torch.late_part, os\n    os.environ['TORCHDYNAMO_VERBOSE'] = '1'\n",
)


def test_a_call_that_sets_what_a_part_reads_is_told_and_heard_the_next_time(
    start: Start, tmp_path: Path
) -> None:
    """`launch` says nothing of variables that come too late as a rule; of these it does, since
    nobody has asked for the import.
    """
    line = "rallypoint: calls.py:7 sets TORCHDYNAMO_VERBOSE after torch.late_part was imported in the template: "
    assert calls(tmp_path, SETS, said=f"{line}export it, or preload=['none']\n") == [
        "late",
        "early",
        "late",
        "2",
    ]
    assert calls(tmp_path, SETS) == ["late", "late", "late", "1"]


ANOTHER = """
import os, rallypoint
def plain():
    import torch.late_part
def own():
    import sys
    early = 'torch.late_part' in sys.modules
    import torch.late_part
    os.environ['TORCHDYNAMO_VERBOSE'] = '1'
    return early
rallypoint.launch(plain, nproc=2)
print(*('early' if all(rallypoint.launch(own, nproc=2)) else 'late' for _ in range(2)))
"""


def test_a_function_that_sets_what_a_part_reads_gets_a_template_without_it(
    start: Start, tmp_path: Path
) -> None:
    """It was forked from a template that had imported it for another function, in every later run."""
    line = "rallypoint: calls.py:9 sets TORCHDYNAMO_VERBOSE after torch.late_part was imported in the template: "
    told = f"{line}export it, or preload=['none']\n"
    assert calls(tmp_path, ANOTHER, said=told) == ["early", "late"]
    for _ in range(2):
        assert calls(tmp_path, ANOTHER) == ["late", "late"]


TWO = """
import rallypoint
def plain():
    import sys
    return 'torch.late_part' in sys.modules
def work():
    import sys
    early = 'torch.late_part' in sys.modules
    import torch.late_part
    return early
print(*('early' if all(rallypoint.launch(fn, nproc=2)) else 'late' for fn in (plain, work)))
"""


def test_a_function_that_imports_nothing_does_not_wait_for_what_another_does(
    start: Start, tmp_path: Path
) -> None:
    for found in ("late", "early"):
        assert calls(tmp_path, TWO) == ["late", found]
