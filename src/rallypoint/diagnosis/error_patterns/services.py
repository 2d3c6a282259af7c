"""Words of batch systems, container services and the kernel about a process or a job that they
ended.
"""

from __future__ import annotations

from rallypoint.diagnosis.error_patterns.known_line import SERVICE, line
from rallypoint.diagnosis.log_events import Sign

# What a library starts, and no rank is.
_TOOLS = r"(?:gcc|g\+\+|cc|c\+\+|clang|nvcc|hipcc|ninja|make|cmake|git|ldconfig|nvidia-smi)"

LINES = (
    line(
        "low on resource: memory",
        r"The node was low on resource: memory",
        Sign.KILLED_FOR_MEMORY,
        "the kubelet",
    ),
    line("TERM_", r"^TERM_(?:MEMLIMIT|SWAP): job killed", Sign.KILLED_FOR_MEMORY, "LSF"),
    *(
        line(
            word,  # HTCondor, Moab, YARN, Dask
            r"\b(?:[Jj]ob|[Cc]ontainer|[Ww]orker|[Tt]ask|[Pp]od)\b(?: [\w.]+){0,9}? "
            r"(?:over|hold(?: by \w+)? due to|(?<!may have )exceed(?:ed|ing|s))(?: [\w%]+){0,2}? (?:memory|MEM)\b"
            r"(?: \w+){0,2}? (?:limits?|budget|usage)\b",
            Sign.KILLED_FOR_MEMORY,
            SERVICE,
        )
        for word in (" memory ", " MEM ")
    ),
    line(
        " exceed",
        r"(?:^|[$#] )(?:=>> PBS: job killed: \w*mem \S+ exceed|Job exceeded a memory resource limit)",
        Sign.KILLED_FOR_MEMORY,
        "PBS",
    ),
    line(
        "ut of memory",
        r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)|Memory cgroup out of memory: Kill(?:ed)? process \d+",
        Sign.KILLED_FOR_MEMORY,
        "the kernel",
    ),
    line(
        "emory ",
        r"exceeds the memory usage threshold.{0,40} Ray killed this worker"
        r"|Memory on the node \(IP: [^)]{1,120}\) (?:where|was) ",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    line(
        "memory pressure",
        r"(?<!\b0 Workers \(tasks / actors\) )killed due to memory pressure \(OOM\)",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    line(
        "low on memory",
        r"\bWorker exit detail: Task was killed due to the node running low on memory",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    line(
        "out-of-memory",
        r"\bThe replica [\w-]+(?: \d+)? ran out-of-memory and exited",
        Sign.KILLED_FOR_MEMORY,
        "the kernel",
    ),
    line("OOMKilled", r"\bOOMKilled\b(?!\W{1,3}false)", Sign.KILLED_FOR_MEMORY, "the kernel"),
    line(  # torch's own tests
        "xi",
        r"\bProcess(?:es|(?= \d+ .{1,40} and exception:)) (?P<ranks>\d+) exited with error code (?P<code>-?\d+)"
        r"|\bExpected zero exit code but got (?P<got>-?\d+)",
        by=SERVICE,
        first=True,
    ),
    line(
        "ed with ",  # whoever ran it; SkyPilot ends the other nodes with 137
        r"(?:^ERROR: Job \w+ failed with return code list: \[(?:(?:0|137),? )*(?<=[\[ ])"
        # of docker compose's containers another one may be meant
        rf"|^(?!\S{{1,200}} exited with code (?!137$)|.{{0,1000}}(?:(?:'|\b(?:ssh|pip|Command|{_TOOLS})) (?:exited|failed)|\bretried\b))"
        r".{0,1000}? (?:(?:exited|terminated) with (?:an? )?(?:non-zero |error )?(?:exit |return )?(?:code|status)"
        r"|(?:failed|completed)(?: normally)? with (?:an? )?(?:non-zero )?(?:(?:exit|return) (?:code|status)|SystemExit))"
        r"(?: of)?[ :=(]{1,3})(?P<code>-?[1-9]\d*)\b",
        by=SERVICE,
        first=True,
    ),
    line(
        "ignal",  # PALS, Dask, Celery, GPUStack
        r"(?:\b[Rr]ank (?P<rank>\d+) )?\b(?<!be )(?:died|killed|exited|terminated)(?: \(code: \d+,)?(?: \w+)? '?signal:? ?(?P<signal>\d+)\b",
        by=SERVICE,
        first=True,
    ),
    line(
        "SIG",  # Airflow, supervisord
        r"(?:\breturn code Negsignal\.|\bsignal_name=\"|\(terminated by )(?P<name>SIG\w+)",
        by=SERVICE,
        first=True,
    ),
    line(
        "xit",  # a field: SageMaker, kubectl, docker inspect, YARN, Grid Engine
        r"(?:AlgorithmError: |^\s{0,40})[\"']?(?:\w{0,40}[Ee]xit ?(?:[Cc]ode|[Ss]tatus)|exit_status)[\"']?"
        r"(?: ?[:=] ?| ) *(?P<code>(?:-(?=(?:[4-9]|1[0-5]),?$))?[1-9]\d*),?$",
        by=SERVICE,
        first=True,
    ),
    line(
        " exceeded ",  # the second and the third by mail
        r"(?:^|[$#] )(?:=>> PBS: job killed: walltime \d+ exceeded limit|Job exceeded its (?:walltime|cpu time) limit\."
        r"|MOAB_INFO: +job exceeded wallclock limit)|^salloc: Job \d+ has exceeded its time limit\b",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    line(
        "TERM_",
        r"^TERM_(?:RUNLIMIT|CPULIMIT|DEADLINE|WINDOW): job killed after ",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    line(  # Ray, PBS
        "ode ",
        r"\bbecause its node has died\.|\bThe node with .{1,400} marked dead because the \w+ has missed"
        r"|^job preempted \(node failure\)",
        Sign.INTERRUPTED,
        "A NODE",
    ),
    *(
        line(
            word,  # SkyPilot; the runners of GitHub
            r"\b[Tt]he (?:job|cluster|instance|node) (?:is|was) preempted\."
            r"|\bThe runner has received a shutdown signal\.",
            Sign.INTERRUPTED,
            SERVICE,
        )
        for word in (" preempted.", "shutdown signal")
    ),
    line(  # LSF, for a reason that is no limit
        "TERM_",
        r"^TERM_(?:FORCE_|REQUEUE_)?(?:OWNER|ADMIN|PREEMPT|LOAD|CHKPNT|OTHER): [Jj]ob killed",
        Sign.INTERRUPTED,
        SERVICE,
    ),
)
