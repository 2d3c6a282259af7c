"""Texts of torch about a failure: versions 1.x to 2.13, on Linux and Windows.

`CAUSES`: texts that only one cause leaves, by the name that `classify` has for it.
"""

from __future__ import annotations

import re

from rallypoint.diagnosis.error_patterns.known_line import line
from rallypoint.diagnosis.log_events import Sign, Speaker, of_rank
from rallypoint.diagnosis.pattern import Pattern

CUDA_UNKNOWN = r"CUDA (?:error: |failure \S{1,80} ')unknown error"
"""Words of CUDA for an error that it has no name for: of whatever call, the first one or a later."""

CAUSES = {
    "main-unguarded": Pattern(r"An attempt has been made to start a new process before the"),
    "variable-missing": Pattern(r"environment variable (\w+) expected, but not set"),
    "parameter-missing": Pattern(
        r"(?:using (?P<scheme>\w+):// rendezvous: )?\b(?P<name>rank|world[ _]size) parameter missing"
    ),
    "scheme-unknown": Pattern(r"No rendezvous handler for (\w+)://"),
    "group-twice": Pattern(r"trying to initialize the default process group twice"),
    "group-missing": Pattern(
        r"Default process group (has not been|is not) initialized", re.IGNORECASE
    ),
    "gpu-memory": Pattern(
        r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU|MPS)\b.{0,20}\bout of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|_ERROR_OUT_OF_(DEVICE_)?MEMORY"  # of the drivers of CUDA and oneAPI
        r"|^OutOfMemoryError +Traceback"  # a notebook
        r"|Cuda failure (\d+ |\S{1,80} )?'out of memory'|cuda runtime error \(2\)"
        # vLLM and SGLang, of the memory for the cache of keys and values
        r"|is less than desired GPU memory utilization|No available memory for the cache blocks"
        r"|larger than the available KV cache memory|Not enough memory\. Please try to increase --mem-",
        re.IGNORECASE,
    ),
    "shared-memory": Pattern(
        r"unable to (allocate|mmap|open|resize) shared memory|insufficient shared memory"
        r"|unable to (write to|resize) file </torch_"  # before torch 1.13
        # torch's files there, and others by their path, before the reason or behind it
        r"|(</torch_|/dev/shm/).{0,300}No space left on device|No space left on device: '/dev/shm/"
        r"|killed by signal: Bus error",
        re.IGNORECASE,
    ),
    "host-memory": Pattern(
        r"DefaultCPUAllocator: (can't allocate|not enough) memory", re.IGNORECASE
    ),
    "cuda-forked": Pattern(
        r"Cannot re-initialize CUDA in forked subprocess"
        # notebook_launcher of accelerate
        r"|has been initialized before the `notebook_launcher` could create a forked subprocess"
        r"|avoid running any instruction using `torch\.cuda`"
        r"|can't create new processes if CUDA is already initialized"
    ),
    "device-busy": Pattern(
        r"CUDA-capable device(\(s\) is/are|s are) busy or unavailable", re.IGNORECASE
    ),
    "device-missing": Pattern(
        r"invalid device ordinal|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
        r"|Found no NVIDIA driver|no attribute '_cuda_"
        r"|Distributed package doesn't have NCCL built in|no CUDA-capable device is detected"
        r"|Cannot access accelerator device when none is|FSDP needs a non-CPU accelerator|Attempting to deserialize object on "
        r"|No HIP GPUs are available|ProcessGroupNCCL is only supported with GPUs"
        r"|^Invalid device id$"  # torch.nn.DataParallel
        r"|You requested gpus?: \[[\d, ]*\](?:\s|\\n)+But your machine only has: "  # Lightning
        r"|hipErrorNoDevice\b"
        r"|Could not run 'aten::empty[\w.]*' with arguments from the '(?:CUDA|HIP)' backend"
        r"|No slot '\d+' specified on host"  # DeepSpeed
        # vLLM, Ray, and programs of people
        r"|(exceeds|larger than|greater than|more than) the (total )?number of (available )?(GPUs|devices)\b"
        r"|\b(requires?|requested|needs?) .{0,20}\d GPUs?\b.{0,9}\bbut only \d+ (GPUs? )?(are |is )?(available|found)|available GPUs [\d.]+ is less "
        # accelerate, transformers
        r"|mixed precision requires a (GPU|CUDA)\b|can only be used on CUDA (or \w+ )?devices",
        re.IGNORECASE,
    ),
    "cuda-init-failed": Pattern(
        r"CUDA unknown error|driver on your system is too old|CUDA driver initialization failed"
        r"|driver version is insufficient|nvidia-container-cli: initialization error"
        r"|CUDA (error: |failure \S{1,80} ')(initialization error|system not yet initialized"
        r"|system has unsupported display driver)"
        r"|cuda runtime error \((3|30)\)"  # before torch 1.5
        r"|Unexpected error from cudaGetDeviceCount"
        r"|Driver/library version mismatch|forward compatibility was attempted on non supported HW"
        r"|libcudart functions unavailable",
        re.IGNORECASE,
    ),
    "gpu-not-built-for": Pattern(
        r"no kernel image is available for execution|hipErrorNoBinaryForGpu"
        r"|\bdevice kernel image is invalid"
        r"|(CUDA|HIP) error: invalid device function"
    ),
    "parameters-unused": Pattern(r"Expected to have finished reduction in the prior iteration"),
    "models-differ": Pattern(
        r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while"
        r" rank (\d+) has inconsistent (\d+) params"
        r"|(?P<which>params\[\d+\]) in this process with (?P<sizes>\w+ .{0,200}?) appears not to match"
    ),
    "kernel-failed": Pattern(
        r"device-side assert triggered|an illegal (memory access|instruction) was encountered"
        r"|uncorrectable (ECC|NVLink) error (encountered|detected)|unspecified launch failure|hardware stack error"
        r"|the launch timed out and was terminated|(error|failure)\b.{0,20}\b(misaligned address"
        r"|invalid program counter)|CUDA_ERROR_(ILLEGAL|LAUNCH_(FAILED|TIMEOUT)|MISALIGNED|ASSERT|ECC_)"
        rf"|{CUDA_UNKNOWN}"
        # ROCm
        r"|(Memory access fault|HW Exception) by GPU \**node-\d+"
        r"|HSA_STATUS_ERROR_(MEMORY_(APERTURE|FAULT)|ILLEGAL|EXCEPTION)"
        # CANN, of Ascend's NPUs
        r"|there is an (exception of )?(fftsplus )?ai(core|vec|vector|cpu) error( exception)?, core id is"
        r"|The (aicore|vector core) execution is abnormal"
        r"|\.cu:\d+: .{0,300}Assertion `.{0,300}` ?failed"
        r"|cuda runtime error \((39|59|7[147]|70\d|71\d)\)",
        re.IGNORECASE,
    ),
    "calls-differ": Pattern(  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        r"Detected mismatch between collectives on ranks\. Rank (\d+) is running (?:inconsistent )?"
        r"collective: .*?OpType=(\w+)(?:.*?\bRank (\d+) is running collective: .*?OpType=(\w+))?",
        re.DOTALL,
    ),
    "loader-killed": Pattern(
        r"DataLoader worker \(pid\(?s?\)? ?(\d+)\) is killed by signal: "
        r"([A-Z][\w/ ]+?)\.?(?:$| \(|\. )",
        re.MULTILINE,
    ),
}

LOGGED = Pattern(r"^:? ?\[[EWF]\d* [^\]]*\] ")
"""What torch's logger of C++ puts before a line: the time, and a place in torch's source."""

URL_LACKS = Pattern(
    r"^Error initializing torch\.distributed using (?:tcp|file):// rendezvous: (port|path)\b"
)
LIBRARY = Pattern(r"/torch/lib/|/nvidia/\w+/lib/|(^|/)lib(torch|c10)\w*\.so|/torch/_C\.")
"""Paths of libraries that come with torch."""

SYMBOL = Pattern(r"^_Z\w*?(2at\d|3c10|5torch)|^THP|^aoti_torch")
"""Symbols that only torch's libraries have."""

WRITE_FAILED = Pattern(
    r"PytorchStreamWriter failed writing |inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+",
    re.IGNORECASE,
)
"""Words of `torch.save` where a write failed, or wrote less than it was given: for what reason, they
do not say. So does "iostream error", which others write, too.
"""

LOADER_GONE = Pattern(r"DataLoader worker \(pid\(?s?\)? ?(\d[\d, ]*)\) exited unexpectedly")
"""All that torch says when a worker of a DataLoader has ended and not by a signal."""

PRODUCER_GONE = Pattern(
    r"[Uu]nable to open shared memory object </torch_\S{1,300}>.{0,300}No such file or directory"
)
CUDA_NOT_STARTED = Pattern(
    r"(CUDA error|cuda runtime error \(3\)) ?: initialization error", re.IGNORECASE
)
NOT_AT_BARRIER = Pattern(r"\[Rank 0\]: Ranks? ([\d, ]+) failed to pass monitoredBarrier")
CAME_SHORT = Pattern(
    r"store based barrier on rank.{0,300}\(world_size=(?P<all>\d+), worker_count=(?P<came>\d+),"
    r"|waiting for\s(?:clients|workers)\. (?P<clients>\d+)/(?P<of>\d+) (?:clients|workers) joined"
)
KEYS = Pattern(r"wait timeout after \d+ ?ms, keys: (?P<keys>[^\n]+)")
OWN_KEY = Pattern(r"//\w+//|barrier_key|^/?(default_pg/)?[\d/]*$|worker_count|^init/|ncclUniqueId")
"""Keys that torch itself waits for in its store."""

LOST = Pattern(
    r"Did the remote server shutdown or crash|server has shut down too early"
    r"|Failed to recv, got 0 bytes|recvValue failed|recvVector failed|sendBytes failed"
    r"|(^|Error: )(Socket Timeout|eof \(this error originated at tensorpipe)|Stop_waiting response is expected"
    r"|reached monitoredBarrier, but received errors",
    re.IGNORECASE,
)
"""Texts of torch's own transports on a broken connection: they count wherever they occur."""

WAITED = Pattern(
    r"Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms"
    r"|The client socket has (timed out|failed to connect)"
    r"|Watchdog caught collective operation timeout|collective operation timeout"
    r"|failed to pass monitoredBarrier"
    r"|Timed out initializing process group in store based barrier|Timed out in synchronization"
    r"|Timeout waiting for key|\b(TCP|File|Hash|Prefix)Store\b.{0,300}timed? ?out",
    re.IGNORECASE,
)
"""Texts of torch's on others, or its store, that did not come within the time limit."""

LOST_IN_A_CALL = Pattern(
    r"Connection (reset|refused|closed|aborted)|Broken pipe|EOF|Interrupted system call"
    r"|Transport endpoint|socketProgress|NET/Socket|Software caused connection abort"
    r"|ncclSystemError",
    re.IGNORECASE,
)
"""Texts that others write, too: they count where a call of torch's raised them, or the type is
torch's.
"""

WAITED_IN_A_CALL = Pattern(r"tim(ed|e) ?out", re.IGNORECASE)
TYPES = ("DistNetworkError", "DistStoreError", "DistBackendError", "DistError", "C10dError")

LINES = (
    line(
        "Watchdog caught",
        # Another process's text may be torn into the words.
        r"(?:\[Rank (?P<ranks>\d+)\] )?Watchdog caught collective operat.{0,200}?timeout: "
        r"WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)"
        r"(?:, NumelIn=(?P<elements>\d+))?[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
        Sign.WATCHDOG,
    ),
    line(  # the same, broken before it
        "WorkNCCL(",
        r"^WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)(?:, NumelIn=(?P<elements>\d+))?"
        r"[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
        Sign.WATCHDOG,
    ),
    line(
        "failed to connect to",
        r"client socket has failed to connect to \S{1,300} \(errno: \d+",
        Sign.UNREACHED,
    ),
    line(
        "cannot be retrieved",
        r"network addresses of \(\S{1,300}, \d+\) cannot be retrieved \(gai error",
        Sign.UNREACHED,
    ),
    line(
        "Invalid payload size",
        r"Error processing client message: Invalid payload size\. size: \d+, max: \d+",
        Sign.TOO_LARGE,
    ),
)


def group_of(text: str) -> str:
    """Name the process group that NCCL's watchdog tells after a timeout: "0"; "" when it names
    none.
    """
    found = re.search(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>\w+))?", text)
    return (found["guid"] or found["id"]) if found is not None else ""


def speaking(text: str, speaker: Speaker) -> Speaker:
    """Name the rank that speaks, by its prefix or by what torch writes into the line; `speaker` if
    neither tells.
    """
    found = re.search(r"\[(?:PG [^\]]*?)?Rank (\d+)\]", text)
    return of_rank(int(found[1])) if found is not None and speaker.rank < 0 else speaker
