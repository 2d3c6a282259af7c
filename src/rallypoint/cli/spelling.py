"""Which of some words was meant by one that is none of them."""

from __future__ import annotations

from collections.abc import Iterable

ALIKE = 0.7
"""How alike two names must be, by difflib's measure: a letter left out, doubled or swapped leaves 0.8 and more, and `config-file` has 0.67
in common with `on-failure`."""


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that is most like it; "" when none is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=ALIKE)), "")
