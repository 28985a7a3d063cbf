"""The documents say what the program does."""

import re
import subprocess
import sys

from launching import ROOT, launch


def test_the_reference_of_keys_is_up_to_date() -> None:
    page = subprocess.run([sys.executable, ROOT / "tools" / "keys_page.py"], capture_output=True, text=True, check=True)
    assert page.stdout == (ROOT / "docs" / "keys.md").read_text(), "run make docs"


def test_every_file_and_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert len(documents) >= 4
    for document in documents:
        text = document.read_text()
        for target in re.findall(r"^\s*make ([a-z-]+)", text, flags=re.MULTILINE):
            assert target in targets, f"{document.name}: make {target}"
        for path in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / path).exists(), f"{document.name}: {path}"
        for path in re.findall(
            r"(?<!\w/)\b((?:hvdtrain|configs|tools|tests|demos|benchmarks|docs)/[\w/.-]+\.(?:py|md|sh))\b", text
        ):
            assert (ROOT / path).exists(), f"{document.name}: {path}"


def test_version_and_help() -> None:
    assert launch(["-m", "hvdtrain", "--version"]).out.startswith("hvdtrain 0.")
    finished = launch(["-m", "hvdtrain"])
    assert finished.status == 2
    assert "usage: python -m hvdtrain CONFIG" in finished.out
