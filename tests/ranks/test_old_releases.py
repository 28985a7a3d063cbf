"""What earlier releases left: their checkpoints give the same numbers, and their configs mean the same (docs/stability.md).

tests/releases/write.py had each release write the folder of its name in tests/releases.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from inside import nothing_changes
from launching import ROOT, hvdtrain, launch
from trainings import Run, Trained, trains

from hvdtrain.settings import read_settings
from hvdtrain.start_up.effective import print_config

RELEASES = ("0.1.0", "1.0.0", "1.1.0")
"""Those whose checkpoints and configs this version reads."""

TENSORFLOW = ("g2p_tf.py", "init_tensorflow.py")
"""Configs that import TensorFlow."""

CASES: dict[Run, dict[str, str]] = {
    Run("torch", "horovod", 1): {"adam": "with_torch.py", "safetensors": "with_torch.py"},
    Run("torch", "horovod", 2): {"averaged": "with_torch.py"},
    Run("tensorflow", "horovod", 1): {"tensorflow_adam": "with_tensorflow.py"},
    Run("tensorflow", "horovod", 2): {"tensorflow": "with_tensorflow.py"},
}

KEYS: dict[str, dict[str, object]] = {
    "safetensors": {"checkpoint_format": "safetensors"},
    "averaged": {
        "horovod_reduce_type": "param",
        "horovod_param_sync_step": 3,
        "horovod_param_sync_delay": 1,
        "horovod_param_outer": {"class": "nesterov", "momentum": 0.5},
        "ema_decay": None,
    },
    "tensorflow": {"horovod_reduce_type": "param", "horovod_param_sync_step": 3, "ema_decay": None},
}
"""As in tests/releases/write.py."""

ALL = [(release, run, name) for release in RELEASES for run, names in CASES.items() for name in names]


def folder_of(release: str) -> Path:
    return ROOT / "tests" / "releases" / release


def config_of(release: str, name: str) -> Path:
    """Configs that are as in the release before are stored there."""
    releases = RELEASES[: RELEASES.index(release) + 1]
    return next(path for one in reversed(releases) if (path := folder_of(one) / "configs" / name).exists())


def expected(release: str, name: str) -> list[dict[str, float]]:
    """The scores of all epochs of a training that was not stopped, with that release."""
    scores: list[dict[str, float]] = json.loads((folder_of(release) / "expected.json").read_text())[name]
    return scores


@trains(slow=list(CASES))
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Each continues with what the release left."""
    made: dict[str, dict[str, object]] = {}
    for release in RELEASES:
        for name, config in CASES[run].items():
            model = folder / f"{name}-{release}" / "model"
            if not model.parent.exists():
                shutil.copytree(folder_of(release) / name, model.parent)
            made[f"{name}-{release}"] = {"configs": [folder_of(RELEASES[0]) / config], "model": model, **KEYS.get(name, {})}
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("release", "run", "name"), ALL)
def test_a_training_goes_on_from_an_old_checkpoint_with_the_same_numbers(
    trained: Trained, release: str, run: Run, name: str
) -> None:
    results = trained(trainings, run)
    assert "training continues in epoch 2, after its step 2." in results.out(f"{name}-{release}")
    scores = results.scores(f"{name}-{release}")
    assert len(scores) == 3
    for ours, theirs in zip(scores, expected(release, name), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["adam", "safetensors", "averaged"])
def test_an_old_checkpoint_is_evaluated_with_the_same_numbers(tmp_path: Path, release: str, name: str) -> None:
    """On one rank, however many trained it."""
    shutil.copytree(folder_of(release) / name, tmp_path / name)
    overrides = {"task": "eval", "load_epoch": 1, "model": tmp_path / name / "model", **KEYS.get(name, {})}
    finished = hvdtrain(folder_of(RELEASES[0]) / "with_torch.py", overrides)
    assert finished.status == 0, finished.err
    [found] = re.findall(r"^epoch 1 evaluation: dev: ce (\S+), fer (\S+)$", finished.out, re.MULTILINE)
    scores = expected(release, name)[0]
    assert [float(number) for number in found] == pytest.approx([scores["dev_loss_ce"], scores["dev_loss_fer"]], rel=1e-3)


def kept_keys(release: str) -> dict[str, list[str]]:
    kept: dict[str, list[str]] = json.loads((folder_of(release) / "keys.json").read_text())
    return kept


CONFIGS = [(release, config) for release in RELEASES for config in kept_keys(release)]


SHOWN = "log_verbosity "
"""The beginning of the lines of a key whose default has changed: it selects what is shown, and no result depends on it."""


@pytest.mark.parametrize(("release", "config"), [one for one in CONFIGS if one[1] not in TENSORFLOW])
def test_an_old_config_means_the_same(release: str, config: str) -> None:
    """Of the first config, all keys with their defaults are compared."""
    kept = {line for line in kept_keys(release)[config] if not line.startswith(SHOWN)}
    path = config_of(release, config)
    with nothing_changes():
        text = print_config(read_settings([path], {}))
    assert kept - set(text.replace(str(path.parent.parent), "FOLDER").splitlines()) == set()


PRINT_ALL = """
import sys
from pathlib import Path
from hvdtrain.settings import read_settings
from hvdtrain.start_up.effective import print_config
for config in sys.argv[1:]:
    print("of", config)
    print(print_config(read_settings([Path(config)], {})))
"""
"""In one process, which imports TensorFlow once."""


@pytest.mark.slow
def test_an_old_config_with_tensorflow_means_the_same() -> None:
    """In a process that does not import PyTorch."""
    configs = [(release, config_of(release, name)) for release in RELEASES for name in TENSORFLOW]
    finished = launch(["-c", PRINT_ALL, *(str(config) for _, config in configs)])
    assert finished.status == 0, finished.err
    printed = re.split(r"^of .*\n", finished.out, flags=re.MULTILINE)[1:]
    for (release, config), text in zip(configs, printed, strict=True):
        lines = text.replace(str(config.parent.parent), "FOLDER").splitlines()
        assert [line for line in kept_keys(release)[config.name] if line not in lines] == []
