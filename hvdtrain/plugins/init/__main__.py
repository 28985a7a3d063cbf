"""The command line of `hvdtrain init`: write a commented config to start from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.resources import files as package_files
from pathlib import Path

from hvdtrain.config.command_line import command_parser
from hvdtrain.config.missing import installed
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import DataError, HvdtrainError

TEMPLATES = {
    "torch": "PyTorch, with data that the config makes up (default)",
    "hdf": "PyTorch, with data from HDF files, whose sizes it has if they exist",
}
TASKS = {
    "ctc": "speech recognition with CTC: a Transformer encoder",
    "transducer": "speech recognition with a transducer",
    "lm": "a language model: a Transformer decoder, with Muon",
    "tagging": "a tag for every token: a bidirectional LSTM",
    "seq2seq": "a target for a source, such as a translation: encoder, decoder and attention",
    "finetune": "adapters in a pretrained encoder; needs the packages transformers and peft",
}
OTHERS: Mapping[str, tuple[str, str, str]] = Registry("templates")
"""By plug-in's option, its line of help, the package with the template, and how to install what the config imports."""

USUAL = ("train.hdf", "dev.hdf")
NEEDS = {
    "hdf": "   # once its files exist",
    "finetune": "   # needs the packages: pip install transformers peft",
}
DESCRIPTION = "Write a commented config to start from. It trains as it is, except with --hdf, which needs your files."
EPILOG = "then: python -m hvdtrain CONFIG"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    template = options.task or options.template or "torch"
    try:
        files = options.files or [name for name in USUAL if template == "hdf" and Path(name).exists()]
        if options.files and template != "hdf":
            raise DataError(f"--files: expected --hdf, got a config for {template}, which makes up its data")
        try:
            write(options.config, template, files)
        except DataError as error:
            if options.files or not files:
                raise
            print(f"{error}: the config has other sizes", file=sys.stderr)
            write(options.config, template)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.config}: a config for {template}; adapt it to your data and model")
    install = OTHERS[template][2] if template in OTHERS else ""
    needs = f"   # needs the package: {install}" if install else NEEDS.get(template, "")
    print(f"python -m hvdtrain {options.config}{'' if files else needs}")
    return 0


def parser() -> argparse.ArgumentParser:
    result = command_parser("init", DESCRIPTION, EPILOG)
    result.add_argument("config", metavar="CONFIG", type=Path, help="the file to write, such as my_config.py")
    kinds = result.add_mutually_exclusive_group()
    for name, help in {**TEMPLATES, **{name: line for name, (line, *_) in OTHERS.items()}}.items():
        kinds.add_argument(f"--{name}", dest="template", action="store_const", const=name, help=help)
    result.add_argument(
        "--files",
        nargs="+",
        metavar="FILE",
        help="with --hdf: train, and dev if there are two; else train.hdf and dev.hdf, if they exist",
    )
    tasks = "; ".join(f"{name}: {help}" for name, help in TASKS.items())
    kinds.add_argument("--task", choices=TASKS, help=f"PyTorch, with made-up data and a model for a task: {tasks}")
    return result


def write(config: Path, template: str, files: Sequence[str] = ()) -> None:
    """Write the config, whose `model` is named after it.

    Args:
        files: HDF files for train and dev, whose sizes become those of the model.

    Raises:
        DataError: the config exists, or cannot be written; or a file cannot be read, or has other data.
    """
    if installed(config.stem, config.parent):
        raise DataError(
            f"{config}: expected a name that no installed package has, got {config.stem} (imports would find the config)"
        )
    if template in OTHERS:
        text = package_files(OTHERS[template][1]).joinpath("template.txt").read_text(encoding="utf-8")
    else:
        text = Path(__file__).with_name(f"{template}.txt").read_text(encoding="utf-8")
    if files:
        text = _with_sizes(text, *files)
    try:
        with config.open("x", encoding="utf-8") as file:
            file.write(text.replace("CONFIG", config.name).replace("NAME", config.stem))
    except FileExistsError:
        raise DataError(f"{config}: expected the name of a new file, got one that exists") from None
    except OSError as error:
        raise DataError(f"{config}: expected a file that can be written, got: {error.strerror}") from None


def _with_sizes(text: str, train: str, dev: str | None = None, *_: str) -> str:
    """The template of HDF files with their names, and the sizes of what is in the first one."""
    from hvdtrain.data.hdf.dataset import open_hdf  # here, as it imports h5py

    with closing(open_hdf([train])) as dataset:
        if not dataset.num_sequences:
            raise DataError(f"{train}: expected at least one sequence, got none")
        streams = dataset.streams
        lengths = dataset.lengths
        first = dataset.sequence(0)
    if (
        not streams.keys() >= {"data", "classes"}
        or first["data"].ndim != 2
        or first["data"].dtype.kind != "f"
        or not streams["classes"].sparse
        or max(first["classes"], default=0) >= streams["classes"].dim
        or (lengths["data"] != lengths["classes"]).any()
    ):
        kinds = {name: f"{first[name].dtype} of shape {first[name].shape}" for name in streams}
        kinds |= {name: f"{kinds[name]} and dim {stream.dim}" for name, stream in streams.items() if stream.sparse}
        has = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise DataError(
            f"{train}: expected vectors of floats in 'data' and one class each, below its dim, in 'classes', got in the first "
            f"sequence {has}"
        )
    text = text.replace("FEATURES, CLASSES = 40, 100", f"FEATURES, CLASSES = {streams['data'].dim}, {streams['classes'].dim}")
    line = next(line for line in text.splitlines() if line.startswith("dev = "))
    text = text.replace(
        line, line.replace('["dev.hdf"]', repr([dev]).replace("'", '"')) if dev else "dev = None  # evaluated after every epoch"
    )
    return text.replace('["train.hdf"]', repr([train]).replace("'", '"'))
