"""The recipes of docs/cookbook.md: each trains on two ranks as it is, and learns; the page shows lines that they have."""

import re
from pathlib import Path
from runpy import run_path

import pytest
import torch
from documented import example
from inside import run_inside
from launching import ROOT
from trainings import Run, Trained, assert_same, trains

import hvdtrain

FOLDER = ROOT / "configs" / "cookbook"
PAGE = (ROOT / "docs" / "cookbook.md").read_text()
ROW = re.compile(r"^\| \[(\w+)\]\(#[\w-]+\) \| .* \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
RECIPES = {name: (score, float(below)) for name, score, _, _, below in ROW.findall(PAGE)}
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "made_up")
TORCH, KERAS = Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)


def is_keras(name: str) -> bool:
    return name.startswith("keras")


@trains(slow=[TORCH, KERAS])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """All of a framework, one after the other: two of them begin with the model of another one."""
    made: dict[str, dict[str, object]] = {}
    for name in sorted(RECIPES, key=lambda name: name in ("lora", "distillation")):
        if is_keras(name) == (run == KERAS):
            made[name] = {"configs": [FOLDER / f"{name}.py"], "num_threads": 1, "lengths_dir": folder / "lengths"}
            if 'config.value("data"' in (FOLDER / f"{name}.py").read_text():
                made[name]["data"] = folder / "data"
    if run == TORCH:
        made["translation"]["count_flops"] = True
        made["lora"]["base"] = folder / "language_model" / "model.003.pt"
        made["distillation"]["teacher"] = folder / "tagging" / "model.003.pt"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_on_two_ranks(trained: Trained, name: str) -> None:
    results = trained(trainings, KERAS if is_keras(name) else TORCH)
    assert_same(results.weights(name, 0), results.weights(name, 1))
    (first, *_, last), (score, below) = results.scores(name), RECIPES[name]
    if name == "translation":
        assert all(0 < report["flops"]["share"] < 1 for report in results.reports(name))
    print(f"{name}: {score} {first[score]:.3g} {last[score]:.3g}")
    assert last[score] < below, (first, last)


@pytest.mark.slow
def test_an_exported_translator_says_what_the_model_says(trained: Trained, tmp_path: Path) -> None:
    """With the search that docs/resuming.md shows."""
    config, prefix = FOLDER / "translation.py", trained(trainings, TORCH).models["translation"]
    ended = run_inside(["export", config, "++model", prefix, "--out", tmp_path])
    assert ended.status == 0, ended.err
    source = torch.tensor([[3, 29, 22, 5]])  # three thousand forty five
    padded = torch.zeros_like(source, dtype=torch.bool)
    values = {"torch": torch, "source": source, "padded": padded}
    exec(example("resuming.md", "program = torch.export.load").replace("model.pt2", str(tmp_path / "model.pt2")), values)
    model = hvdtrain.load_model(f"{prefix}.003.pt", config)
    translated = run_path(str(config))["translate"](model, source, padded, 20)[0].tolist()
    assert values["written"][0, 1:].tolist() == translated[: translated.index(0) + 1]


def test_there_are_twelve_and_each_is_short() -> None:
    assert sorted(RECIPES) == CONFIGS
    assert len(CONFIGS) == 12
    sizes = {name: len((FOLDER / f"{name}.py").read_text().splitlines()) for name in CONFIGS}
    assert not {name: size for name, size in sizes.items() if not 30 <= size <= 80}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_shows_what_a_recipe_has(name: str) -> None:
    [section] = [text for text in PAGE.split("\n## ")[1:] if f"](../configs/cookbook/{name}.py)" in text]
    lines = [line.strip() for line in (FOLDER / f"{name}.py").read_text().splitlines()]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        place = 0
        for line in block.splitlines():
            if line.strip() not in ("...", ""):
                assert line.strip() in lines[place:], line
                place = lines.index(line.strip(), place) + 1
    assert f"configs/cookbook/{name}.py" in re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[0]


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    [shown] = [output.text for output in notebook.cells[-1].outputs if output.output_type == "stream"]
    assert shown == "3 5 7 9 -> 1 3 5\n"
    assert (tmp_path / "exp" / "notebook" / "best.json").exists()
