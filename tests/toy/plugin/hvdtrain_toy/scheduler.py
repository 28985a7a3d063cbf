"""A scheduler of `submit`: a queue whose scripts begin with `#QUEUE`."""

from __future__ import annotations

from hvdtrain.plugins.submit.job import Job, Scheduler, background_lines, command, environment_lines


def queue_script(job: Job) -> str:
    """A script for enqueue."""
    head = [f"#QUEUE name={job.name}", f"#QUEUE hosts={job.nodes}", f"#QUEUE memory={job.memory or 'any'}"]
    lines = [*environment_lines(job), *background_lines(job, command(job), before_limit="USR1", cancelled="TERM")]
    return "\n".join(["#!/bin/bash", *head, f"# {job.written_by}", *lines, "exit $status"]) + "\n"


QUEUE = Scheduler(name="queue", write=queue_script, submit=("enqueue",), unsupported=("account",))
