"""A page about several trainings: which are found, the table of them, and what its script does in a browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_pages import REPORT, lines_of, shown, write_lines

from hvdtrain.plugins.report.__main__ import main
from hvdtrain.plugins.report.overview import baseline, concern, overview_of_several
from hvdtrain.plugins.report.page import checksum_of
from hvdtrain.plugins.report.plots import middles, score_figures
from hvdtrain.plugins.report.project import find_trainings, read_project
from hvdtrain.plugins.report.runs import read_runs
from hvdtrain.report.ends import append_end
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.starts import Start, append_start

RATES = {"run1": 0.1, "run2": 0.2, "run10": 0.4}


def training(folder: Path, best: float, epochs: int = 4, **keys: object) -> Path:
    """A training whose dev loss falls to `best` and rises again in the last epoch."""
    settings = {"num_epochs": ("4", "config.py"), **{name: (repr(value), "config.py") for name, value in keys.items()}}
    append_start(folder, Start([("node", "CPU")], settings, 1, 5))
    values = [best + 0.1 * abs(epochs - 1 - epoch) for epoch in range(1, epochs + 1)]
    reports = [
        replace(REPORT, epoch=number, global_step=10 * number, scores={"train_loss_ce": value - 0.5, "dev_loss_ce": value})
        for number, value in enumerate(values, start=1)
    ]
    write_lines(folder / "scores.jsonl", map(as_line, reports))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Three trainings, of which one failed; one that cannot be read; and folders without trainings."""
    folder = tmp_path / "exp"
    for name, rate in RATES.items():
        training(folder / "first" / name, 1.0 + rate, learning_rate=rate, random_seed=1)
        append_end(folder / "first" / name, "finished", "", "rank 0")
    append_end(folder / "first" / "run10", "failed", "ce = nan", "rank 0")
    training(folder / "first" / "run1" / "overfit", 0.0)
    training(folder / ".hidden" / "run", 0.0)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "scores.jsonl").write_text("damaged\n")
    return folder


def rows(text: str) -> list[list[str]]:
    """The cells of the table of trainings, as text."""
    [body] = re.findall(r"id=\"?runs\"?>.*?<tbody>(.*?)</tbody>", text, flags=re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.S) for row in re.findall(r"<tr.*?</tr>", body, flags=re.S)]
    return [[unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in row] for row in cells]


def test_trainings_below_a_folder_and_their_table(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(folder.relative_to(project)) for folder in find_trainings(project)]
    assert names == ["damaged", "first/run1", "first/run2", "first/run10"]
    assert main([str(project)]) == 0
    assert "warning: " in capsys.readouterr().err
    text = (project / "report.html").read_text()
    table = rows(text)
    assert [row[0].removesuffix(" baseline") for row in table] == ["first/run1", "first/run2", "first/run10"]
    assert [row[1] for row in table] == ["finished", "finished", "failed"]
    assert [row[2].split()[0] for row in table] == ["1.1", "1.2", "1.4"]
    assert [row[-1] for row in table] == ["0.1", "0.2", "0.4"], "the one key that differs"
    assert "<button>learning_rate</button>" in text
    assert "<button>random_seed</button>" not in text
    for expected in ("2 finished, 1 failed", "<h1>exp</h1>", "first/run10: ce = nan", "id='others'", "data-choose=key"):
        assert expected in text or expected.replace("'", "") in text, expected
    figures = shown(project / "report.html")
    scatter = figures["key against score"]["scatter"]
    assert scatter["keys"]["learning_rate"] == ["0.1", "0.2", "0.4"]
    assert scatter["scores"]["dev ce"] == pytest.approx([1.1, 1.2, 1.4])
    assert read_project([project / "first" / "run2"]).title == ""
    assert [run.name for run in read_project([project / "first" / "run1", project / "first" / "run2"]).runs] == ["run1", "run2"]


def test_the_mean_of_an_epoch_is_drawn_in_its_middle_and_a_score_that_is_no_number_is_marked(tmp_path: Path) -> None:
    folder = training(tmp_path / "run", 1.0)
    lines = lines_of(folder / "scores.jsonl")
    lines[2]["scores"]["dev_loss_ce"] = "nan"
    write_lines(folder / "scores.jsonl", lines)
    (run,) = read_runs([folder])
    train, dev = score_figures([run])[0].panels[0].curves
    assert train.x == middles(run, run.epochs)
    assert (train.x["epoch"], train.x["step"]) == ([0.5, 1.5, 2.5, 3.5], [5, 15, 25, 35])
    assert train.x["seconds"][:2] == [5.0, 15.0]
    assert dev.x["epoch"] == [1, 2, 3, 4]
    assert dev.y[2] is None
    assert dev.missing == [{"epoch": 3, "step": 30, "seconds": 30.0, "text": "nan"}]


def test_what_is_wrong_with_a_training(tmp_path: Path) -> None:
    (run,) = read_runs([training(tmp_path / "run", 1.0, epochs=12)])
    assert concern(run) is None
    waiting, slow = {"compute": 8.0, "communication": 3.2}, {"compute": 11.0, "communication": 0.2}
    epochs = [{**epoch, "seconds": [waiting, slow if epoch["epoch"] > 8 else waiting]} for epoch in run.epochs]
    assert concern(replace(run, epochs=epochs)) == "rank 1 slowed 4 of 12 epochs by 38%"
    starved = [{**epoch, "seconds": [{"compute": 7.0, "data wait": 3.0}]} for epoch in run.epochs]
    assert concern(replace(run, epochs=starved)) == "30% of the time went into waiting for data"
    stale = [{**epoch, "scores": {"dev_loss_ce": 1.0 + epoch["epoch"]}} for epoch in run.epochs]
    assert concern(replace(run, epochs=stale)) == "no better dev ce for 11 epochs (best: epoch 1)"


def test_a_training_that_diverged_is_neither_best_nor_what_others_are_compared_with(tmp_path: Path) -> None:
    folders = [training(tmp_path / name, best) for name, best in (("wild", 0.1), ("one", 1.0), ("two", 0.9))]
    write_lines(folders[0] / "scores.jsonl", [{**line, "diverged": True} for line in lines_of(folders[0] / "scores.jsonl")])
    runs = read_runs(folders)
    assert concern(runs[0]) == "diverged: dev ce 0.2 in epoch 4"
    assert baseline(runs) == 1
    assert "<b>0.9</b><span class=note>two, epoch 3, −0.1 against one</span>" in overview_of_several(runs)


def in_browser(page: Path, folder: Path, script: str, address: str = "") -> str:
    """The page as a browser has drawn it, after a script has run in it, which is added to those that the page's policy allows."""
    when = "document.querySelectorAll('.legend button').length"
    code = f"const wait = () => {{ if ({when}) {{ {script} }} else setTimeout(wait, 100); }}; wait();"
    copy = folder / "drawn.html"
    text = page.read_text().replace("script-src ", f"script-src {checksum_of(code)} ", 1)
    copy.write_text(text.replace("</body>", f"<script>{code}</script></body>"))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1400,5000", "--virtual-time-budget=20000", "--dump-dom", f"file://{copy}{address}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


CLICKS = """
const saved = [];
HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
let files = 0;
URL.createObjectURL = (blob) => {
  const number = ++files;
  blob.text().then((text) => { document.body.dataset[`csv${number}`] = text; });
  return "blob:none";
};
Plotly.downloadImage = (figure, options) => { document.body.dataset.png = `${options.filename} ${figure.data.length}`; };
document.querySelector("[data-csv=runs]").click();
document.querySelector("[data-csv=figure-score-ce]").click();
document.querySelector("[data-png=figure-score-ce]").click();
document.querySelector("th button").click();
document.querySelector(".legend [data-run='1']").click();
document.body.dataset.address = location.hash;
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_page_of_a_project_in_a_browser(project: Path, tmp_path: Path) -> None:
    assert main([str(project)]) == 0
    address = "#speed?base=first/run2&sort=2-&hide=first/run10&key=learning_rate"
    drawn = in_browser(project / "report.html", tmp_path, CLICKS, address)
    table = {row[0].removesuffix(" baseline"): row for row in rows(drawn)}
    assert [row[2].split()[-1] for row in (table["first/run1"], table["first/run10"])] == ["−0.1", "+0.2"]
    assert list(table) == ["first/run1", "first/run2", "first/run10"], "sorted again, by the first column"
    assert re.findall(r'<tr data-run="(\d)" class="off">', drawn) == ["1", "2"]
    body: dict[str, Any] = dict(re.findall(r' data-(csv\d|png|address)="([^"]*)"', re.findall("<body[^>]*>", drawn)[0]))
    lines = unescape(body["csv1"]).splitlines()
    assert lines[0].startswith("training,state,best dev ce")
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["first/run10", "failed", "1.4"],
        ["first/run2", "finished", "1.2"],
        ["first/run1", "finished", "1.1"],
    ]
    assert "ce,first/run1 dev,4,40,40,1.2" in unescape(body["csv2"]).replace("1.2000000000000002", "1.2")
    assert body["png"].startswith("score-ce ")
    assert unescape(body["address"]).startswith("#speed?hide=first%2Frun10%7Cfirst%2Frun2&base=first%2Frun2&sort=0")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_page_of_a_training_in_a_browser(tmp_path: Path) -> None:
    """Every figure is drawn, no two marks of an axis have the same text, and points beyond the range are marked."""
    folder, page = training(tmp_path / "run", 1.0), tmp_path / "page.html"
    write_lines(folder / "scores.jsonl", [{**line, "padding": {"data": 0.023}} for line in lines_of(folder / "scores.jsonl")])
    steps = [
        {"epoch": epoch, "step": step, "progress": step / 10, "elapsed": float(step), "scores": {"ce": 40.0 if step < 3 else 1.0}}
        for epoch in (1, 2)
        for step in range(1, 11)
        if epoch == 1 or step > 2
    ]
    write_lines(folder / "steps.jsonl", steps)
    assert main([str(folder), "--out", str(page)]) == 0
    click = "const note = document.querySelector('.beyond'); document.body.dataset.before = note.textContent; note.click();"
    click += "dispatchEvent(new Event('beforeprint')); document.body.dataset.widths = "
    click += "[...document.querySelectorAll('.main-svg')].map(one => Math.floor(one.getAttribute('width')));"
    drawn = in_browser(page, tmp_path, click)
    assert drawn.count('class="main-svg"') >= len(shown(page)) > 3
    widths = set(re.findall(r'data-widths="([^"]*)"', drawn)[0].split(","))
    assert widths == {"675"}, "as wide as paper at once: what is drawn later is not printed"
    labels = re.findall(r'<g class="ytick"><text[^>]*>([^<]+)<', drawn[drawn.index('data-figure="padding"') :])
    assert len(labels) == len(set(labels)) > 2
    assert 'data-before="▲ 2 points beyond the range, up to 40: show all"' in drawn
    assert "all points are shown: cut the range" in drawn
