"""What this package promises about its speed, as data.

Ratios are medians of the rounds' ratios between two competitors that took turns, on 2 ranks in float32, with the two
cores near each other (see `probe`). `native tuned` is MPI's own in a launch that is told to keep freed memory.
"""

from __future__ import annotations

from dataclasses import dataclass

RANKS, DTYPE = 2, "float32"


@dataclass(frozen=True)
class Bound:
    """`competitor` takes at most `limit` times what `peer` does; without a peer its own value is at most `limit`."""

    bench: str
    case: str
    competitor: str
    peer: str
    limit: float


def _by_size(bench: str, competitor: str, peer: str, limits: dict[str, float]) -> list[Bound]:
    return [Bound(bench, size, competitor, peer, limit) for size, limit in limits.items()]


ORDINARY = {"4 KiB": 1.5, "64 KiB": 1.2, "1 MiB": 1.1, "16 MiB": 0.9, "64 MiB": 0.4}
REGISTERED = {"64 KiB": 0.6, "1 MiB": 0.8, "16 MiB": 0.5, "64 MiB": 0.3}
OVER_GLOO = {"4 KiB": 0.02, "64 KiB": 0.1, "1 MiB": 0.5, "16 MiB": 0.3, "64 MiB": 0.25}
RECOMPUTED = "D=256, 12 layers"
PIPELINES = ("D=256, 8 microbatches", "D=512, 8 microbatches")  # (m + p - 1)/(m p) = 9/16 of the serial step
STEPS = ("D=256, 8 x 128", "D=512, 8 x 128")

BOUNDS: tuple[Bound, ...] = (
    *_by_size("all_reduce", "auto", "native", ORDINARY),
    *_by_size("all_reduce", "auto", "native tuned", {"64 MiB": 0.85}),
    *_by_size("all_reduce", "registered", "native", REGISTERED),
    *_by_size("all_reduce", "registered", "native tuned", {"64 MiB": 0.7}),
    *_by_size("all_reduce", "auto", "gloo", OVER_GLOO),
    *_by_size("reduce_scatter", "auto", "native", {"16 MiB": 0.7}),
    *_by_size("all_gather", "auto", "native", {"16 MiB": 1.1}),
    *[Bound("ddp", case, "DDP", "torch DDP", 0.96) for case in STEPS],
    *[Bound("ddp", case, "DDP", "local", 1.02) for case in STEPS],
    Bound("ddp", "D=512, 1 x 64", "DDP", "torch DDP", 0.75),
    Bound("zero", STEPS[0], "ZeRO-3", "fully_shard", 0.82),
    Bound("zero", STEPS[1], "ZeRO-3", "fully_shard", 0.88),
    *[Bound("zero", case, "ZeRO-1", "DDP", 1.05) for case in STEPS],
    *[Bound("zero", f"{case}, peak", "ZeRO-3", "fully_shard", 1.0) for case in STEPS],
    *[Bound("pipeline", case, name, f"torch {name}", 0.95) for case in PIPELINES for name in ("gpipe", "1f1b")],
    *[Bound("pipeline", case, name, "serial", 1.04 * 9 / 16) for case in PIPELINES for name in ("gpipe", "1f1b")],
    *[Bound("pipeline", case, "zb-h1", "torch 1f1b", 0.93) for case in PIPELINES],
    Bound("tensor", STEPS[0], "tensor", "DTensor", 0.78),
    Bound("tensor", STEPS[1], "tensor", "DTensor", 0.9),
    *[Bound("checkpoint", case, "stall", "synchronous", 0.2) for case in ("D=256", "D=512")],
    Bound("recompute", RECOMPUTED, "full", "stored", 1.36),
    Bound("recompute", RECOMPUTED, "full", "torch full", 1.03),
    Bound("recompute", f"{RECOMPUTED}, activations", "full", "torch full", 1.0),
    Bound("threads", "64 ranks, ring", "wall time", "", 2.0),
    Bound("threads", "64 ranks, ring", "virtual time / formula - 1", "", 1e-12),
)
