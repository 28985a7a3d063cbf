"""The documents say what the program does."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import blocks_of, page_text
from launching import ROOT, hvdtrain, launch

from hvdtrain.help import explanation
from hvdtrain.settings import all_keys
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
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for path, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", prose)):
        linked = document.parent / path if path else document
        assert linked.exists(), path
        assert not heading or heading in headings(linked), f"{path}#{heading}"
    for path in re.findall(r"(?<!\w/)\b((?:hvdtrain|configs|tools|tests|demos|benchmarks|docs)/[\w/.-]+\.(?:py|md|sh))\b", text):
        assert (ROOT / path).exists(), path
    folders = "|".join(path.name for path in (ROOT / "hvdtrain").iterdir() if path.is_dir())
    for path in re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+\.py)\b", text if document.name != "CHANGELOG.md" else ""):
        assert (ROOT / "hvdtrain" / path).exists(), path
    for name, path in re.findall(r"`(\w+)`\s(?:in\s|\()`([\w/]+\.py)`", text):
        named = [folder / path for folder in (ROOT, ROOT / "hvdtrain") if (folder / path).exists()]
        assert not named or re.search(rf"\b{name}\b", named[0].read_text()), f"{name} in {path}"


def test_the_page_about_the_design_lists_every_plug_in() -> None:
    section = (ROOT / "docs" / "design.md").read_text().partition("### Plug-ins\n")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| "))
    folders = {path.parent.name for path in (ROOT / "hvdtrain" / "plugins").glob("*/__init__.py")}
    assert set(re.findall(r"`(\w+)/`", table)) == folders


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them, and those that it sets itself."""
    text = document.read_text()
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


def test_every_key_is_an_anchor() -> None:
    """Once, by each of its names, and `help KEY` names it."""
    anchors = re.findall(r'<a id="([^"]+)">', (ROOT / "docs" / "keys.md").read_text())
    assert len(anchors) == len(set(anchors))
    assert {name for key in all_keys() for name in key.names} <= set(anchors)
    for word in ("max_seqs", "train.seq_ordering", "torch_distributed.backend"):
        [anchor] = set(re.findall(r"docs/keys\.md#(\S+)", explanation(word)))
        assert anchor in anchors


class Navigation(yaml.SafeLoader):
    """Reads the settings of the site without the Python objects that they name."""


Navigation.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def test_every_document_has_a_place_in_the_site() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(inner)

    settings = yaml.load((ROOT / "tools" / "site" / "mkdocs.yml").read_text(), Navigation)
    assert [next(iter(part)) for part in settings["nav"]] == ["Start", "How-to", "Reference", "Background"]
    places = sorted(pages(settings["nav"]))
    expected = [path.name for path in (ROOT / "docs").glob("*.md")] + ["index.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    assert places == sorted(expected), "tools/site/mkdocs.yml, nav"


@pytest.mark.slow
def test_the_site_has_no_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """mkdocs itself ends with an error if a link or an anchor between pages is broken."""
    pytest.importorskip("mkdocstrings")
    tools = ROOT / "tools" / "site"
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", tools / "mkdocs.yml", "--site-dir", tmp_path],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    checked = subprocess.run([sys.executable, tools / "check.py", tmp_path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    rows = {entry["location"]: entry for entry in index}
    assert rows["keys.html#max_seqs"]["title"] == "max_seqs"
    assert rows["keys.html#max_seqs"]["boost"] > rows["keys.html#max_seqs_dev"]["boost"]  # which begins with it
    assert sum(place.startswith("messages.html#message-") for place in rows) > 300
    assert len(rows) == len(index), "two places with one address: a search finds the last one only"
    for words, place in (("waits for others: was a connection lost", "troubleshooting.html"), ("mark_as_loss", "classes.html")):
        assert any(words in entry["text"] and entry["location"].startswith(place) for entry in index), words


def test_the_messages_that_troubleshooting_explains_exist() -> None:
    """Those of hvdtrain, as far as they are fixed, with a cause and a cure for each."""
    page = page_text("troubleshooting.md")
    ours = page.partition("## Messages of other programs")[0]
    sources = "\n".join(texts_of(path) for path in sorted((ROOT / "hvdtrain").rglob("*.py")))
    fixed = [part for block in blocks_of(ours) for line in block.code.splitlines() for part in line.split("…")]
    wanted = [part for part in fixed if len(part) > 8]
    assert len(wanted) > 40
    assert [part for part in wanted if part not in sources] == []
    for topic in re.split(r"^### ", page.partition("## Known problems elsewhere")[0], flags=re.MULTILINE)[1:]:
        assert re.search(r"^\*\*Cause", topic, re.MULTILINE), topic.splitlines()[0]
        assert re.search(r"^\*\*(Cure|Cause and cure)\b", topic, re.MULTILINE), topic.splitlines()[0]


def texts_of(path: Path) -> str:
    """The texts in a source file, with … for what is inserted."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        return "".join(map(text, node.values)) if isinstance(node, ast.JoinedStr) else "…"

    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(map(text, found))


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, new = set[str](), set(re.findall(r"\(docs/([\w.]+)\)", README))
    while new:
        reached |= new
        texts = [(ROOT / "docs" / name).read_text() for name in new if name.endswith(".md")]
        new = {name for text in texts for name in re.findall(r"\(([\w]+\.md)(?:#[\w-]*)?\)", text)} - reached
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= reached


def test_the_readme_shows_the_smallest_config() -> None:
    assert re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) == [SMALLEST.read_text()]


@pytest.mark.slow
def test_the_commands_of_the_readme_print_what_it_says(tmp_path: Path) -> None:
    """Of the first epoch, which is as much as a test needs."""
    shown = re.findall(
        r"^\$ (?:mpirun -np (\d) --bind-to none )?python -m hvdtrain (\S+) (.*)((?:\n(?!```).*)*)", README, re.MULTILINE
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
            if not re.search(r"^ *(\.\.\.|.*epoch.*|.* \| .*)?$", line):
                assert line.strip() in lines
        scores[ranks] = json.loads((overrides["model"].parent / "scores.jsonl").read_text())["scores"]
    assert scores[""]["dev_loss_ce"] == pytest.approx(float(re.search(r"epoch 1/3 .*dev ce (\S+)", README)[1]), rel=0.01)
    assert scores["2"] == pytest.approx(scores[""], rel=1e-4)


def test_version_and_help() -> None:
    assert launch(["-m", "hvdtrain", "--version"]).out == f"hvdtrain {__version__}\n"
    finished = launch(["-m", "hvdtrain"])
    assert finished.status == 2
    assert "usage: python -m hvdtrain CONFIG" in finished.out


def test_every_test_that_pages_name_exists() -> None:
    """docs/trust.md, and what docs/troubleshooting.md says of problems elsewhere, make no claim that no test holds."""
    problems = page_text("troubleshooting.md").partition("## Known problems elsewhere")[2]
    table, *rest = (ROOT / "docs" / "trust.md").read_text().split("## What it cannot see")
    assert len(rest) == 1
    assert "\n|" not in rest[0], "a row outside of the table"
    rows = [row for page in (table, problems) for row in re.findall(r"^\|(?!--)(.*)\|$", page, flags=re.MULTILINE)[1:]]
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
    assert found == []  # hvdtrain is not on PyPI; `pip install "hvdtrain-1.1.0-py3-none-any.whl[hdf]"` names a file
