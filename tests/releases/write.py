"""Write what later releases must read of this one: `python tests/releases/write.py VERSION FOLDER`.

FOLDER is a checkout of that release. Its program trains every case to the end, for the scores in expected.json, and once more
until a crash in the second epoch; what is left then goes into tests/releases/VERSION/CASE. It also prints the keys in effect
of the configs in tests/releases/VERSION/configs, which are copies of that release's: all keys of the first one, including the
defaults, and of the others what they set, as keys.json. Then it removes those that an earlier release has, too.

Run it once, when a version is released, with the configs in place, and add the version to RELEASES in
tests/ranks/test_old_releases.py.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "adam": ("with_torch.py", 1, []),
    "safetensors": ("with_torch.py", 1, ["++checkpoint_format", "safetensors"]),
    "averaged": (
        "with_torch.py",
        2,
        "++horovod_reduce_type param ++horovod_param_sync_step 3 ++horovod_param_sync_delay 1 ++ema_decay None".split()
        + ["++horovod_param_outer", "{'class': 'nesterov', 'momentum': 0.5}"],
    ),
    "tensorflow": (
        "with_tensorflow.py",
        2,
        "++horovod_reduce_type param ++horovod_param_sync_step 3 ++ema_decay None".split(),
    ),
    "tensorflow_adam": ("with_tensorflow.py", 1, []),
}
"""By name: the config, the number of ranks, more keys."""

CRASH = 9  # one step after a checkpoint within the second of three epochs of six steps


def train(release: Path, name: str, model: Path, crash_at: int) -> int:
    config, ranks, keys = CASES[name]
    mpirun = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe"]
    arguments = [str(Path(__file__).parent / "0.1.0" / config), "++use_horovod", "1", "++model", str(model), *keys]
    command = [*mpirun, sys.executable, "-m", "hvdtrain", *arguments, "++crash_at", str(crash_at)]
    return subprocess.run(command, env=program(release), cwd=model.parents[2]).returncode


def program(release: Path) -> dict[str, str]:
    """The environment in which `-m hvdtrain` is the program of the release, whatever is installed, if run from elsewhere."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, "PYTHONPATH": str(release), **root}


def keys_in_effect(release: Path, target: Path, elsewhere: str) -> dict[str, list[str]]:
    """By config, the lines of --print-config, without the comments and with the folder of the release as FOLDER."""
    found = {}
    for number, config in enumerate(sorted((target / "configs").iterdir(), key=lambda path: (path.name != "smallest.py", path))):
        command = [sys.executable, "-m", "hvdtrain", str(config), "--print-config"]
        text = subprocess.run(command, env=program(release), cwd=elsewhere, capture_output=True, text=True, check=True).stdout
        lines = [line for line in text.replace(str(target), "FOLDER").splitlines() if " = " in line]
        found[config.name] = [line for line in lines if number == 0 or not line.endswith("# default")]
    return found


def main() -> None:
    version, release = sys.argv[1], Path(sys.argv[2]).absolute()
    target = Path(__file__).parent.absolute() / version
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            whole, stopped = (Path(folder) / how / name / "model" for how in ("whole", "stopped"))
            for model, crash_at in ((whole, 0), (stopped, CRASH)):
                model.parent.mkdir(parents=True)
                if (train(release, name, model, crash_at) == 0) != (crash_at == 0):
                    sys.exit(f"{name}: expected a training to the end, and a crash at step {CRASH}")
            lines = whole.with_name("scores.jsonl").read_text().splitlines()
            expected[name] = [json.loads(line)["scores"] for line in lines]
            shutil.rmtree(target / name, ignore_errors=True)
            left_out = shutil.ignore_patterns("starts.jsonl", "ends.jsonl", "steps.jsonl", "summary.json", "*.html")  # hosts, seconds
            shutil.copytree(stopped.parent, target / name, ignore=left_out)
        keys = keys_in_effect(release, target, folder)
    (target / "keys.json").write_text(json.dumps(keys, indent=1) + "\n")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for config in (target / "configs").iterdir():
        earlier = [path.read_text() for path in sorted(target.parent.glob(f"*/configs/{config.name}")) if path != config]
        if config.read_text() in earlier[-1:]:
            config.unlink()


if __name__ == "__main__":
    main()
