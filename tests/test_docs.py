"""The documents say what the program does."""

import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from launching import ROOT, hvdtrain, launch

from hvdtrain.version import __version__

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text()
SMALLEST = ROOT / "configs" / "smallest.py"


def test_the_reference_of_keys_is_up_to_date() -> None:
    page = subprocess.run([sys.executable, ROOT / "tools" / "keys_page.py"], capture_output=True, text=True, check=True)
    assert page.stdout == (ROOT / "docs" / "keys.md").read_text(), "run make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_and_make_target_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"(?:^\s*|`)make ([a-z-]+)", text, flags=re.MULTILINE):
        assert target in targets, f"make {target}"
    for path, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", text)):
        linked = document.parent / path if path else document
        assert linked.exists(), path
        assert not heading or heading in headings(linked), f"{path}#{heading}"
    for path in re.findall(r"(?<!\w/)\b((?:hvdtrain|configs|tools|tests|demos|benchmarks|docs)/[\w/.-]+\.(?:py|md|sh))\b", text):
        assert (ROOT / path).exists(), path


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, new = set[str](), set(re.findall(r"\(docs/([\w.]+)\)", README))
    while new:
        reached |= new
        texts = [(ROOT / "docs" / name).read_text() for name in new if name.endswith(".md")]
        new = {name for text in texts for name in re.findall(r"\(([\w]+\.md)(?:#[\w-]*)?\)", text)} - reached
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= reached


def test_the_readme_shows_the_smallest_config() -> None:
    assert re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) == [SMALLEST.read_text()]


def test_the_commands_of_the_readme_print_what_it_says(tmp_path: Path) -> None:
    """Of the first epoch, which is as much as a test needs."""
    shown = re.findall(
        r"^    \$ (?:mpirun -np (\d) --bind-to none )?python -m hvdtrain (\S+) (.*)((?:\n    .*)*)", README, re.MULTILINE
    )
    assert [config for _, config, *_ in shown] == ["configs/smallest.py"] * 2
    scores = {}
    for ranks, _, given, printed in shown:
        overrides = dict(re.findall(r"\+\+(\w+) (\S+)", given)) | {"num_epochs": 1}
        overrides["model"] = tmp_path / overrides["model"]
        finished = hvdtrain(SMALLEST, overrides, int(ranks) if ranks else None)
        assert finished.status == 0, finished.err
        lines = finished.out.splitlines()
        for line in printed.replace("myhost", socket.gethostname()).splitlines():
            if not re.search(r"^ *(\.\.\.|.*epoch.*)?$", line):
                assert line.strip() in lines
        scores[ranks] = json.loads((overrides["model"].parent / "scores.jsonl").read_text())["scores"]
    assert scores[""]["dev_loss_ce"] == pytest.approx(float(re.search("epoch 1 evaluation: dev: ce (.*)", README)[1]), rel=0.01)
    assert scores["2"] == pytest.approx(scores[""], rel=1e-4)


def test_version_and_help() -> None:
    assert launch(["-m", "hvdtrain", "--version"]).out == f"hvdtrain {__version__}\n"
    finished = launch(["-m", "hvdtrain"])
    assert finished.status == 2
    assert "usage: python -m hvdtrain CONFIG" in finished.out


def test_every_test_that_the_page_of_checks_names_exists() -> None:
    """docs/trust.md makes no claim that no test holds."""
    table, *rest = (ROOT / "docs" / "trust.md").read_text().split("## What it cannot see")
    assert len(rest) == 1
    assert "\n|" not in rest[0], "a row outside of the table"
    rows = re.findall(r"^\|(?!--)(.*)\|$", table, flags=re.MULTILINE)[1:]
    assert len(set(rows)) == len(rows), "a row twice"
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert len(rows) > 3
    for row in rows:
        *_, tests = row.split("|")
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, row
        assert set(named) <= defined, f"{set(named) - defined} in {row}"


def test_the_page_about_installing_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| ((?:`[a-z]+`(?:, )?)+) \|", (ROOT / "docs" / "installing.md").read_text(), flags=re.MULTILINE)
    assert sorted(re.findall(r"`([a-z]+)`", "".join(rows))) == sorted(project["optional-dependencies"])


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    code = [path for folder in ("hvdtrain", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in (*DOCUMENTS, *code) if re.search(r"""install\s+["'\\]*hvdtrain\[""", path.read_text())]
    assert found == []  # hvdtrain is not on PyPI; `pip install "hvdtrain-1.0.0-py3-none-any.whl[hdf]"` names a file
