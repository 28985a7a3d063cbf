"""Manifests for Kubernetes: Kubeflow's MPIJob and PyTorchJob, and an ordinary Job for a single rank.

Each host of the job is a pod. The pods run the script that a scheduler would run: it passes on SIGTERM, which Kubernetes sends
before it stops a pod, so that the training stops with a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.submit.job import Job, Scheduler, background_lines, command, doctor_lines, environment_lines, memory_text

RETRIES = 10
"""How often pods that failed or were evicted are restarted."""

LAUNCHER_RESOURCES = {"cpu": 1, "memory": "2Gi"}
"""The resources of mpirun's pod, which runs no rank."""


def _problems(job: Job) -> list[Problem]:
    problems = []
    if not job.image:
        problems += problem(
            "missing",
            "--image: expected a container image with hvdtrain for kubernetes, got none (docs/installing.md builds one)",
        )
    if job.runs and job.launcher != "python":
        problems += problem(
            "conflict",
            f"--sweep: expected one rank for each run on kubernetes, whose indexed Jobs have no {job.launcher}, got several "
            "(++ngpu N starts ranks within a pod)",
        )
    return problems


def kubernetes_manifest(job: Job) -> str:
    """The manifest for kubectl."""
    kind = {"mpirun": mpi_job, "torchrun": pytorch_job, "python": plain_job}[job.launcher]
    return "\n".join([f"# {job.written_by}", *yaml_lines(kind(job))]) + "\n"


def mpi_job(job: Job) -> dict[str, Any]:
    """An MPIJob: a launcher, which runs mpirun, and a worker with sshd for each host. The operator writes the host file."""
    launcher = {"replicas": 1, "restartPolicy": "Never", "template": _template(job, LAUNCHER_RESOURCES, script(job))}
    worker = {"replicas": job.nodes, "restartPolicy": "Never", "template": _template(job, resources(job), None)}
    spec = {
        "slotsPerWorker": job.tasks_per_node,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", **run_policy(job)},
        "mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker},
    }
    return _object("kubeflow.org/v2beta1", "MPIJob", _metadata(job), spec)


def pytorch_job(job: Job) -> dict[str, Any]:
    """A PyTorchJob: each pod runs torchrun, which gets its node rank from the operator. The first one is the master."""
    policy = "OnFailure" if job.requeue else "Never"
    replica = {"restartPolicy": policy, "template": _template(job, resources(job), script(job))}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    spec = {
        "nprocPerNode": str(job.tasks_per_node),
        "runPolicy": {"cleanPodPolicy": "Running", **run_policy(job)},
        "pytorchReplicaSpecs": replicas,
    }
    return _object("kubeflow.org/v1", "PyTorchJob", _metadata(job), spec)


def plain_job(job: Job) -> dict[str, Any]:
    """An ordinary Job of Kubernetes, for a single rank."""
    policy = run_policy(replace(job, queue=None))
    template = _template(job, resources(job), script(job))
    template["spec"]["restartPolicy"] = "Never"
    if job.runs:
        policy |= {"completionMode": "Indexed", "completions": len(job.runs), "parallelism": len(job.runs)}
        policy["backoffLimit"] *= len(job.runs)  # of all runs together
        if "activeDeadlineSeconds" in policy:  # per pod, since a run may have to wait for others
            template["spec"]["activeDeadlineSeconds"] = policy.pop("activeDeadlineSeconds")
    metadata = _metadata(job)
    if job.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.queue}
    return _object("batch/v1", "Job", metadata, {**policy, "template": template})


def _object(version: str, kind: str, metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def resources(job: Job) -> dict[str, Any]:
    """The resources that a host's pod requests, which are also its limits."""
    requested: dict[str, Any] = {"cpu": job.cores}
    if job.memory:
        requested["memory"] = memory_text(job.memory, "Gi", "Mi")
    if job.gpus_per_node:
        requested["nvidia.com/gpu"] = job.gpus_per_node
    return requested


def run_policy(job: Job) -> dict[str, Any]:
    """The retries and the time limit: pods are stopped `stop_before` seconds early, and have these seconds left."""
    policy: dict[str, Any] = {"backoffLimit": RETRIES if job.requeue else 0}
    if job.seconds:
        policy["activeDeadlineSeconds"] = max(60, job.seconds - job.stop_before)
    if job.queue:
        policy["schedulingPolicy"] = {"queue": job.queue}
    return policy


def script(job: Job) -> str:
    """The script that a pod runs."""
    run = replace(job, requeue=False)
    lines = ["#!/bin/bash", *environment_lines(run), *doctor_lines(run)]
    return "\n".join([*lines, *background_lines(run, command(run), before_limit="TERM", cancelled=""), "exit $status", ""])


def object_name(name: str) -> str:
    """A valid name of an object in Kubernetes.

    >>> object_name("My_config.v2"), object_name("2024")
    ('my-config-v2', 'hvdtrain-2024')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"hvdtrain-{plain}".strip("-")


def _metadata(job: Job) -> dict[str, Any]:
    return {"name": object_name(job.name)} | ({"namespace": job.account} if job.account else {})


def _template(job: Job, requested: Mapping[str, Any], run: str | None) -> dict[str, Any]:
    """A pod with one container. Without a script it runs the operator's command: a worker's ssh daemon."""
    # The operator for PyTorchJobs looks for the container of this name.
    container: dict[str, Any] = {"name": "pytorch" if job.launcher == "torchrun" else "hvdtrain", "image": job.image}
    if run is not None:
        container["command"] = ["/bin/bash", "-c", run]
    container["resources"] = {"requests": dict(requested), "limits": dict(requested)}
    mounts = [{"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(job.volumes)]
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(job.volumes)
    ]
    # A container's default /dev/shm has 64 MB: too little for NCCL, MPI and reading workers.
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts]
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *claims]
    return {"spec": {"terminationGracePeriodSeconds": job.stop_before, "containers": [container], "volumes": volumes}}


def yaml_lines(value: Any, indent: str = "") -> list[str]:
    """Dicts, lists, texts and numbers as YAML: text of several lines as a block, other text in double quotes where necessary.

    >>> print("\\n".join(yaml_lines({"a": [{"b": "c: d", "e": 1}, "two\\nlines\\n"]})))
    a:
    - b: "c: d"
      e: 1
    - |
      two
      lines
    """
    lines = []
    entries = value.items() if isinstance(value, dict) else ((None, element) for element in value)
    for key, entry in entries:
        start = f"{indent}- " if key is None else f"{indent}{_scalar(key)}: "
        if isinstance(entry, str) and entry.endswith("\n"):
            lines += [f"{start}|", *(f"{indent}  {line}" if line else "" for line in entry.removesuffix("\n").split("\n"))]
        elif isinstance(entry, (dict, list)) and entry:
            inner = yaml_lines(entry, indent + ("  " if key is None or isinstance(entry, dict) else ""))
            lines += [start.rstrip(), *inner] if key is not None else [start + inner[0].removeprefix(f"{indent}  "), *inner[1:]]
        else:
            lines.append(start + (_scalar(entry) if isinstance(entry, str) else json.dumps(entry)))
    return lines


NO_TEXTS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""Words that YAML reads as something else, in any case."""


def _scalar(text: str) -> str:
    """A text, in quotes if YAML would read it as something else."""
    is_plain = re.fullmatch(r"[A-Za-z/][\w./-]*(?::[\w.-]+)?", text) and text.lower() not in NO_TEXTS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


KUBERNETES = Scheduler(
    name="kubernetes",
    write=kubernetes_manifest,
    submit=("kubectl", "create", "-f", "-"),
    problems=_problems,
    array_index=("JOB_COMPLETION_INDEX", 0),
    unsupported=("option", "output", "export"),
    in_comments=(),
    in_container=True,
)
