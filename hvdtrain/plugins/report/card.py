"""The command `hvdtrain card FOLDER`: a model card in the format of the Hugging Face Hub, README.md with metadata in YAML."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.config.command_line import command_parser
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.plugins.report.runs import Run, read_runs
from hvdtrain.report.starts import hosts_text
from hvdtrain.runtime.records import models_of
from hvdtrain.version import __version__

DESCRIPTION = """\
Write a model card: what the model was trained on and how, its scores, the commit of the config, and how to load it. The card is
README.md in the format of the Hugging Face Hub, with metadata (model-index) that the Hub shows as evaluation results. If the
package huggingface_hub is installed, it reads the card as a check."""

EPILOG = "The card is a beginning: say in it what the model is for, and where its limits are."

UNKNOWN_TASK = "other"
"""The Hub requires a task of each evaluation result."""


def main(arguments: list[str] | None = None) -> int:
    """Write the card, and return the exit status."""
    options = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    folder: Path = options.folder
    out: Path = options.out or folder / "README.md"
    try:
        if out.exists() and not options.overwrite:
            raise DataError(f"{out}: expected the name of a new file, got one that exists (--overwrite replaces it)")
        text = card(folder, Labels(options.name, options.task, options.dataset, options.license, options.language))
        check(text)
        out.write_text(text, encoding="utf-8")
    except (HvdtrainError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(out)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    result = command_parser("card", DESCRIPTION, EPILOG)
    result.add_argument("folder", type=Path, metavar="FOLDER", help="the training's folder, with scores.jsonl and the models")
    result.add_argument("--name", help="the model's name (default: that of the folder)")
    result.add_argument("--task", help="its task in the Hub's words, such as automatic-speech-recognition or translation")
    result.add_argument("--dataset", help="the data's name, such as LibriSpeech (default: the class of the dataset)")
    result.add_argument("--license", help="its license in the Hub's words, such as apache-2.0")
    result.add_argument("--language", action="append", default=[], help="a language, such as en; may be repeated")
    result.add_argument("--out", type=Path, help="the file to write (default: README.md in the folder)")
    result.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    return result


@dataclass(frozen=True)
class Labels:
    """What only the author knows of a model; None: not given."""

    name: str | None = None
    task: str | None = None
    dataset: str | None = None
    license: str | None = None
    language: Sequence[str] = ()


def card(folder: Path, labels: Labels) -> str:
    """The card of the best model in a folder. Raises: DataError, if the folder has no scores."""
    [run] = read_runs([folder])
    if not run.epochs:
        raise DataError(f"{folder}: expected at least one finished epoch, got none")
    name = labels.name or folder.resolve().name
    epoch, checkpoint = _best(folder, run)
    [line] = [line for line in run.epochs if line["epoch"] == epoch]
    metadata = _metadata(name, labels, run, line["scores"])
    parts = [f"---\n{_yaml(metadata)}---", f"# {name}", _introduction(run, epoch), *_scores(run, line)]
    parts += [*_data(run, line), *_training(run), *_loading(checkpoint, run.start)]
    return "\n\n".join(parts) + "\n"


def check(text: str) -> None:
    """Have the package huggingface_hub read a card, if it is installed. Raises: DataError, if it cannot."""
    if find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import ModelCard

    try:
        read = getattr(ModelCard(text).data, "eval_results", None)
    except Exception as error:  # whatever its parsers raise
        raise DataError(f"card: expected metadata that huggingface_hub can read, got: {error}") from None
    if not read:
        raise DataError("card: expected evaluation results that huggingface_hub can read, got none")


def _best(folder: Path, run: Run) -> tuple[int, str | None]:
    """The best epoch that has scores, and its model's file, if that exists."""
    best = run.best(run.measure)
    epoch = int(run.last["epoch"]) if best is None else int(best[0])
    prefix = Path(str(run.setting("model") or "*")).name
    files = sorted(
        path.name for path in models_of(folder).glob(f"{prefix}.{epoch:03d}.*") if path.suffix in (".pt", ".npz", ".safetensors")
    )
    models = [name for name in files if re.fullmatch(rf".+\.{epoch:03d}\.\w+", name)]  # not the optimizer's model.003.opt.pt
    return epoch, models[0] if models else None


def _metadata(name: str, labels: Labels, run: Run, scores: Mapping[str, float]) -> dict[str, Any]:
    results = [
        {
            "task": {"type": labels.task or UNKNOWN_TASK},
            "dataset": {"type": labels.dataset or _class_of(run, dataset), "name": f"{labels.dataset or name} ({dataset})"},
            "metrics": [{"type": score, "value": value, "name": f"{dataset} {score}"} for score, value in values.items()],
        }
        for dataset, values in _by_dataset(scores)
    ]
    given = {"license": labels.license, "language": list(labels.language), "pipeline_tag": labels.task}
    given |= {"datasets": [labels.dataset] if labels.dataset else []}
    return {
        "library_name": "hvdtrain",
        "tags": ["hvdtrain", str(run.setting("backend") or "torch")],
        **{entry: value for entry, value in given.items() if value},
        "model-index": [{"name": name, "results": results}],
    }


def _by_dataset(scores: Mapping[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    """The scores of the evaluated datasets; those of training if there is no other."""
    by_dataset: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        dataset, _, score = name.partition("_loss_")
        by_dataset.setdefault(dataset, {})[score] = value
    evaluated = {dataset: values for dataset, values in by_dataset.items() if dataset != "train"}
    yield from (evaluated or by_dataset).items()


def _class_of(run: Run, dataset: str) -> str:
    value = run.setting(dataset) or (run.setting("eval_datasets") or {}).get(dataset)
    return str(value["class"]) if isinstance(value, dict) and "class" in value else "custom"


def _introduction(run: Run, epoch: int) -> str:
    size = run.start.get("num_parameters")
    with_size = f" with {size:,.0f} parameters" if size else ""
    framework = {"torch": "PyTorch", "tensorflow": "TensorFlow"}.get(str(run.setting("backend") or "torch"), "TensorFlow")
    version = run.start.get("versions", {}).get("hvdtrain", __version__)
    return (
        f"A model for {framework}{with_size}, trained with hvdtrain {version}. "
        f"These are the weights after epoch {epoch} of {run.last['epoch']}."
    )


def _scores(run: Run, line: Mapping[str, Any]) -> Iterator[str]:
    yield "## Scores"
    rows = ["| dataset | score | value |", "|---|---|---|"]
    for dataset, values in _by_dataset(line["scores"]):
        rows += [f"| {dataset} | {score} | {value:.5g} |" for score, value in values.items()]
    yield "\n".join(rows)
    if run.measure is not None:
        better = "highest" if run.is_higher_better(run.measure) else "lowest"
        yield f"The epoch is the one with the {better} `{run.measure}`."


def _data(run: Run, line: Mapping[str, Any]) -> Iterator[str]:
    yield "## Data"
    count = line.get("num_sequences")
    if count is not None:
        yield f"An epoch of training had {count:,.0f} sequences."
    values = {name: run.settings.get(name, ("None", ""))[0] for name in ("train", "dev", "eval", "eval_datasets")}
    rows = [f"| `{name}` | `{_cell(value)}` |" for name, value in values.items() if value not in ("None", "{}")]
    if rows:
        yield "\n".join(["| key | dataset |", "|---|---|", *rows])


def _cell(text: str, most: int = 300) -> str:
    """A text for a cell of a table, within backquotes."""
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= most else f"{text[:most]} ..."


def _training(run: Run) -> Iterator[str]:
    start = run.start
    if not start:
        return
    yield "## Training"
    hosts = [(str(host), str(device)) for host, device in start["hosts"]]
    facts = {
        "command": f"`{_cell(start['command'])}`",
        "ranks": f"{len(hosts)}: {hosts_text(hosts)}" if hosts else None,
        "versions": ", ".join(f"{package} {version}" for package, version in start.get("versions", {}).items()),
        "commit": _commit(start),
        "starts": f"{len(run.starts)}, the last one on {start.get('time')}",
    }
    yield "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value)])
    for path, text in start.get("texts", {}).items():
        fence = "`" * max(3, *(len(run_of_ticks) + 1 for run_of_ticks in re.findall(r"`+", text) or [""]))
        kind = "json" if path.endswith(".json") else "python"
        yield f"<details><summary>{Path(path).name}</summary>\n\n{fence}{kind}\n{text.rstrip()}\n{fence}\n\n</details>"


def _commit(start: Mapping[str, Any]) -> str | None:
    """The commit at the last start, and whether it has the config that was trained; None: there is no repository."""
    commit = start.get("commit")
    if not commit:
        return None
    changed = []
    for path, text in start.get("texts", {}).items():
        with suppress(OSError, subprocess.SubprocessError):
            folder = Path(start.get("directory", "."), path).parent
            name = Path(path).name
            command = ["git", "-C", str(folder), "show", f"{commit}:./{name}"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            if shown.returncode or shown.stdout != text:
                changed.append(name)
    return f"`{commit}`" + (f", with changes in {', '.join(changed)}, which is below" if changed else "")


def _loading(checkpoint: str | None, start: Mapping[str, Any]) -> Iterator[str]:
    yield "## How to load it"
    if checkpoint is None:
        yield "The model's file was removed: `cleanup_old_models` decides which are kept."
        return
    config = [Path(path).name for path in start.get("texts", {})] or ["config.py"]
    files = json.dumps(config[0] if len(config) == 1 else config)
    yield f'```python\nimport hvdtrain\n\nmodel = hvdtrain.load_model("{checkpoint}", config={files})\n```'
    plain = {
        ".pt": f'import torch\n\nstate = torch.load("{checkpoint}", weights_only=True)["model"]  # for load_state_dict',
        ".safetensors": f'from safetensors import safe_open\n\nfile = safe_open("{checkpoint}", "numpy")',
        ".npz": f'import numpy\n\narrays = numpy.load("{checkpoint}")  # by the names of variables',
    }
    yield f"Without hvdtrain:\n\n```python\n{plain[Path(checkpoint).suffix]}\n```"
    yield f"`python -m hvdtrain export {' '.join(config)}` writes a program that needs neither hvdtrain nor the config."


def _yaml(value: Any, indent: str = "") -> str:
    """Nested dicts and lists as YAML; strings and numbers as in JSON, which is a part of YAML."""
    lines = ""
    for entry, inner in value.items() if isinstance(value, dict) else ((None, inner) for inner in value):
        begin = f"{indent}- " if entry is None else f"{indent}{entry}:"
        if isinstance(inner, dict | list) and inner:
            block = _yaml(inner, f"{indent}  ")
            lines += begin + block[len(indent) + 2 :] if entry is None else f"{begin}\n{block}"
        else:
            lines += f"{begin if entry is None else begin + ' '}{json.dumps(inner, ensure_ascii=False)}\n"
    return lines
