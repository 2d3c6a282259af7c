"""Ranks that are not at fault, and what became of them, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.diagnosis import classify, tracebacks
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes.wording import named
from rallypoint.diagnosis.evidence import JobEvidence
from rallypoint.diagnosis.rank_kinds import SAME_MOMENT, Kind, Verdict, kind_of, moment


def then_told(
    job: JobEvidence,
    verdicts: list[Verdict],
    at_fault: list[Verdict],
    certain: Iterable[Kind],
    *,
    acquit: bool = True,
) -> str:
    """Return what became of the ranks that are not at fault, in a sentence. `acquit`: and that they
    are not.
    """
    blamed = {verdict.rank.rank for verdict in at_fault}
    # The sys.exit of these was seen, too, at the same line; what exit code it would have given is
    # not known.
    lines = {verdict.rank.left_at for verdict in at_fault} - {""}
    first = min(map(moment, at_fault), default=0.0) + SAME_MOMENT + job.clock_error
    others: dict[str, list[int]] = {}  # by what became of them
    for verdict in verdicts:
        rank, kind = verdict.rank, verdict.kind
        if rank.rank in blamed or (not at_fault and kind in certain):
            continue
        became = _BECAME.get(kind, "")
        if kind is Kind.DOUBTFUL and verdict.error is not None and verdict.error.code:
            became = classify.AFTER_ANOTHER[verdict.error.code]
        elif kind is Kind.LOST and (own := rank.raised) and kind_of(own) is Kind.RAISED:
            # It had caught the loss, and did not raise this from it.
            became += "" if tracebacks.wrapped(own) else f"{_RAISED}{named(own)}"
        elif kind in (Kind.STOPPED, Kind.ALIVE):
            became = "were stopped"
            if kind is Kind.ALIVE and job.on_failure == "continue":
                became = "go on"
            elif rank.left_at in lines:
                became = _LEAVING
        elif kind in (Kind.FINISHED, Kind.SWALLOWED):
            became += cases.went_home(job, rank)
        elif kind in _PERHAPS_FOR_IT and not 0 < moment(verdict) < first:
            became += _FOR_IT
        if became:
            others.setdefault(became, []).append(rank.rank)
    innocent = [
        *(_BECAME[kind] for kind in (Kind.LOST, Kind.WAITED, Kind.TOLD)),
        *_OF_STORE,
        "were stopped",
    ]
    rest = [_BECAME[kind] + why for kind in _PERHAPS_FOR_IT for why in ("", _FOR_IT)]
    count = sum(len(others.get(words, ())) for words in innocent)
    acquitted = "it is not at fault" if count == 1 else "they are not at fault"
    told = [_sentence(job, others[words], words) for words in innocent if words in others]
    if count and acquit:
        told.append(acquitted)
    later = [words for words in others if _RAISED in words]
    homes = [caught + home for caught in ("", _BECAME[Kind.SWALLOWED]) for home in cases.HOME]
    for words in (*later, "go on", _LEAVING, *rest, *homes):
        if words in others:
            told.append(_sentence(job, others[words], words))
    if job.log is not None and "were stopped" not in others:
        # DeepSpeed lists those that failed among them
        number = len(set(job.log.stopped)) - len(blamed) * any(
            s.end.by == "DeepSpeed" for s in job.log.sightings
        )
        if number > 0:
            told.append(f"the launcher stopped {number} other{'s' * (number != 1)}")
    return "; ".join(told)


_OF_STORE = tuple(dict.fromkeys(classify.AFTER_ANOTHER.values()))
_LEAVING = "were leaving by the same sys.exit, and stopped"
_PERHAPS_FOR_IT = (Kind.EXITED, Kind.NCCL, Kind.ABORTED)
_FOR_IT = ", likely for that reason"
_RAISED = ", and then raised "

_BECAME = {
    Kind.LOST: "lost the connection to a peer",
    Kind.DOUBTFUL: "lost the connection to a peer",
    Kind.WAITED: "waited for a peer until the timeout",
    Kind.TOLD: "raised this too, as torch passes it on to every rank",
    Kind.EXITED: "exited with a code that is not 0",
    Kind.NCCL: "had an error of NCCL's",
    Kind.ABORTED: "aborted",
    Kind.SWALLOWED: "caught an error and ",
}
"""What became of a rank that is not at fault, by the evidence that it shows."""


def _sentence(job: JobEvidence, ranks: Sequence[int], words: str) -> str:
    if len(ranks) == 1:
        words = words.replace("were ", "was ", 1).replace("go on", "goes on")
    known = [rank for rank in ranks if rank >= 0]
    names = [cases.placed(job, known)] if known else []
    names += ["a process that the log does not name"] if -1 in ranks else []
    return f"{' and '.join(names)} {words}"
