"""Damaged logs: they keep neither a training from going on nor a page from being made, and no text of theirs becomes HTML."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from fuzzing import cases, generator
from launching import TOY, hvdtrain

from hvdtrain.errors import DataError
from hvdtrain.plugins.report import page
from hvdtrain.plugins.report.runs import read_runs
from hvdtrain.report.json_lines import JsonLines

KEYS: dict[str, object] = {"part": "two.hdf", "max_seqs": 1, "log_interval": 60, "num_epochs": 2}

BROKEN = [
    b"\xff\xfe\n",
    b'{"epoch": Infinity}\n',
    b"[" * 100_000 + b"\n",
    b'{"epoch": 1}\n',
    b"{}\n[]\n7\nnull\n",
    b'{"epoch": "x", "scores": {}}\n',
    b'{"epoch": 1, "scores": {"train_loss_ce": {}}}\n',
    b"\x00" * 4096 + b"\n",
]

LOGS = ("scores.jsonl", "steps.jsonl", "best.json", "starts.jsonl", "summary.json")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, and in another folder three."""
    folder = tmp_path_factory.mktemp("logs")
    assert hvdtrain(TOY, {**KEYS, "corpus": corpus, "model": folder / "two" / "model"}).status == 0
    shutil.copytree(folder / "two", folder / "three")
    assert hvdtrain(TOY, {**KEYS, "corpus": corpus, "model": folder / "three" / "model", "num_epochs": 3}).status == 0
    return folder


def check_resume(corpus: Path, folder: Path, trained: Path, told: str) -> str:
    """Training continues with the same result."""
    ended = hvdtrain(TOY, {**KEYS, "corpus": corpus, "model": folder / "model", "num_epochs": 3})
    assert ended.status == 0, (told, ended.err)
    one, other = (torch.load(where / "model.003.pt", weights_only=True)["model"] for where in (folder, trained / "three"))
    assert all(torch.equal(one[name], other[name]) for name in other), told
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == 3, told
    assert json.loads((folder / "best.json").read_text())["measure"] == "train_loss_ce", told
    return ended.out


def test_a_training_goes_on_without_its_logs(corpus: Path, tmp_path: Path, trained: Path) -> None:
    for number, bad in enumerate(BROKEN):
        folder = tmp_path / str(number)
        shutil.copytree(trained / "two", folder)
        for name in ("scores.jsonl", "steps.jsonl", "best.json"):
            (folder / name).write_bytes(bad + (folder / name).read_bytes())
        before = (folder / "scores.jsonl").read_bytes()
        out = check_resume(corpus, folder, trained, str(bad[:40]))
        scores = [json.loads(line)["epoch"] for line in (folder / "scores.jsonl").read_text().splitlines()]
        assert scores == [1, 2, 3]
        if (folder / "scores.jsonl.damaged").exists():
            assert (folder / "scores.jsonl.damaged").read_bytes() == before, "nothing of it is lost"
            assert out.count(f"{folder / 'scores.jsonl'}: line 1") == 1
            assert "it is kept as scores.jsonl.damaged, and training continues" in out
    assert (tmp_path / "0" / "scores.jsonl.damaged").exists()
    assert (tmp_path / "1" / "steps.jsonl.damaged").exists()


def test_a_line_that_a_kill_left_half_written_is_nothing_to_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_bytes(b'{"epoch": 1, "scores": {}}\n{"epoch": 2, "sco')
    JsonLines(path).go_on(1, None)
    assert [one.name for one in tmp_path.iterdir()] == ["scores.jsonl"]
    assert path.read_bytes() == b'{"epoch": 1, "scores": {}}\n'


def test_models_are_not_removed_by_damaged_scores(corpus: Path, tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained / "two", tmp_path / "two")
    path = tmp_path / "two" / "scores.jsonl"
    path.write_bytes(b"\xff\n" + path.read_bytes())
    ended = hvdtrain(TOY, {**KEYS, "corpus": corpus, "model": tmp_path / "two" / "model", "task": "cleanup_old_models"})
    assert (ended.status, ended.err.count(f"{path}, line 1: expected the scores of an epoch")) == (2, 1)


def test_a_page_about_damaged_logs(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = page.page(read_runs([trained / "two"]))
    for number, bad in enumerate(BROKEN):
        folder = tmp_path / str(number) / "two"
        shutil.copytree(trained / "two", folder)
        for name in LOGS[:2] + LOGS[3:4]:
            (folder / name).write_bytes((folder / name).read_bytes() + bad)
        text = page.page(read_runs([folder]))
        if b"epoch" not in bad:
            assert len(text) == pytest.approx(len(whole), rel=0.01), "the page is as without these lines"
        assert f"warning: {folder / 'scores.jsonl'}, line 3: expected JSON" in capsys.readouterr().err
    (folder / "scores.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"scores.jsonl, line 1: expected JSON, got"):
        read_runs([folder])


def made(folder: Path) -> str:
    """The page, or '' if a file is refused by its name."""
    try:
        return page.page(read_runs([folder]))
    except DataError as error:
        if not str(error).startswith(f"{folder}/"):
            raise
        return ""


EVIL = "</script><img src=x onerror=alert(1)>"


def poisoned(value: object, numbers: random.Random) -> object:
    """The same with text in place of some of what is in it."""
    if numbers.random() < 0.2:
        return EVIL
    if isinstance(value, dict):
        return {(EVIL if numbers.random() < 0.1 else name): poisoned(one, numbers) for name, one in value.items()}
    return [poisoned(one, numbers) for one in value] if isinstance(value, list) else value


@pytest.mark.fuzz
def test_no_text_of_a_log_becomes_html(tmp_path: Path, trained: Path) -> None:
    for case in range(cases(15)):
        numbers = generator("html", case)
        folder = tmp_path / str(case)
        shutil.copytree(trained / "two", folder)
        for name in ("scores.jsonl", "steps.jsonl", "starts.jsonl"):
            lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for line in lines:
                entry = numbers.choice(list(line))
                line[entry] = EVIL if numbers.random() < 0.5 else poisoned(line[entry], numbers)
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(poisoned(summary, numbers)))
        text = made(folder)
        assert "<img" not in text, case
        assert text.count("</script>") in (0, 3), case


@pytest.mark.fuzz
def test_random_bytes_in_logs(corpus: Path, tmp_path: Path, trained: Path) -> None:
    for case in range(cases(5)):
        numbers = generator("logs", case)
        folder = tmp_path / str(case)
        shutil.copytree(trained / "two", folder)
        for name in LOGS:
            data = bytearray((folder / name).read_bytes())
            for _ in range(numbers.choice([1, 3, 20])):
                data[numbers.randrange(len(data))] = numbers.randrange(256)
            (folder / name).write_bytes(data[: numbers.choice([len(data), numbers.randrange(len(data))])])
        made(folder)
        check_resume(corpus, folder, trained, f"case {case}")


def test_the_page_runs_its_own_scripts_only(trained: Path) -> None:
    text = page.page(read_runs([trained / "two"]))
    policy = text.split('Content-Security-Policy content="')[1].split('"')[0]
    [scripts] = [part for part in policy.split("; ") if part.startswith("script-src ")]
    assert "unsafe" not in scripts
    assert scripts.count("'sha256-") == 2
    assert page.checksum_of(text.rpartition("<script>")[2].partition("</script>")[0]) in scripts
