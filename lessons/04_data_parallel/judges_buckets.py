"""Lesson 04, task 3: the programs that fill buckets, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import eq
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from judges import (
    BYTES,
    SIZES,
    Towers,
    descend,
    expect,
    flat,
    judge_trained,
    part_of_loss,
    steps_of,
)

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, known

HOW_OFTEN = ": does every step launch each bucket once, and `finish` prepare for the next?"


def assign(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the first half of task 3."""
    model = Towers(given)
    found = exercise.assign_buckets(list(model.parameters()), int(given["limit"]))
    if empty := [number for number, some in enumerate(found) if not some]:
        raise Wrong(
            f"buckets {empty} of {len(found)} are empty, expected none: is one opened that "
            "nothing comes into?"
        )
    bucket = {id(parameter): number for number, some in enumerate(found) for parameter in some}
    return {"buckets": [bucket.get(id(parameter), -1) for parameter in model.parameters()]}


def bucketed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the second half of task 3 in a loop; note how many gradients had come at each launch, and
    at each wait.
    """
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
    messages, bytes = comm.traffic.messages, comm.traffic.bytes
    for inputs, targets in steps_of(given):
        # quiet: first only add up
        for synchronising in [False, True] if given["quiet"] else [True]:
            gradients.synchronising, backward[0] = synchronising, True
            part_of_loss(model, inputs, targets, comm.rank, comm.size).backward()
            backward[0] = False
        gradients.finish()
        results.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    results |= {
        "launches": launches,
        "waits": waits,
        "late": late,
        "bytes": comm.traffic.bytes - bytes,
    }
    results |= {"messages": comm.traffic.messages - messages, "arrivals": arrivals}
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


def closed_before(limit: int, sizes: Sequence[int] = BYTES) -> list[int]:
    """Return them, if a bucket is closed before a parameter that would take it beyond the limit."""
    numbers, number, held = list[int](), 0, 0
    for size in reversed(sizes):
        if held and held + size > limit:
            number, held = number + 1, 0
        numbers.append(number)
        held += size
    return numbers[::-1]


def never_reset(limit: int, sizes: Sequence[int] = BYTES) -> list[int]:
    """Return them, if from the first full bucket on every parameter closes one."""
    # by parameter: is it the last of its bucket
    first = [sum(sizes[number:]) >= limit for number in range(len(sizes))]
    return [sum(first[number + 1 :]) for number in range(len(sizes))]


def full(limit: int, sizes: Sequence[int] = BYTES) -> bool:
    """Tell whether the last bucket is closed."""
    numbers = buckets_of(limit, sizes)
    return (
        sum(size for size, number in zip(sizes, numbers, strict=True) if number == numbers[0])
        >= limit
    )


def other_buckets(limit: int, bytes: Sequence[int] = BYTES) -> dict[str, list[int]]:
    """Return what known mistakes give, by clause."""
    return {
        "parameters are dealt out from the first one on": buckets_of(limit, bytes[::-1])[::-1],
        "elements are counted instead of bytes": buckets_of(limit, SIZES),
        "a bucket is closed only when it holds more than the limit": buckets_of(
            limit, bytes, strictly=True
        ),
        "the bytes are not counted from 0 again when a bucket is closed": never_reset(limit, bytes),
        "the bucket that is still open at the end is left out": [
            -1 if number == max(buckets_of(limit, bytes)) and not full(limit, bytes) else number
            for number in buckets_of(limit, bytes)
        ],
        "each parameter has a bucket of its own": list(range(len(bytes)))[::-1],
        "a bucket is closed before a parameter that would take it beyond the limit: it is closed "
        "once it holds the limit or more": closed_before(limit, bytes),
    }


def launches_of(bucket: Sequence[int], arrivals: Array) -> list[int]:
    """Return how many gradients have come when each bucket can be launched, given arrivals [step,
    parameter].
    """
    launches = list[int]()
    for step, of_step in enumerate(arrivals.tolist()):
        for number in range(max(bucket) + 1):
            last = max(at for at, p in enumerate(of_step) if bucket[p] <= number)
            launches.append(6 * step + 1 + last)
    return launches


def judge_assign(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each parameter is in its bucket."""
    limit, found = int(case.given[0]["limit"]), results[0]["buckets"].tolist()
    why = known(other_buckets(limit), partial(eq, found)).removeprefix(": ")
    expect(
        0,
        f"with limit {limit}, parameters of {BYTES} bytes are in",
        results[0]["buckets"],
        buckets_of(limit),
        why,
    )


def judge_bucketed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks train as one; each bucket was launched when it was complete, and waited for when
    all were.
    """
    given = case.given[0]
    itemsize = given["parameters"].itemsize
    steps, bucket = len(given["inputs"]), buckets_of(int(given["limit"]) * 8 // itemsize)
    for rank, result in enumerate(results):
        arrivals = result["arrivals"].reshape(steps, 6)
        launches, found = launches_of(bucket, arrivals), result["launches"].tolist()
        bytes = [itemsize * size for size in SIZES]
        at_the_end = np.repeat(6 * np.arange(1, steps + 1), max(bucket) + 1).tolist()
        others = {"all buckets are launched when the last gradient has come": at_the_end}
        others |= {
            story: launches_of(other, arrivals)
            for story, other in other_buckets(int(given["limit"]), bytes).items()
        }
        if given["quiet"] and found and min(found) < min(launches):
            early = [at for at, right in zip(found, launches, strict=False) if at < right]
            raise Wrong(
                f"rank {rank}: buckets were launched when {early} gradients had come, expected "
                f"{launches}: in the backward before, while synchronising is False, nothing may "
                "be launched, nor counted as having come"
            )
        hint = known(others, partial(eq, found)) if found != launches else ""
        if len(result["launches"]) != len(launches):
            raise Wrong(
                f"rank {rank}: {len(result['launches'])} buckets were launched in {steps} steps, "
                f"expected {len(launches)}{hint or HOW_OFTEN}"
            )
        why = "one gradient may complete the bucket that is next and those that waited for it"
        if result["late"].sum() == len(launches):
            why = "the hook that completes a bucket launches it, and not `finish`"
        expect(
            rank,
            "buckets that were launched when backward had ended:",
            result["late"].sum(),
            0,
            why,
        )
        why = (
            hint.removeprefix(": ")
            or "a bucket leaves with its last gradient, if those before it have left"
        )
        expect(
            rank,
            "bucket by bucket, gradients that had come when it was launched:",
            result["launches"],
            launches,
            why,
        )
        waits, when = (
            np.repeat(6 * np.arange(1, steps + 1), bucket[0] + 1).tolist(),
            "after backward, once for each",
        )
        expect(
            rank,
            "bucket by bucket, gradients that had come when it was waited for:",
            result["waits"],
            waits,
            when,
        )
        expect(
            rank,
            "messages sent:",
            result["messages"],
            2 * (case.ranks - 1) * len(launches),
            "one ring a bucket",
        )
    sent, bytes = (
        sum(result["bytes"] for result in results),
        2 * (case.ranks - 1) * sum(SIZES) * itemsize * steps,
    )
    expect(
        0, "bytes sent, by all ranks:", sent, bytes, f"a number of this model has {itemsize} bytes"
    )
    judge_trained(case, results)
