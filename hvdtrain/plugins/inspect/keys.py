"""The key `count_flops`."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class FlopKeys(Section):
    """How much of what the devices can do is used."""

    count_flops: bool = key(
        False,
        "count the floating-point operations of a batch and measure the device's peak before training begins (about a second), "
        "and report the operations of each epoch and their share of the peak (docs/reports.md)",
        needs="torch",
        instead="--summary shows the layers; TensorFlow's profiler counts in graphs of known lengths only",
    )
