"""Trainings without padding compute what those with padding compute, with PyTorch and TensorFlow.

And those in which one rank runs out of memory and splits its batches.
"""

import json
from pathlib import Path

import pytest
from launching import TOY, hvdtrain
from trainings import CONFIGS, Run, Trained, assert_alike, marked, trains

from hvdtrain.data.hdf.dataset import open_hdf

TWO, TENSORFLOW = Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)
FILES = {"torch": "packed.py", "tensorflow": "ragged.py"}


@trains(TWO, slow=[TENSORFLOW])
def packing(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    config = CONFIGS[run.framework]
    made: dict[str, dict[str, object]] = {
        "padded": {"evaluated": True},
        "packed": {"evaluated": True, "configs": [config, config.with_name(FILES[run.framework])]},
    }
    if run.framework == "torch":
        small = {"configs": [config, config.with_name("oom.py")], "max_seqs": 10, "parts": 4, "record": True}
        made["whole"] = small | {"learning_rate": 0.002}
        made["split"] = made["whole"] | {"split_on_oom": True, "most": 30}
        made["means"] = small | {"losses": "several", "accum_grad_multiple_step": 2}
        made["split_means"] = made["means"] | {"split_on_oom": True, "most": 30}
    return made


@pytest.mark.parametrize("run", [TWO, *marked([TENSORFLOW], pytest.mark.slow)], ids=str)
def test_packed_batches_give_the_same_model(trained: Trained, run: Run) -> None:
    results = trained(packing, run)
    assert_alike(results.weights("packed"), results.weights("padded"), 1e-6)
    [packed], [padded] = results.scores("packed"), results.scores("padded")
    assert {name: packed[name] for name in padded} == pytest.approx(padded, rel=1e-6)
    assert packed.get("train_loss_misplaced", 0.0) == 0.0
    padding = results.reports("packed")[0]["padding"]
    assert padding["data"] == padding["classes"] == 0.0 < results.reports("padded")[0]["padding"]["data"]


@pytest.mark.parametrize(("whole", "split"), [("whole", "split"), ("means", "split_means")])
def test_a_rank_that_runs_out_of_memory_splits_its_batches(trained: Trained, whole: str, split: str) -> None:
    results = trained(packing, TWO)
    assert_alike(results.weights(split), results.weights(whole), 1e-6)
    assert results.trained_on(split) == results.trained_on(whole)
    [one], [other] = results.scores(split), results.scores(whole)
    assert one == pytest.approx(other, rel=1e-6)
    [report] = results.reports(split)
    assert 0 < report["splits"] <= report["steps"]
    assert f"train epoch 1: {report['splits']} batches did not fit into memory and were split" in results.out(split)
    assert "splits" not in results.reports(whole)[0]


def test_packed_outputs_are_written_sequence_by_sequence(corpus: Path, trained: Trained, tmp_path: Path) -> None:
    results = trained(packing, TWO)
    keys = {
        "corpus": corpus,
        "load": results.models["packed"].with_name("model.001"),
        "task": "forward",
        "model": tmp_path / "model",
    }
    out = tmp_path / "out.hdf"
    both = tmp_path / "both.json"
    both.write_text(json.dumps({"forward_data": str(corpus / "dev.hdf"), "output_file": str(out)}))
    ended = hvdtrain(TOY, keys, options=[str(TOY.with_name("packed.py")), str(both)])
    assert ended.status == 0, ended.err
    written, data = open_hdf([out]), open_hdf([corpus / "dev.hdf"])
    assert written.lengths["data"].tolist() == data.lengths["data"].tolist()
    assert written.streams["data"].dim == 5
    written.close()
    data.close()
