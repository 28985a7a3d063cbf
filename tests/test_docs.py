"""The documents say what the program does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from launching import ROOT, hvdtrain, launch

from hvdtrain.data.hdf.writer import HDFWriter

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
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
    text = (ROOT / "README.md").read_text()
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(re.findall(r"\(docs/([\w.]+)\)", text))


def test_the_readme_shows_the_smallest_config_and_fits_on_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) == [SMALLEST.read_text()]
    assert len(text.splitlines()) <= 125


def test_the_smallest_config_learns_the_same_on_one_and_two_ranks(tmp_path: Path) -> None:
    """As README says it does; here on words of a few letters that repeat."""
    config = tmp_path / "smallest.py"
    shutil.copyfile(SMALLEST, config)
    words = [numpy.arange(length, dtype=numpy.int32) % 5 + 1 for length in range(4, 12)] * 100
    for part, number in (("train", 800), ("dev", 80)):
        with HDFWriter(tmp_path / f"{part}.hdf", dims={"data": 27}) as writer:
            for index, letters in enumerate(words[:number]):
                writer.add(f"{part}-{index}", {"data": letters})
    scores = {}
    for ranks in (1, 2):
        overrides = {
            "train.files": tmp_path / "train.hdf",
            "dev.files": tmp_path / "dev.hdf",
            "max_seqs_total": 40,
            "model": tmp_path / str(ranks) / "model",
            "use_horovod": ranks > 1,
        }
        finished = hvdtrain(config, overrides, ranks if ranks > 1 else None)
        assert finished.status == 0, finished.err
        scores[ranks] = [json.loads(line)["scores"] for line in (tmp_path / str(ranks) / "scores.jsonl").read_text().splitlines()]
    assert scores[1][-1]["dev_loss_ce"] < 0.5 * numpy.log(27)
    assert scores[2] == [pytest.approx(epoch, rel=1e-4) for epoch in scores[1]]


def test_version_and_help() -> None:
    assert launch(["-m", "hvdtrain", "--version"]).out.startswith("hvdtrain 0.")
    finished = launch(["-m", "hvdtrain"])
    assert finished.status == 2
    assert "usage: python -m hvdtrain CONFIG" in finished.out
