"""Scripts for hosts without a scheduler: mpirun and ssh."""

from __future__ import annotations

from hvdtrain.submit.commands import command, environment_lines, waiting
from hvdtrain.submit.job import Job


def plain_script(job: Job) -> str:
    """A script for bash, on one of the hosts or on one that reaches them with ssh."""
    hosts = [f"{host}:{job.tasks_per_node}" for host in job.hosts]
    lines = ["#!/bin/bash", f"# {job.written_by}", "", *environment_lines(job)]
    if job.doctor:
        lines += ["", f"{command(job, 'hvdtrain.doctor', hosts, extra=['--no-measure'])} || exit"]
    return (
        "\n".join([*lines, "", *waiting(job, command(job, hosts=hosts), soon="USR1 TERM INT", cancelled=""), "", "exit $status"])
        + "\n"
    )
