#!/usr/bin/env python3
"""Seconds per update of configs/g2p.py for each method of docs/communication.md, on networks of some rates and delays.

    make data
    sudo python benchmarks/networks.py --results exp/networks.jsonl

Two hosts are namespaces on this machine, with a network between them that is as slow as wanted (`slow_network.py`); each has two
ranks, which torch.distributed connects. Every cell is an epoch of some steps, which appends a line to --results: the command goes
on where it was stopped. In every network, a dry run with predict_ranks also predicts the seconds of some methods.

The seconds of an update are those of the steps, plus the seconds of a sync divided by the updates between two syncs: an epoch
has one more sync at its end. The network's process and all ranks share the cores of this machine, so computing takes longer than
on two hosts.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import ROOT, machine
from slow_network import HOSTS, SlowNetwork

Keys = dict[str, Any]

PORT = 29555
PER_HOST = 2


def averaging(every: int, **others: Any) -> Keys:
    return {"horovod_reduce_type": "param", "horovod_param_sync_step": every, **others}


def power_sgd(rank: int) -> Keys:
    return {"horovod_compression": "powersgd", "horovod_compression_rank": rank, "horovod_avg_grad": True}


METHODS: dict[str, Keys] = {
    "gradients": {"horovod_avg_grad": True},
    "gradients, fp16": {"horovod_avg_grad": True, "horovod_compression": "fp16"},
    **{f"gradients, PowerSGD, rank {rank}": power_sgd(rank) for rank in (1, 2, 4)},
    "H = 16": averaging(16),
    "H = 16, groups": averaging(16, horovod_param_group="host"),
    "H = 16, int8": averaging(16, horovod_compression="int8"),
    "H = 16, int4": averaging(16, horovod_compression="int4"),
    "H = 16, delay 8": averaging(16, horovod_param_sync_delay=8),
    "H = 64": averaging(64),
    "H = 64, groups": averaging(64, horovod_param_group="host"),
    "H = 64, int8": averaging(64, horovod_compression="int8"),
    "H = 64, int4": averaging(64, horovod_compression="int4"),
    "H = 64, int4, groups": averaging(64, horovod_compression="int4", horovod_param_group="host"),
    "H = 64, delay 16": averaging(64, horovod_param_sync_delay=16),
    "H = 64, int4, delay 16": averaging(64, horovod_compression="int4", horovod_param_sync_delay=16),
}

REACHED = "reached"
"""The name of the cell with what the network really does: on a busy machine, it cannot pass on 10 Gbit/s."""

SERVER = """
import socket
connection, _ = socket.create_server(("", 5001)).accept()
for _ in range(20):
    connection.sendall(connection.recv(1))
left = int(connection.recv(20))
connection.sendall(b"x")
while left:
    left -= len(connection.recv(min(left, 1 << 20)))
connection.sendall(b"x")
"""
CLIENT = """
import socket, statistics, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], 5001))
        break
    except OSError:
        time.sleep(0.05)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(20):
    began = time.monotonic()
    connection.sendall(b"x")
    connection.recv(1)
    trips.append(time.monotonic() - began)
size = int(sys.argv[2])
connection.sendall(str(size).encode())
connection.recv(1)
began = time.monotonic()
connection.sendall(bytes(size))
connection.recv(1)
print(8e-6 * size / (time.monotonic() - began), 1e3 * statistics.median(trips))
"""

PREDICTED = {"grad": "gradients", "param, H = 16": "H = 16", "param, H = 64": "H = 64"}
"""The names of methods in the table of predict_ranks, and here."""


def main() -> None:
    """Measure what is not in the results yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a file with a line for each cell that is done")
    parser.add_argument("--config", default=str(ROOT / "configs" / "g2p.py"), help="(configs/g2p.py)")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000, 10000], help="Mbit/s (100 1000 10000)")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 1, 20], help="ms in each direction (0.1 1 20)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD", help="(all)")
    parser.add_argument("--no-predictions", action="store_true", help="leave out the dry runs")
    parser.add_argument("keys", nargs="*", default=["++max_seqs", "32", "++train.partition_epoch", "9"], help="after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("networks.py: stopped by SIGTERM"))  # so that the ranks end, too
    print(f"{machine()}; {' '.join(options.keys)}\n", flush=True)
    results = Results(options)
    for rate in options.rates:
        for delay in options.delays:
            results.measure(rate, delay)
    print_table(results, options)


class Results:
    """The cells that are done, in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        lines = options.results.read_text().splitlines() if options.results.exists() else []
        self.done: dict[str, dict[str, Any]] = {json.loads(line)["cell"]: json.loads(line) for line in lines}

    def cell(self, rate: float, delay: float, method: str) -> str:
        """The name of a cell; the method `predicted` is the dry run."""
        return json.dumps([rate, delay, method, self._options.keys])

    def measure(self, rate: float, delay: float) -> None:
        """Measure what is missing of a network."""
        methods = [REACHED, *self._options.methods, *([] if self._options.no_predictions else ["predicted"])]
        missing = [method for method in methods if self.cell(rate, delay, method) not in self.done]
        if not missing:
            return
        found: dict[str, Any]
        with SlowNetwork(1e6 * rate, 1e-3 * delay) as network:
            for method in missing:
                if method == REACHED:
                    found = reached(network, rate)
                elif method == "predicted":
                    found = {"predicted": predictions(network, self._options)}
                else:
                    found = epoch(network, self._options, METHODS[method])
                cell = self.cell(rate, delay, method)
                self.done[cell] = {"cell": cell, **found}
                self._options.results.parent.mkdir(parents=True, exist_ok=True)
                with self._options.results.open("a") as file:
                    file.write(json.dumps(self.done[cell]) + "\n")
                print(f"{cell}: {found}", file=sys.stderr, flush=True)


def reached(network: SlowNetwork, rate: float) -> dict[str, float]:
    """The Mbit/s of a connection that sends for about half a second, and the median of its round trips in ms."""
    first, second = HOSTS
    server = network.start(first, [sys.executable, "-c", SERVER], {})
    client = network.start(second, [sys.executable, "-c", CLIENT, HOSTS[first], str(int(rate * 1e6 / 16))], {})
    out, err = client.communicate(timeout=300)
    server.kill()
    if client.returncode:
        raise SystemExit(f"networks.py: expected the hosts to reach each other, got\n{err}")
    speed, trip = map(float, out.split())
    return {"speed": speed, "trip": trip}


def epoch(network: SlowNetwork, options: argparse.Namespace, keys: Keys) -> dict[str, Any]:
    """Train an epoch; the seconds and sequences of an update, and the bytes that a rank sent for it."""
    with tempfile.TemporaryDirectory() as folder:
        run(network, options, {**keys, "num_epochs": 1, "model": f"{folder}/model", "dev": None, "eval": None})
        report = json.loads(Path(folder, "scores.jsonl").read_text())
    steps, syncs = report["steps"], report["syncs"]
    found = {"sequences": report["num_sequences"] / steps}
    every = keys.get("horovod_param_sync_step", 1)
    syncing = report["seconds"][0].get("parameter sync", 0.0)
    between = report.get("sent_between_groups", report["sent"])
    if not syncs:
        return {**found, "seconds": report["elapsed"] / steps, "sent": report["sent"] / steps}
    seconds = (report["elapsed"] - syncing) / steps + syncing / syncs / every
    # Between two syncs, only the ranks of a group exchange.
    sent = (report["sent"] - between) / steps + between / syncs / every
    return {**found, "seconds": seconds, "sent": sent, "between_groups": between / syncs / every}


def predictions(network: SlowNetwork, options: argparse.Namespace) -> dict[str, float]:
    """The sequences per second that a dry run predicts for the same ranks, by method."""
    ranks = len(HOSTS) * PER_HOST
    with tempfile.TemporaryDirectory() as folder:
        keys = {"model": f"{folder}/model", "dev": None, "eval": None, "predict_ranks": f"{ranks}:{PER_HOST}"}
        out = run(network, options, keys, "--dry-run")
    rows = re.findall(rf"^predict: +{ranks}:{PER_HOST}[* ] +(grad|param, H = \d+) +([\d.e+]+) ", out, re.MULTILINE)
    found = {PREDICTED[name]: float(rate) for name, rate in rows if name in PREDICTED}
    if not found:
        raise SystemExit(f"networks.py: expected a table of predictions, got\n{out}")
    return found


def run(network: SlowNetwork, options: argparse.Namespace, keys: Mapping[str, Any], *more: str) -> str:
    """Run hvdtrain on the ranks of both hosts; what rank 0 printed."""
    given = {"ngpu": PER_HOST, "num_threads": 1, "dist_world_size": len(HOSTS), "dist_master_addr": HOSTS["host1"]} | keys
    given |= {"dist_master_port": PORT, "log": None, "log_verbosity": 4, "log_interval": 0}
    overrides = [word for key, value in given.items() for word in (f"++{key}", str(value))]
    command = [sys.executable, "-m", "hvdtrain", options.config, *overrides, *options.keys, *more]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = [network.start(host, [*command, "++dist_rank", str(rank)], environment) for rank, host in enumerate(HOSTS)]
    try:
        printed = [process.communicate(timeout=1800) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"{' '.join(command)}: expected status 0, got\n" + "\n".join(out + err for out, err in printed))
    return printed[0][0]


def print_table(results: Results, options: argparse.Namespace) -> None:
    """The seconds of an update: a row for each method, a column for each network."""
    networks = [(rate, delay) for rate in options.rates for delay in options.delays]
    heads = ["method", "KB sent by a rank", *(f"{rate:g} Mbit/s, {delay:g} ms" for rate, delay in networks)]
    print("Milliseconds of an update (predicted):\n")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    measured = [results.done[results.cell(*network, REACHED)] for network in networks]
    texts = [f"{cell['speed']:.0f} Mbit/s, {cell['trip']:.1f} ms there and back" for cell in measured]
    print(f"| (a connection reaches) | | {' | '.join(texts)} |")
    for method in options.methods:
        cells = [results.done[results.cell(*network, method)] for network in networks]
        guesses = [results.done.get(results.cell(*network, "predicted"), {}).get("predicted", {}) for network in networks]
        texts = [
            f"{1e3 * cell['seconds']:.0f}" + (f" ({1e3 * cell['sequences'] / guess[method]:.0f})" if method in guess else "")
            for cell, guess in zip(cells, guesses, strict=True)
        ]
        print(f"| {method} | {cells[0]['sent'] / 1e3:.0f} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
