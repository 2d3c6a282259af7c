"""How many examples a search by hypothesis tries."""

from __future__ import annotations

from hypothesis import settings


def tries(count: int, **more: int) -> settings:
    """Return settings with so many examples for `--hypothesis-profile search`, which looks for
    others each time, and with a quarter for the suite, which tries the same each time, but 20.
    """
    usual = settings.default
    examples = max(count // 4, 20) if usual and usual.derandomize else count
    return settings(max_examples=examples, **more)  # type: ignore[arg-type]
