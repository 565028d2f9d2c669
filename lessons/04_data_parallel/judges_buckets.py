"""Lesson 04, task 3: the programs that fill buckets, and their judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from judges import BYTES, SIZES, Towers, descend, expect, flat, judge_trained, part_of_loss, steps_of

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong


def assign(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the first half of task 3."""
    model = Towers(given)
    found = exercise.assign_buckets(list(model.parameters()), int(given["limit"]))
    bucket = {id(parameter): number for number, some in enumerate(found) for parameter in some}
    return {"buckets": [bucket.get(id(parameter), -1) for parameter in model.parameters()]}


def bucketed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the second half of task 3 in a loop; note how many gradients had come at each launch, and at each wait."""
    model, stream, results = Towers(given, comm.rank), comm.stream(), dict[str, Any]()
    arrivals, launches, waits, late = list[int](), list[int](), list[int](), list[int]()
    backward = [False]  # is it under way

    def launch(work: Any, *arguments: Any) -> Any:
        launches.append(len(arrivals))
        late.append(not backward[0])
        handle = stream.launch(work, *arguments)
        return SimpleNamespace(wait=lambda: waits.append(len(arrivals)) or handle.wait())

    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: arrivals.append(number) if gradients.synchronising else None
        )
    observed = SimpleNamespace(launch=launch, comm=stream.comm)
    gradients = exercise.BucketedGradients(model, comm, observed, int(given["limit"]))
    messages, bytes = comm.traffic.messages_sent, comm.traffic.bytes_sent
    for inputs, targets in steps_of(given):
        for synchronising in [False, True] if given["quiet"] else [True]:  # quiet: first only add up
            gradients.synchronising, backward[0] = synchronising, True
            part_of_loss(model, inputs, targets, comm.rank, comm.size).backward()
            backward[0] = False
        gradients.finish()
        results.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    results |= {"launches": launches, "waits": waits, "late": late, "bytes": comm.traffic.bytes_sent - bytes}
    results |= {"messages": comm.traffic.messages_sent - messages, "arrivals": arrivals}
    return results | {"parameters": flat(model.parameters())}


def buckets_of(limit: int, sizes: Sequence[int] = BYTES, strictly: bool = False) -> list[int]:
    """Return the number of each parameter's bucket."""
    numbers, number, held = list[int](), 0, 0
    for size in reversed(sizes):
        if held >= limit + strictly:
            number, held = number + 1, 0
        numbers.append(number)
        held += size
    return numbers[::-1]


def judge_assign(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each parameter is in its bucket."""
    limit, found = int(case.given[0]["limit"]), results[0]["buckets"].tolist()
    wrong: Mapping[str, list[int]] = {
        "parameters are dealt out from the first one on": buckets_of(limit, BYTES[::-1])[::-1],
        "elements are counted instead of bytes": buckets_of(limit, SIZES),
        "a bucket is closed only when it holds more than the limit": buckets_of(limit, strictly=True),
    }
    why = next((f"this is what comes out if {story}" for story, other in wrong.items() if other == found), "")
    expect(0, f"with limit {limit}, parameters of {BYTES} bytes are in", results[0]["buckets"], buckets_of(limit), why)


def judge_bucketed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks train as one; each bucket was launched when it was complete, and waited for when all were."""
    given = case.given[0]
    itemsize = given["parameters"].itemsize
    steps, bucket = len(given["inputs"]), buckets_of(int(given["limit"]) * 8 // itemsize)
    for rank, result in enumerate(results):
        launches = []
        for arrivals in result["arrivals"].reshape(steps, 6).tolist():
            last = [max(at for at, p in enumerate(arrivals) if bucket[p] <= number) for number in range(bucket[0] + 1)]
            launches += [len(launches) // len(last) * 6 + 1 + at for at in last]
        if len(result["launches"]) != len(launches):
            raise Wrong(
                f"rank {rank}: {len(result['launches'])} buckets were launched in {steps} steps, expected "
                f"{len(launches)}: does every step launch each bucket once, and `finish` prepare for the next?"
            )
        why = "one gradient may complete the bucket that is next and those that waited for it"
        expect(rank, "buckets that were launched when backward had ended:", result["late"].sum(), 0, why)
        why = "a bucket leaves with its last gradient, if those before it have left"
        expect(
            rank, "bucket by bucket, gradients that had come when it was launched:", result["launches"], launches, why
        )
        expect(rank, "messages sent:", result["messages"], 2 * (case.ranks - 1) * len(launches), "one ring a bucket")
        waits, why = np.repeat(6 * np.arange(1, steps + 1), bucket[0] + 1).tolist(), "after backward, once for each"
        expect(rank, "bucket by bucket, gradients that had come when it was waited for:", result["waits"], waits, why)
    sent, bytes = sum(result["bytes"] for result in results), 2 * (case.ranks - 1) * sum(SIZES) * itemsize * steps
    expect(0, "bytes sent, by all ranks:", sent, bytes, f"a number of this model has {itemsize} bytes")
    judge_trained(case, results)
