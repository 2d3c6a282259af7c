"""Help for exceptions, and for programs that did not start, chosen by the words of the message."""

from __future__ import annotations

import errno
import re
import shlex

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.causes import children
from rallypoint.diagnosis.evidence import JobEvidence, Raised
from rallypoint.diagnosis.report import Help

PACKAGES = {
    "accelerate": "accelerate", "bs4": "beautifulsoup4", "cv2": "opencv-python", "datasets": "datasets", "dateutil": "python-dateutil",
    "deepspeed": "deepspeed", "dotenv": "python-dotenv", "einops": "einops", "faiss": "faiss-cpu", "h5py": "h5py", "hydra": "hydra-core",
    "lightning": "lightning", "matplotlib": "matplotlib", "mpi4py": "mpi4py", "numpy": "numpy", "omegaconf": "omegaconf",
    "pandas": "pandas", "PIL": "pillow", "psutil": "psutil", "pytorch_lightning": "pytorch-lightning", "safetensors": "safetensors",
    "scipy": "scipy", "skimage": "scikit-image", "sklearn": "scikit-learn", "tensorboard": "tensorboard", "tensorboardX": "tensorboardX",
    "timm": "timm", "torch": "torch", "torchaudio": "torchaudio", "torchvision": "torchvision", "tqdm": "tqdm", "transformers": "transformers",
    "wandb": "wandb", "yaml": "pyyaml",
}  # fmt: skip
"""The packages of modules that training programs import. Of a module that is not here no command is
shown: under the name of an import another package may wait (`pip install sklearn` fails on purpose,
and others are worse)."""


def _install(module: str, folder: str, python: str) -> tuple[Help, ...]:
    """Return the help for a module that was not found. `folder`: one near the program that holds
    it, "" for none; `python`: the ranks' interpreter, "" when it is not known.
    """
    name = module.partition(".")[0]
    package = PACKAGES.get(name)
    install = Help(
        "install it for the Python that the ranks run",
        f"{python or 'python'} -m pip install {package}",
    )
    if package is None:
        install = Help(
            f"find the package that has the module {name} (its name may be another), and install it for the Python of the ranks"
        )
    look = Help(
        "see which Python the ranks run, and whether it has the module",
        f"python -c 'import sys, {name}; print(sys.executable)'",
    )
    if folder:
        own = Help(
            f"{name} is in {folder}, where Python does not look for it: add that folder",
            f"export PYTHONPATH={shlex.quote(folder)}:$PYTHONPATH",
        )
        return (own, install) if package else (own,)
    return (install,) if python else (look, install)


SEE_LIMIT_OF_THREADS = Help(
    "see how many processes and threads are allowed, and how many there are",
    "ulimit -u; cat /sys/fs/cgroup/pids.max; ps -eL | wc -l",
)

_HELPS = (
    (
        r"^(can't start new thread|Resource temporarily unavailable)$",  # by Python, by C++
        (SEE_LIMIT_OF_THREADS,),
    ),
    (
        r"^context has already been set",
        (
            Help(
                "choose the start method once, below the line that is false in an import",
                'if __name__ == "__main__":',
            ),
            Help(
                "or ask for a context of its own, which changes nothing for others",
                'context = torch.multiprocessing.get_context("spawn")',
            ),
        ),
    ),
    (
        r"No backend type associated with device type cpu|Tensors must be CUDA|from the 'CPU' backend",
        (
            Help(
                "move the tensor to the rank's GPU: NCCL takes no others",
                'tensor.to(f"cuda:{local_rank}")',
            ),
            Help(
                "or open the group for both kinds", 'dist.init_process_group("cpu:gloo,cuda:nccl")'
            ),
        ),
    ),
    (
        r"No backend type associated with device type cuda",
        (
            Help(
                "open the group for both kinds of tensors",
                'dist.init_process_group("cpu:gloo,cuda:nccl")',
            ),
        ),
    ),
    (
        r"unsupported gloo device$",
        (
            Help(
                "gloo has no transport here: see whether one is named, else install a torch that has it",
                "env | grep GLOO_DEVICE_TRANSPORT",
            ),
        ),
    ),
    (
        r"Expected all tensors to be on the same device",
        (
            Help(
                "move the batch to where the model is",
                "batch = batch.to(next(model.parameters()).device)",
            ),
        ),
    ),
    (
        r"Can't pickle local object|Can't pickle <function|Can't get local object",
        (
            Help(
                "define the function at the top of a module: a new process finds it there by its name"
            ),
        ),
    ),
    (
        r"^Can't get attribute '\w+' on <module '__main__' \(",
        (
            Help(
                "put the function into a file and import it: a new process does not have what a notebook or a prompt defined"
            ),
        ),
    ),
    (
        r"^Numpy is not available$|compiled using NumPy 1\.x|_ARRAY_API not found|numpy\.core\.multiarray failed to import",
        (
            Help(
                "see which NumPy there is: this was built for another, mostly for one below 2",
                "python -c 'import numpy; print(numpy.__version__)'",
            ),
            Help(
                "then take that one, or a newer build of what needs it",
                "python -m pip install 'numpy<2'",
            ),
        ),
    ),
    (
        r"^attempted relative import with no known parent package$",
        (
            Help(
                "start the file as a module, from the folder that holds its package",
                "rallypoint run -n 2 -m package.module",
            ),
        ),
    ),
)
"""What to do where torch's or Python's words are clear and only the way out is not."""

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SCHEDULERS = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "PMI_RANK": "RANK",
    "PMI_SIZE": "WORLD_SIZE",
}


def help_for(error: Raised, job: JobEvidence) -> tuple[Help, ...]:
    """Return what to do, for the few exceptions where that is known."""
    short, key = error.type.rpartition(".")[2], error.message.strip("'\"")
    if classify.loader_gone(error.message):
        return (children.LOAD_IN_RANK,)
    if short == "ModuleNotFoundError" and (
        found := re.search(r"No module named '([\w.]+)'", error.message)
    ):
        return _install(found[1], error.module_folder, job.python)
    if short == "KeyError" and key in _SCHEDULERS:
        return (
            Help(
                "this is another launcher's variable; read the one that rallypoint and torchrun set",
                f'os.environ["{_SCHEDULERS[key]}"]',
            ),
        )
    if short == "KeyError" and key in _VARIABLES:
        return (
            Help(
                "start the program with a launcher, which sets it",
                f"rallypoint run -n 2 {job.program}",
            ),
        )
    last = error.frames[-1] if error.frames else None
    if error.errno == errno.EAGAIN and last and "fork" in (last.function + last.source):
        return (SEE_LIMIT_OF_THREADS,)
    if short == "BdbQuit":
        return (
            Help(
                "a debugger was told to quit, or its stdin was at an end (/dev/null, cron, CI): start from a terminal",
                "rallypoint run --debug-rank 0 ...",
            ),
        )
    return next((helps for pattern, helps in _HELPS if re.search(pattern, error.message)), ())


def of_no_start(file: str, words: str, number: int) -> tuple[str, Help]:
    """Return why a program did not start, and the help. `words`: the log's line about it; `number`:
    the errno.
    """
    reason = "there is no such file"
    look, command = "start from the folder that holds it, or type its whole path", f"ls -l {file}"
    by_path = "/" not in file and re.search(r"execve\(\)|execvp| not found|': No such", words)
    if by_path:
        look = "activate the environment that has it before the job starts; see whether each node has it"
        by = "srun " if "execve()" in words else "mpiexec " if "execvp" in words else ""
        command = f"{by}which {file}"
    elif re.match(r"[A-Za-z]:\\", file):
        command = f"dir {file}"
    if number == errno.ELIBACC:
        reason = f"it needs {words.rpartition('libraries: ')[2].split(':')[0]}, which is not found"
        look = "load the module, or activate the environment, that has it, and see what is still missing"
        command = f"ldd $(which {file})"
    elif number == errno.ENOEXEC:
        reason = "it is no program for this machine"
    elif file.endswith(" "):
        look = "end the line of the command with the backslash: with a space behind it, it makes an argument of that space"
        command = "grep -n '\\\\ $' SCRIPT"
    elif file.endswith("\\r"):
        look, command = "write the script's lines without the \\r of Windows", "dos2unix SCRIPT"
    elif "bad interpreter" in words or "required file" in words:
        reason = "the interpreter that its first line names is not there, or cannot be executed"
        look = "see which interpreter that line names; ^M at its end means line ends of Windows"
        command = f"head -n 1 {file} | cat -A"
    elif number == errno.EACCES:
        reason, look, command = "it is not executable", "make it executable", f"chmod +x {file}"
    return reason, Help(look, command)
