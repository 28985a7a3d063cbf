"""The command `hvdtrain report FOLDER...`: an HTML page about trainings; also `python -m hvdtrain.plugins.report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdtrain.config.command_line import command_parser
from hvdtrain.errors import HvdtrainError
from hvdtrain.runtime.records import records_of


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or serve it, and return the exit status."""
    options = parser().parse_args(arguments)
    if options.serve and (options.out or options.pictures):
        parser().error("--serve writes no file: expected neither --out nor --pictures with it")
    out = options.out or options.folders[0] / "report.html"
    try:
        if options.serve:
            from hvdtrain.plugins.report.serve import serve

            return serve(options.folders, options.port, announce=lambda line: print(line, flush=True))
        files = _write(options.folders, out, options.pictures)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or out}: expected a file that can be written, got: {error.strerror or error}", file=sys.stderr)
        return 2
    print("\n".join(str(file) for file in files))
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    result = command_parser(
        "report",
        "Write an HTML page about a training: curves of losses, errors and learning rate, where the time went, and the settings\n"
        "with their origins. With several folders, or one that has trainings below it, the page compares the trainings.",
        "",
    )
    result.add_argument(
        "folders", nargs="+", type=_folder, metavar="FOLDER", help="a folder of a training (with scores.jsonl), or of several"
    )
    result.add_argument("--out", type=Path, help="file to write (default: report.html in the first folder)")
    result.add_argument("--pictures", type=Path, metavar="FOLDER", help="also write every figure as a PNG into this folder")
    result.add_argument(
        "--serve",
        action="store_true",
        help="instead of writing a file, serve a page that follows the training to browsers on this machine",
    )
    result.add_argument("--port", type=int, default=0, help="with --serve: the port (default: a free one)")
    return result


def _folder(text: str) -> Path:
    """A training's folder, given directly or as the value of the key `model`, which begins with the folder."""
    path = Path(text)
    records = records_of(path)
    return records if not path.is_dir() and (records / "scores.jsonl").exists() else path


def _write(folders: list[Path], out: Path, pictures: Path | None) -> list[Path]:
    from hvdtrain.plugins.report import page
    from hvdtrain.plugins.report.project import read_project

    project = read_project(folders)
    for problem in project.problems:
        print(f"warning: {problem}; the page omits the training", file=sys.stderr)
    out.write_text(page.page(project.runs, project.title), encoding="utf-8")
    if pictures is None:
        return [out]
    from hvdtrain.plugins.report.pictures import write_pictures

    return [out, *write_pictures(pictures, [figure for chapter in page.chapters_of(project.runs) for figure in chapter.figures])]


if __name__ == "__main__":
    sys.exit(main())
