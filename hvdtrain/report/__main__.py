"""The command `hvdtrain report FOLDER...`: an HTML page about one or several trainings; also `python -m hvdtrain.report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.report.runs import read_runs


def main(arguments: list[str] | None = None) -> int:
    """Write the page and return the exit status."""
    options = parser().parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        try:
            from hvdtrain.report import page, plots
        except ImportError as error:
            raise HvdtrainError(
                f"hvdtrain report: expected the package matplotlib, got: {error} (pip install matplotlib)"
            ) from None
        chapters = page.figures_of(runs)
        out = options.out or options.folders[0] / "report.html"
        out.write_text(page.page(runs, chapters), encoding="utf-8")
        files = [out] + (page.write_pictures(options.pictures, chapters) if options.pictures else [])
        plots.close([figure for figures in chapters.values() for figure in figures.values()])
    except (HvdtrainError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(str(file) for file in files))
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(
        prog="hvdtrain report",
        description="Write an HTML page about a training: curves of losses, errors and learning rate, where the time went, and "
        "the settings with their origins. With several folders, the page compares the trainings.",
    )
    made.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder with scores.jsonl and the model's files")
    made.add_argument("--out", type=Path, help="file to write (default: report.html in the first folder)")
    made.add_argument("--pictures", type=Path, metavar="FOLDER", help="also write every figure as a PNG into this folder")
    return made


if __name__ == "__main__":
    sys.exit(main())
