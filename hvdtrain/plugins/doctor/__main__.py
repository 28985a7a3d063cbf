"""The command `hvdtrain doctor [CONFIG]`, alone or under a launcher; also `python -m hvdtrain.plugins.doctor`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator
from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import HvdtrainError
from hvdtrain.plugins.doctor import ranks
from hvdtrain.plugins.doctor.findings import (
    Finding,
    HostReport,
    check_clocks,
    check_networks,
    differences,
    lines,
    merge_findings,
    ok,
    problem,
    summary,
    wrap_report,
)
from hvdtrain.plugins.doctor.host import examine, framework_of, read_config
from hvdtrain.plugins.doctor.network import ask_hosts
from hvdtrain.plugins.trial.keys import TrialKeys, parse_placements
from hvdtrain.plugins.trial.scaling import predict_speed
from hvdtrain.runtime.terminal import terminal_of
from hvdtrain.settings import Settings

USAGE = """\
python -m hvdtrain doctor [options] [CONFIG ... [++KEY VALUE ...]]
       mpirun -np N --bind-to none python -m hvdtrain doctor [options] [CONFIG ... [++KEY VALUE ...]]"""

DESCRIPTION = """\
Check what training on several ranks and hosts needs. Each check prints a line: ok, warning or problem, with the fix. With a
config, its keys, its data and the disk for its checkpoints are checked, too. Under a launcher (mpirun, srun, horovodrun,
torchrun) the hosts of all ranks are checked and compared, and the all-reduce between the ranks is measured; with a config
also the time of some training steps, on a model that is thrown away. From these, ++predict_ranks 2,8,64 estimates the speed
on other numbers of ranks."""

EPILOG = """\
exit status, for job scripts
  0  no problems; there may be warnings
  1  with --strict: no problems, but warnings
  2  a problem: training would not start, or not work as intended
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    words, overrides_given = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    wanted = [*options.configs, *overrides_given]
    if options.predict is not None:
        if not options.configs:
            print("predict_ranks: expected a config, got none", file=sys.stderr)
            return 2
        wanted += ["++predict_ranks", options.predict]
    try:
        configs, overrides = parse_command_line(wanted) if wanted else ([], {})
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    hosts = [host for host in options.hosts.split(",") if host]
    try:
        if this_process.place().size > 1:
            return _examine_ranks(options, configs, overrides)
        return _alone(options, configs, overrides, hosts, wanted)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    parser = command_parser("doctor", DESCRIPTION, EPILOG, USAGE)
    parser.add_argument("configs", metavar="CONFIG", nargs="*", help="the config of the training")
    parser.add_argument("--hosts", default="", help="other hosts, such as h1,h2: check them over ssh, and compare")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each host, for scripts")
    parser.add_argument("--seconds", type=float, default=ranks.SECONDS, help="how long each measurement takes, about (default 1)")
    parser.add_argument("--no-measure", action="store_true", help="under a launcher: do not measure the all-reduce and steps")
    parser.add_argument("--predict", metavar="RANKS", help=argparse.SUPPRESS)  # in release 1.0; now the key predict_ranks
    parser.add_argument("--patience", type=float, default=120, help="seconds that the ranks have to connect to each other (120)")
    return parser


def _alone(
    options: argparse.Namespace, configs: list[Path], overrides: dict[str, str], hosts: Sequence[str], words: Sequence[str]
) -> int:
    """Check this host and the other hosts that were named."""
    report, settings = examine(configs, overrides, len(hosts))
    reports = [report]
    together: list[Finding] = []
    if settings is not None and settings.of(TrialKeys).predict_ranks is not None:
        with ranks.connect(settings, settings.run.backend) as comm:
            together += check_scaling(comm, settings)
    if hosts:
        report.clock = 0.0
        others, together = ask_hosts(hosts, ["-m", "hvdtrain", "doctor", "--json", *words])
        reports += others
        together += [*differences(reports), *check_clocks(reports), *check_networks(reports)]
    return _finish(options, reports, together)


def _examine_ranks(options: argparse.Namespace, configs: list[Path], overrides: dict[str, str]) -> int:
    """Check the hosts of all ranks, and the connections between them. Rank 0 prints the report."""
    place = this_process.place()
    report = None
    settings = None
    if place.local_rank == 0:
        report, settings = examine(configs, overrides, 0)
    elif configs:
        settings, _ = read_config(configs, overrides)
    framework = framework_of(settings)
    reports = [report] if report is not None else []

    def report_failure(why: str, fix: str = "") -> int:
        """Report only this rank's host, as the ranks cannot connect."""
        return _finish(options, reports, [problem("ranks", why, fix)], quiet=place.rank > 0)

    fix = "a firewall? the wrong interface? HOROVOD_GLOO_IFACE, or mpirun --mca btl_tcp_if_include, name the right one"
    late = f"expected {place.size} ranks to find each other within {options.patience:.0f} s, got no answer"
    if configs and settings is None:
        return _finish(options, reports, [], quiet=place.rank > 0)  # the config has problems, which are the same on all ranks
    with ExitStack() as stack:
        try:
            # Only rank 0 watches the time: when it ends, the launcher ends the others.
            with ranks.deadline(options.patience, lambda: report_failure(late, fix)) if place.rank == 0 else nullcontext():
                comm = stack.enter_context(ranks.connect(settings, framework))
                threads = this_process.environment().get("OMP_NUM_THREADS", "")
                this_rank = ranks.RankReport(report, place.local_size, int(threads) if threads.isdigit() else None)
                reports, together = ranks.gather_reports(comm, this_rank)
        except HvdtrainError as error:
            return report_failure(str(error))
        if not options.no_measure:
            together += ranks.run_check(comm, "all-reduce", lambda: [ranks.check_speed(comm, framework, options.seconds)])
            if settings is not None:
                together += ranks.run_check(comm, "training step", lambda: ranks.check_share(comm, settings, options.seconds))
                together += check_scaling(comm, settings)
        return _finish(options, reports, together, quiet=comm.rank > 0)


def check_scaling(comm: Communicator, settings: Settings) -> list[Finding]:
    """Collective. The prediction, if the key predict_ranks asks for one."""
    if settings.of(TrialKeys).predict_ranks is None:
        return []
    placements = parse_placements(settings.of(TrialKeys).predict_ranks)
    return ranks.run_check(comm, "prediction", lambda: [ok("prediction", "\n".join(predict_speed(comm, settings, placements)))])


def _finish(options: argparse.Namespace, reports: Sequence[HostReport], together: Sequence[Finding], quiet: bool = False) -> int:
    """Print the report, unless another rank prints it; return the exit status, which is the same on all ranks."""
    whole = [*reports, HostReport("", list(together))] if together else list(reports)
    findings = [finding for report in whole for finding in report.findings]
    levels = {finding.level for finding in findings}
    if not quiet and options.json:
        print(json.dumps([asdict(report) for report in whole]), flush=True)
    elif not quiet:
        text = lines(reports) + lines([HostReport("", list(together))])
        if (window := terminal_of(sys.stdout)) is not None:
            text = wrap_report(text, os.get_terminal_size(window).columns)
        print("\n".join([*text, summary(finding for finding, _ in merge_findings(whole))]), flush=True)
    return 2 if "problem" in levels else 1 if options.strict and "warning" in levels else 0


if __name__ == "__main__":
    sys.exit(main())
