"""Data for configs written for RETURNN, and an environment without the package."""

import getpass
import os
from pathlib import Path

import pytest
import torch
from launching import ROOT
from rf_words import write_words

from hvdtrain.plugins.hdf_tools.dump import main as hdf_dump

# Where RETURNN by itself keeps what it compiles; a process that runs tests has another folder for temporary files.
os.environ.setdefault("RETURNN_CACHE_DIR", f"{os.environ.get('TMPDIR', '/var/tmp')}/{getpass.getuser()}")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and weights to begin with."""
    made = tmp_path_factory.mktemp("returnn")
    for name, count in {"train": 60, "dev": 20}.items():
        source = str({"class": "Task12AXDataset", "num_seqs": count, "fixed_random_seed": count})
        assert hdf_dump([source, str(made / f"{name}.hdf")]) == 0
    write_words(made)
    torch.manual_seed(3)
    model = torch.nn.ModuleDict({"first": torch.nn.Conv1d(9, 8, 5, padding=2), "last": torch.nn.Linear(8, 2)})
    torch.save({"model": model.state_dict(), "epoch": 0, "step": 0}, made / "init.pt")
    for epoch, step in ((1, 1), (7, 70)):
        torch.save({"model": model.state_dict(), "epoch": epoch, "step": step}, made / f"trained.{epoch:03}.pt")
    return made


@pytest.fixture
def without_returnn(tmp_path: Path) -> dict[str, str]:
    """An environment in which RETURNN cannot be imported."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'returnn':\n"
        "            raise ModuleNotFoundError(f'{name} is blocked by the test', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    return {"PYTHONPATH": f"{tmp_path / 'blocked'}:{ROOT}", **ONE_THREAD}
