"""Lesson 03, task 5: the programs that ask for seconds, and their judges, which look at the virtual
clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import minidist
from minidist import Cluster, Communicator, ring
from minidist.course.grader.contract import (
    SEEN,
    Arrays,
    Case,
    Note,
    Wrong,
    expect,
    known,
)
from minidist.full.collectives import all_reduce, tree
from minidist.full.comm import Link


def one_level(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5a."""
    ranks, latency, bandwidth = given["cluster"].tolist()
    ask = partial(
        exercise.halving_doubling_cost, ranks=int(ranks), latency=latency, bandwidth=bandwidth
    )
    return {"seconds": [float(ask(bytes)) for bytes in given["bytes"].tolist()]}


def two_levels(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5b."""
    nodes, per_node = given["shape"].tolist()
    inside, across = map(tuple, given["links"].tolist())
    ask = partial(
        exercise.two_level_cost, nodes=nodes, per_node=per_node, inside=inside, across=across
    )
    return {"seconds": [float(ask(bytes)) for bytes in given["bytes"].tolist()]}


def crossover(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5c."""
    ranks, latency, bandwidth = given["cluster"].tolist()
    return {"bytes": float(exercise.broadcast_crossover(int(ranks), latency, bandwidth))}


def judge_one_level(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The virtual clock says the same of the package's own algorithm."""
    ranks, latency, bandwidth = case.given[0]["cluster"].tolist()
    power, ranks = 2 ** int(math.log2(ranks)), int(ranks)
    sizes, answers = case.given[0]["bytes"].tolist(), results[0]["seconds"].tolist()
    counted = counts(
        sizes,
        answers,
        latency,
        bandwidth,
        2 * math.log2(power),
        2 * (power - 1) / power,
        ranks > power,
    )
    for bytes, answer in zip(sizes, answers, strict=True):
        ask = partial(clock, "halving_doubling", bytes)
        seconds, below = (ask(many, Cluster.uniform(latency, bandwidth)) for many in (ranks, power))
        message, waiting = (
            latency + bytes / bandwidth,
            ask(ranks, Cluster.uniform(latency, math.inf)),
        )
        rounds, among = 2 * math.log2(ranks), 2 * (ranks - 1) / ranks
        more = 2 * message if ranks > power else 0
        wrong = {
            "the ranks from Q on cost nothing": below,
            "the two messages of ranks from Q on are counted although there are none": below
            + 2 * message,
            "only one of their two messages is counted": below + message,
            "the latency of their two messages is left out": below + 2 * bytes / bandwidth,
            "each of the ranks from Q on is waited for by itself": below
            + 2 * (ranks - power) * message,
            "P stands where Q should": rounds * latency + among * bytes / bandwidth,
            "P stands where Q should, rounded up": 2 * math.ceil(rounds / 2) * latency
            + among * bytes / bandwidth,
            "ranks are rounded up to a power of two, and all of them halve and double": 2
            * math.ceil(rounds / 2)
            * latency
            + 2 * (1 - 2.0 ** -math.ceil(rounds / 2)) * bytes / bandwidth,
            "a send and a receive at the same time take twice the time of one": seconds + below,
            "bandwidth is counted in bits": waiting + 8 * (seconds - waiting),
            "only the halving is counted, and not the doubling": below / 2 + more,
            "whole buffers are exchanged in every round": 2 * math.log2(power) * message + more,
            "halving and doubling has the latencies of a ring, 2 (Q - 1)": (
                below + more + 2 * (power - 1 - math.log2(power)) * latency
            ),
            "no latency is counted": seconds - waiting,
            "only latencies are counted": waiting,
        }
        if counted:
            wrong[counted] = SEEN
        expect_seconds(f"halving_doubling_cost({bytes}, {ranks}, ...)", answer, seconds, wrong)


def counts(
    sizes: Sequence[float],
    answers: Sequence[float],
    latency: float,
    bandwidth: float,
    rounds: float,
    buffers: float,
    fold: bool,
) -> str:
    """Return how many latencies and how many buffers are in the answers, if a straight line goes
    through them.
    """
    first, last = int(np.argmin(sizes)), int(np.argmax(sizes))
    if sizes[first] == sizes[last] or not np.isfinite(answers).all():
        return ""
    slope = (answers[last] - answers[first]) / (sizes[last] - sizes[first])
    start = answers[first] - slope * sizes[first]
    if not np.allclose([start + slope * size for size in sizes], answers, rtol=1e-9, atol=0):
        return ""
    said = []
    for what, found, expected in (
        ("latencies", start / latency, rounds + 2 * fold),
        ("times n bytes", slope * bandwidth, buffers + 2 * fold),
    ):
        if not math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6):
            said.append(f"{found:.4g} {what} are counted, where there are {expected:.4g}")
    return ", and ".join(said)


def judge_two_levels(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The virtual clock says the same of the package's own algorithm."""
    nodes, per_node = case.given[0]["shape"].tolist()
    inside, across = (Link(*link) for link in case.given[0]["links"].tolist())
    sizes, answers = case.given[0]["bytes"].tolist(), results[0]["seconds"].tolist()
    counted = two_level_counts(sizes, answers, nodes, per_node, inside, across)
    for bytes, answer in zip(sizes, answers, strict=True):

        def ask(
            near: Link, far: Link, algorithm: str = "hierarchical", bytes: int = bytes
        ) -> float:
            return clock(algorithm, bytes, nodes * per_node, Cluster(near, far, per_node, nodes))

        seconds, node = ask(inside, across), clock("ring", bytes, per_node, Cluster(inside, inside))
        wrong = {
            "whole buffers cross between the nodes": node
            + clock("ring", bytes, nodes, Cluster(across, across)),
            "one flat ring goes through all ranks": ask(inside, across, "ring"),
            "all links are as slow as those between nodes": ask(across, across),
            "the last all-gather inside the nodes is left out": seconds - node / 2,
            "the two kinds of links are mixed up": ask(across, inside),
        }
        wrong = {
            story: value
            for story, value in wrong.items()
            if not counted or len(set(sizes)) < 2 or math.isclose(value, answer, rel_tol=1e-9)
        }
        if counted:
            wrong[counted] = SEEN
        name = f"two_level_cost({bytes}, {nodes}, {per_node}, ...)"
        expect_seconds(name, answer, seconds, wrong)


def two_level_counts(
    sizes: Sequence[float],
    answers: Sequence[float],
    nodes: int,
    per_node: int,
    inside: Link,
    across: Link,
) -> str:
    """Return which messages the answers count, as a clause: of how many steps, and of which size,
    on both levels.
    """
    both = (("N", nodes, across), ("G", per_node, inside))
    bytes_of = {"n/(N G)": nodes * per_node, "n/G": per_node, "n/N": nodes, "n": 1}
    tables = []
    for letter, count, link in both:
        steps = {
            f"2 ({letter} - 1)": 2 * (count - 1),
            f"{letter} - 1": count - 1,
            f"2 {letter}": 2 * count,
        }
        steps |= {letter: count, "no": 0}
        tables.append(
            [
                (how, size, [many * (link.latency + link.seconds(n / part)) for n in sizes])
                for size, part in bytes_of.items()
                for how, many in steps.items()
            ]
        )
    for far_steps, far_size, far in tables[0]:
        for near_steps, near_size, near in tables[1]:
            if np.allclose(np.add(near, far), answers, rtol=1e-9, atol=0):
                return (
                    f"there are {near_steps} steps inside the nodes, of {near_size} bytes, and "
                    f"{far_steps} across, of {far_size} bytes"
                )
    if np.allclose(
        answers, two_levels_of(sizes, per_node, nodes, inside, across), rtol=1e-9, atol=0
    ):
        return "nodes and ranks of a node are mixed up, N and G"
    return ""


def two_levels_of(
    sizes: Sequence[float], nodes: int, per_node: int, inside: Link, across: Link
) -> list[float]:
    """Return task 5b's seconds of some sizes."""
    return [
        2 * (per_node - 1) * (inside.latency + inside.seconds(n / per_node))
        + 2 * (nodes - 1) * (across.latency + across.seconds(n / per_node / nodes))
        for n in sizes
    ]


def judge_crossover(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Where the lines cross that the virtual clock draws through two sizes."""
    ranks, latency, bandwidth = case.given[0]["cluster"].tolist()
    ranks, cluster, answer = (
        int(ranks),
        Cluster.uniform(latency, bandwidth),
        float(results[0]["bytes"]),
    )
    sizes = [8 * ranks, 800 * ranks]
    at_once, in_parts = (
        [max(minidist.run(partial(way, n // 8), ranks, cluster=cluster)) for n in sizes]
        for way in WAYS
    )
    gains = [(one - other) for one, other in zip(at_once, in_parts, strict=True)]
    slope = (gains[1] - gains[0]) / (sizes[1] - sizes[0])
    expected = math.inf if slope < 1e-6 / bandwidth else sizes[0] - gains[0] / slope
    if not math.isclose(answer, expected, rel_tol=1e-6):
        rounds = math.log2(ranks)
        wrong = {
            "the all-gather takes log2 P rounds, and not the P - 1 steps of a ring": expected
            * rounds
            / (ranks - 1),
            "the scatter's latencies are counted, and the tree's are not": expected
            * (ranks - 1 + rounds)
            / (ranks - 1),
            "the tree's latencies are taken off those of the all-gather: the scatter has as many, so "
            "they cancel": expected * (ranks - 1 - rounds) / (ranks - 1),
            "the scatter sends whole buffers": (ranks - 1)
            * latency
            * bandwidth
            / ((1 - ranks) / ranks),
            "the all-gather's latencies are paid twice, as in an all-reduce": 2 * expected,
            **{
                story: SEEN
                for story, other in crossovers(ranks, latency, bandwidth).items()
                if math.isclose(answer, other)
            },
        }
        story = known(wrong, lambda other: math.isclose(answer, other))
        story = story or ": with two ranks both send n bytes, one of them in two messages" * (
            ranks == 2
        )
        raise Wrong(
            f"broadcast_crossover({ranks}, {latency:g}, {bandwidth:g}) is {answer:.6g} bytes, on "
            f"the virtual clock {expected:.6g}{story}"
        )


def crossovers(ranks: int, latency: float, bandwidth: float) -> dict[str, float]:
    """Return where the lines would cross, by what is counted: latencies, buffers and the unit."""
    rounds = math.log2(ranks)
    latencies = {
        "": ranks - 1,
        "P latencies are counted, not P - 1": ranks,
        "log2 P latencies are counted": rounds,
    }
    latencies["one latency is counted"] = 1
    buffers = {
        "": rounds - 2 * (ranks - 1) / ranks,
        "only one of scatter and all-gather sends (P - 1)/P of the buffer": rounds
        - (ranks - 1) / ranks,
        "scatter and all-gather send n bytes each, not (P - 1)/P of them": rounds - 2,
        "scatter and all-gather together send n bytes": rounds - 1,
        "the tree sends n bytes once, not in each of its rounds": 1 - 2 * (ranks - 1) / ranks,
        "the bytes of the parts are left out": rounds,
    }
    units = {
        "": 1.0,
        "elements are counted, not bytes": 1 / 8,
        "the size of a chunk is returned, not of the buffer": 1 / ranks,
    }
    units |= {
        "bandwidth is left out": 1 / bandwidth,
        "latency is left out": 1 / latency,
        "bits are counted": 8.0,
    }
    found = {}
    for one, steps in latencies.items():
        for two, fewer in buffers.items():
            for three, unit in units.items():
                story = ", and ".join(filter(None, (one, two, three)))
                found[story] = steps * latency * bandwidth / fewer * unit if fewer > 0 else math.inf
    del found[""]
    return dict(sorted(found.items(), key=lambda each: each[0].count(", and ")))


def clock(algorithm: str, bytes: int, ranks: int, cluster: Cluster) -> float:
    """Return when the last rank has the sum."""

    def program(comm: Communicator) -> float:
        all_reduce(np.zeros(bytes // 8), comm, algorithm=algorithm)
        return comm.clock()

    return max(minidist.run(program, ranks, cluster=cluster))


def whole_buffer(elements: int, comm: Communicator) -> float:
    """Broadcast along the tree; return when this rank has all."""
    tree.broadcast(np.zeros(elements), comm, 0)
    return comm.clock()


def scatter_and_gather(elements: int, comm: Communicator) -> float:
    """Scatter along the tree, and all-gather round the ring; return when this rank has all."""
    chunks = np.array_split(np.zeros(elements), comm.size)
    lengths = [len(chunk) for chunk in chunks]
    tree.scatter(chunks if comm.rank == 0 else None, chunks[comm.rank], comm, 0, lengths)
    ring.ring_all_gather(chunks, comm)
    return comm.clock()


WAYS = (whole_buffer, scatter_and_gather)


def expect_seconds(name: str, found: float, expected: float, wrong: Mapping[str, Any]) -> None:
    """Raise `Wrong` unless a time is the one on the virtual clock."""
    says = f"{name} is {found:.9g} s, on the virtual clock {expected:.9g} s"
    right = math.isclose(found, expected, rel_tol=1e-9)
    expect(right, says, wrong, lambda other: math.isclose(found, other, rel_tol=1e-9))
