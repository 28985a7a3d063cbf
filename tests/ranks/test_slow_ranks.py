"""A rank that is slower than the others is named with the cause, and nobody is where none is: on real ranks."""

import json
import re
from pathlib import Path

from launching import TOY, launch

# What takes 0.1 s a batch on every rank, and the rank on which it takes 30 % longer.
PACES = {"computing": ("compute", 1), "reading": ("data", 0), "alike": ("compute", -1), "alike_reading": ("data", -1)}
CAUSES = {"computing": "computing", "reading": "waiting for data"}


def test_slow_ranks_are_named(corpus: Path, tmp_path: Path) -> None:
    jobs = []
    for mode in ("grad", "param"):
        for name, slow in PACES.items():
            overrides = {
                "use_horovod": True,
                "corpus": corpus,
                "model": tmp_path / mode / name / "model",
                "slow": list(slow),
                "horovod_reduce_type": mode,
                "horovod_param_sync_step": 3,
            }
            texts = {key: str(value) for key, value in overrides.items()}
            jobs.append({"name": f"{mode}-{name}", "folder": str(tmp_path), "overrides": texts})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    finished = launch([str(TOY.parent / "several.py"), str(tmp_path / "jobs.json")], ranks=2, timeout=300)
    assert finished.status == 0, finished.err
    told = finished.out.split("hvdtrain 0.1.0")[1:]  # every training begins with this
    assert len(told) == len(jobs)
    for number, job in enumerate(jobs):
        mode, name = job["name"].split("-")
        named = re.findall(r"^train epoch 1: rank (\d) held the others up by .* s \(\d+%\): (.+) took ", told[number], flags=re.M)
        expected = [(str(PACES[name][1]), CAUSES[name])] if name in CAUSES else []
        assert named == expected, f"{mode}, {name}: {told[number]}"
