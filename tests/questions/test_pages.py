"""The pages for the four questions: titled as people ask, found from the README, and no link leads
nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TITLES = {
    "connection-refused.md": "Why do I get ConnectionRefusedError in PyTorch multiprocessing?",
    "free-port.md": "Why does DDP get stuck acquiring a free port?",
    "cuda-initialisation.md": "Why a CUDA initialisation error with init_process_group and torch.multiprocessing?",
    "tcpstore.md": "How do I use TCPStore correctly?",
}

PAGES = [*(ROOT / "docs" / "questions").glob("*.md"), ROOT / "examples" / "questions" / "README.md"]


def test_each_question_has_its_page() -> None:
    found = {
        path.name: path.read_text(encoding="utf-8").partition("\n")[0]
        for path in (ROOT / "docs" / "questions").glob("*.md")
    }
    assert found == {name: f"# {title}" for name, title in TITLES.items()}


@pytest.mark.parametrize("name", TITLES)
def test_the_readme_leads_to_it(name: str) -> None:
    assert f"(docs/questions/{name})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_link_leads_nowhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }, target
