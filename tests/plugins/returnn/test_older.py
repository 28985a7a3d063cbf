"""What recipes for earlier versions of RETURNN have: names that it has dropped, and steps with other arguments."""

import json
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.returnn.older import with_older_arguments
from hvdtrain.run import train
from hvdtrain.settings import read_settings

IMPORTS = """
from returnn.torch.context import get_run_ctx, RunCtx
from returnn.torch.engine import ForwardCallbackIface, TrainCtx
from returnn.datasets.util.hdf import SimpleHDFWriter
from returnn.datasets.util.vocabulary import BytePairEncoding, CharacterTargets, Utf8ByteTargets, Vocabulary
from returnn.datasets.generating import Vocabulary as SameVocabulary
from returnn.util.basic import NotSpecified
from returnn.util.file_cache import CachedFile
import returnn.torch.context, returnn.frontend, returnn.datasets.hdf
"""


def test_names_of_recipes_and_of_older_versions(tmp_path: Path) -> None:
    """A config of today's names and of those that RETURNN has dropped, down to what they are."""
    (tmp_path / "my.config").write_text(
        IMPORTS
        + f"""
assert returnn.torch.context.get_run_ctx is get_run_ctx is returnn.frontend.get_run_ctx
assert TrainCtx is RunCtx is returnn.frontend.RunCtx
assert SimpleHDFWriter is returnn.datasets.hdf.SimpleHDFWriter and SameVocabulary is Vocabulary
assert get_run_ctx().stage == "init"
train = {{"class": "HDFDataset", "files": [CachedFile("a.hdf")]}}
model, task, learning_rate, max_seqs = {str(tmp_path / "model")!r}, "config:nothing", 0.1, 3
def get_model(**_): pass
def train_step(*, run_ctx: RunCtx, **_): pass
def nothing(): pass
"""
    )
    assert read_settings([tmp_path / "my.config"], {}).train.files == ("a.hdf",)
    (tmp_path / "my.config").write_text("from returnn.torch.contexts import RunCtx")
    with pytest.raises(ConfigError, match=r"line 1: ModuleNotFoundError: .*contexts"):
        read_settings([tmp_path / "my.config"], {})


STEPS = """
from returnn.torch.context import RunCtx, get_run_ctx
import torch
train = {{"class": "Task12AXDataset", "num_seqs": 10}}
extern_data = {{"data": {{"dim": 9}}, "classes": {{"dim": 2, "sparse": True}}}}
model, learning_rate, max_seqs, num_epochs, num_threads = {model!r}, 0.1, 3, 1, 1
def get_model(**_):
    torch.manual_seed(1)
    return torch.nn.Linear(9, 2)
def losses(model, frames, sizes, classes):
    mask = torch.arange(frames.shape[1]) < sizes[:, None]
    return torch.nn.functional.cross_entropy(model(frames)[mask], classes[mask].long(), reduction="none")
"""

OLDER = """
def train_step(*, model: torch.nn.Module, data: dict, run_ctx: RunCtx, **kwargs):
    assert kwargs.keys() <= {"extern_data"} and run_ctx.device == "cpu" and run_ctx.epoch == 1
    assert run_ctx.stage == get_run_ctx().stage == "train_step"
    assert data["data:seq_len"] is data["data:size1"] and data["classes:size0"] == len(data["seq_tag"]) == len(data["data"])
    given = losses(model, data["data"], data["data:size1"], data["classes"])
    run_ctx.mark_as_loss(name="ce", loss=given.sum(), inv_norm_factor=torch.sum(data["classes:size1"]))
"""

TODAYS = """
def train_step(*, model, extern_data, **_):
    raw = extern_data.as_raw_tensor_dict()
    given = losses(model, raw["data"], raw["data:size1"], raw["classes"])
    get_run_ctx().mark_as_loss(given, "ce")
"""


def test_steps_of_the_older_form_train_as_those_of_today(tmp_path: Path) -> None:
    reports = []
    for name, step in {"older": OLDER, "todays": TODAYS}.items():
        config = tmp_path / f"{name}.config"
        config.write_text(STEPS.format(model=str(tmp_path / name / "model")) + step)
        train(read_settings([config], {}))
        reports.append(json.loads((tmp_path / name / "scores.jsonl").read_text())["scores"])
    assert reports[0] == pytest.approx(reports[1], rel=1e-5)
    assert 0.1 < reports[0]["train_loss_ce"] < 1.0


def test_steps_name_the_older_arguments_that_they_take() -> None:
    def only_data(*, model: object, data: object) -> None: ...
    def todays(*, model: object, extern_data: object, data: object = None) -> None: ...

    def with_step(*, extern_data: object, global_train_step: object) -> None: ...

    assert with_older_arguments(with_step) is not with_step
    assert with_older_arguments(only_data) is not only_data
    assert with_older_arguments(todays) is todays
    assert with_older_arguments(print) is print
