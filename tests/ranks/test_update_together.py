"""Everything that may happen to a gradient at once: several batches, half precision with a scale, noise, clipping, an average."""

import json
from pathlib import Path

import numpy
import pytest
from launching import TOY, launch

CONFIGS = {"torch": TOY, "tensorflow": TOY.with_name("tensorflow_config.py")}

TOGETHER: dict[str, object] = {
    "layers": "statistics",
    "losses": "several",
    "num_epochs": 2,
    "accum_grad_multiple_step": 3,
    "mixed_precision": "float16",
    "grad_scaler": {"init_scale": 2.0**40, "growth_interval": 3},  # the first updates overflow, and later ones now and then
    "gradient_noise": 0.01,
    "gradient_clip_global_norm": 1.0,
    "ema_decay": 0.9,
}


@pytest.mark.parametrize("framework", CONFIGS)
def test_ranks_agree_and_a_stop_changes_nothing(corpus: Path, tmp_path: Path, framework: str) -> None:
    jobs = []
    for reduce in ("grad", "param"):
        for how in ("whole", "stopped"):
            keys = {
                "use_horovod": True,
                "corpus": corpus,
                "horovod_reduce_type": reduce,
                "horovod_param_sync_step": 2,
                **TOGETHER,
            }
            keys |= {"model": tmp_path / f"{reduce}.{how}" / "model", "record": tmp_path / f"{reduce}.{how}.ids"}
            keys |= {"fault": "SIGTERM,0,4,16,25"} if how == "stopped" else {}
            overrides = {key: str(value) for key, value in keys.items()}
            jobs.append({"name": f"{reduce}.{how}", "folder": str(tmp_path), "overrides": overrides})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    finished = launch([str(TOY.parent / "several.py"), str(tmp_path / "jobs.json"), CONFIGS[framework]], ranks=2, timeout=300)
    assert finished.status == 0, finished.err
    assert finished.out.count("stopped by SIGTERM") >= 4
    assert "the update is skipped" in finished.out
    for reduce in ("grad", "param"):
        first = weights(tmp_path, f"{reduce}.whole", 0)
        assert all(numpy.isfinite(array.astype(float)).all() for array in first.values())
        for how in ("whole", "stopped"):
            for rank in (0, 1):
                other = weights(tmp_path, f"{reduce}.{how}", rank)
                assert [name for name in first if not numpy.array_equal(first[name], other[name])] == [], (reduce, how, rank)


def weights(folder: Path, name: str, rank: int) -> dict[str, numpy.ndarray]:
    with numpy.load(folder / f"{name}.rank-{rank}.npz") as stored:
        return dict(stored)
