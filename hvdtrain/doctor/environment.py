"""What the environment says about the launch: variables that contradict each other, and settings that let a job hang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.comm.launch import KEEPALIVE, LAUNCHERS
from hvdtrain.doctor.findings import Finding, ok, problem, warning


def check_environment(environ: Mapping[str, str], framework: str | None = None) -> list[Finding]:
    """All checks of this file. They depend on the environment only, except for the file of a file:// rendezvous."""
    return [
        *check_ranks(environ),
        *check_sizes(environ),
        *check_torchrun(environ),
        *check_mpirun(environ),
        *check_init_file(environ),
    ]


def check_ranks(environ: Mapping[str, str]) -> list[Finding]:
    """Whether the variables of each launcher go together.

    A stale MASTER_ADDR or a WORLD_SIZE without RANK, left over from another job, makes a script that asks for one of them
    believe in a launcher that is not there.

    >>> [each.text for each in check_ranks({"RANK": "4", "WORLD_SIZE": "4"})]
    ['expected RANK below WORLD_SIZE = 4, got 4']
    >>> [each.level for each in check_ranks({"WORLD_SIZE": "4"})], check_ranks({"RANK": "0", "WORLD_SIZE": "1"})
    (['warning'], [])
    """
    findings = []
    for launcher, rank, size, local_rank, _ in LAUNCHERS:
        there = {name: environ[name] for name in (rank, size, local_rank) if name in environ}
        wrong = [name for name, value in there.items() if not value.isdigit()]
        for name in wrong:
            findings.append(problem(name, f"expected a number, got {there[name]!r}", f"unset {name}; {launcher} sets it"))
        if wrong or launcher == "srun":
            continue
        if (rank in there) != (size in there):
            alone = rank if rank in there else size
            text = f"{alone} = {there[alone]} is set, but not {size if alone == rank else rank}: left over from another job?"
            findings.append(warning(alone, text, f"unset {alone}, or start with {launcher}"))
        elif rank in there and int(there[rank]) >= int(there[size]):
            text = f"expected {rank} below {size} = {there[size]}, got {there[rank]}"
            findings.append(problem(rank, text, f"unset {rank} {size}, or start with {launcher}; a rank is no node's number"))
    for name in ("local_rank", "rank", "world_size"):
        if name in environ:
            findings.append(
                warning(name, f"{name} is set; programs read {name.upper()}", f"export {name.upper()}={environ[name]}")
            )
    if "MASTER_ADDR" in environ and "RANK" not in environ and "SLURM_PROCID" not in environ:
        text = f"MASTER_ADDR = {environ['MASTER_ADDR']} is set, but not RANK: left over from another job?"
        findings.append(warning("MASTER_ADDR", text, "unset MASTER_ADDR, or start with torchrun"))
    return findings


def check_sizes(environ: Mapping[str, str]) -> list[Finding]:
    """Whether two launchers that both left their variables agree on the number of ranks.

    >>> [each.text for each in check_sizes({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
    ...                                     "RANK": "0", "WORLD_SIZE": "1"})]
    ['expected one number of ranks, got WORLD_SIZE = 1 and OMPI_COMM_WORLD_SIZE = 4']
    """
    sizes = {size: environ[size] for _, rank, size, _, _ in LAUNCHERS if environ.get(rank, "").isdigit() and size in environ}
    sizes.pop("SLURM_STEP_NUM_TASKS", None)  # of the step that started mpirun's daemons or torchrun: theirs
    if len(set(sizes.values())) > 1:
        text = f"expected one number of ranks, got {' and '.join(f'{name} = {value}' for name, value in sizes.items())}"
        return [problem("launchers", text, "use one launcher only, and unset what another one left")]
    return [ok("ranks", ", ".join(f"{name} = {value}" for name, value in sizes.items()))] if sizes else []


def check_torchrun(environ: Mapping[str, str]) -> list[Finding]:
    """Restarts of torchrun fail with gloo unless the agents keep their store to themselves.

    >>> check_torchrun({"TORCHELASTIC_MAX_RESTARTS": "2"})[0].level, check_torchrun({"TORCHELASTIC_MAX_RESTARTS": "0"})
    ('warning', [])
    """
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts.isdigit() and int(restarts) > 0 and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        text = f"torchrun may restart {restarts} times, but restarted ranks find the dead ones' addresses in its store"
        return [warning("torchrun", text, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")]
    return []


def check_mpirun(environ: Mapping[str, str]) -> list[Finding]:
    """Whether mpirun across hosts would notice that one is gone.

    >>> check_mpirun({"OMPI_MCA_orte_num_nodes": "2"})[0].level, check_mpirun({"OMPI_MCA_orte_num_nodes": "1"})
    ('warning', [])
    """
    nodes = environ.get("OMPI_MCA_orte_num_nodes", "1")
    if nodes.isdigit() and int(nodes) > 1 and "OMPI_MCA_oob_tcp_keepalive_time" not in environ:
        text = f"on {nodes} hosts, without keepalive: if a cable is cut, the job hangs for ever"
        return [warning("mpirun", text, f"add {KEEPALIVE}")]
    return []


def check_init_file(environ: Mapping[str, str]) -> list[Finding]:
    """Whether a file:// rendezvous has been used before: torch.distributed fails on the second use, unless it is removed."""
    method = environ.get("DIST_INIT_METHOD", "")
    path = Path(method.removeprefix("file://"))
    if method.startswith("file://") and path.exists():
        return [warning("DIST_INIT_METHOD", f"{path} is there from an earlier run", f"rm {path}, or a new name for every run")]
    return []
