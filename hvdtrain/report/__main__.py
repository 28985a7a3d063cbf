"""`python -m hvdtrain.report FOLDER...`: one page about one training or several."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.report.runs import read_runs


def main(arguments: list[str] | None = None) -> int:
    """Make the page; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain.report",
        description="Make a page of HTML about a training: curves of losses and errors, learning rate, where the time went, "
        "settings and where they came from. Of several folders, the trainings are compared.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="where scores.jsonl is, beside the model's files")
    parser.add_argument("--out", type=Path, help="the page; without it, report.html in the (first) folder")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write every figure there as a PNG, too")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        try:
            from hvdtrain.report import page, plots
        except ImportError as error:
            raise HvdtrainError(f"expected matplotlib to draw with, got: {error} (pip install matplotlib)") from None
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


if __name__ == "__main__":
    sys.exit(main())
