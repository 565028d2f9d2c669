"""Plans for a budget: the best of all that there are, proved by replaying them, and carried out by
`recompute`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

import pytest
import torch

from minidist.full.model import GPT, GPTConfig
from minidist.full.recompute.segments import Plan, recompute, stages_of
from minidist.plan.memory.chain import Chain, Stage, best_plan, tradeoff


def equal_chain(length: int, saved: int = 0) -> Chain:
    return Chain((Stage(1, 2, output=1, saved=saved),) * length, input=1)


def random_chain(length: int, seed: int) -> Chain:
    draws = random.Random(seed)
    stages = [
        Stage(draws.randint(1, 9), draws.randint(1, 9), draws.randint(1, 9), draws.randint(0, 20))
        for _ in range(length)
    ]
    return Chain(tuple(stages), input=draws.randint(1, 9))


class Operation(NamedTuple):
    """One step of a plan, at a stage.

    `forward` computes x_{l+1} and drops x_l; `keep` computes x_{l+1} and keeps x_l; `store` also
    keeps what backward needs.
    """

    verb: Literal["forward", "keep", "store", "backward"]
    stage: int


def operations(plan: Plan) -> list[Operation]:
    """Return the steps of `plan`, forward and backward, in order."""
    if not plan:
        return []
    first, rest = plan[0], plan[1:]
    if isinstance(first, int):
        return [Operation("store", first), *operations(rest), Operation("backward", first)]
    start, *others = stages_of(first)
    passing = [Operation("keep", start), *(Operation("forward", stage) for stage in others)]
    return passing + operations(rest) + operations(first)


def replay(steps: Iterable[Operation], chain: Chain) -> tuple[float, int]:
    """Return the seconds and the peak of bytes that `steps` take; the proof of a plan, which shares
    no line with it.

    The gradient of the last output has its room from the start.

    Raises
    ------
    ValueError
        If an operation lacks what it needs, or a stage gets no backward.
    """
    count = len(chain.stages)
    time, peak = 0.0, 0
    size = [chain.input, *(stage.output for stage in chain.stages)]
    memory = {("x", 0): size[0], ("gradient", count): size[count]}
    for step in steps:
        stage, cost = step.stage, chain.stages[step.stage]
        needed = {("x", stage)}
        if step.verb == "backward":
            needed |= {("saved", stage), ("gradient", stage + 1)}
            memory.pop(("x", stage + 1), None)  # the output itself is of no use to its own backward
            memory[("gradient", stage)] = size[stage]
        else:
            memory[("x", stage + 1)] = cost.output
        if step.verb == "store":
            memory[("saved", stage)] = cost.saved
        if missing := needed - memory.keys():
            raise ValueError(
                f"{step.verb} {stage} needs {sorted(missing)}, which memory does not hold"
            )
        time += cost.backward if step.verb == "backward" else cost.forward
        peak = max(peak, sum(memory.values()))
        if step.verb == "forward":
            del memory[("x", stage)]
        elif step.verb == "backward":
            for name in needed:
                del memory[name]
    if memory.keys() != {("gradient", 0)}:
        raise ValueError(
            f"the end of the plan leaves {sorted(memory)}, not the gradient of the input alone"
        )
    return time, peak


@cache
def all_plans(start: int, end: int) -> list[Plan]:
    """Every way to put parentheses, where none encloses nothing but another."""
    if start == end:
        return [()]
    found: list[Plan] = [(start, *rest) for rest in all_plans(start + 1, end)]
    for split in range(start + 1, end + 1):
        inside = (
            [plan for plan in all_plans(start, split) if isinstance(plan[0], int) or len(plan) > 1]
            if split < end
            else []
        )
        inside += [tuple(range(start, split))] if split == end else []
        found += [(plan, *rest) for plan in inside for rest in all_plans(split, end)]
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_beats_the_best_one(length: int, seed: int) -> None:
    chain = random_chain(length, seed)
    outcomes = [replay(operations(plan), chain) for plan in all_plans(0, length)]
    peaks = sorted({peak for _, peak in outcomes})
    for budget in peaks:
        found = best_plan(chain, budget)
        assert found.time == min(time for time, peak in outcomes if peak <= budget)
        assert replay(operations(found.plan), chain) == (found.time, found.peak)
    with pytest.raises(ValueError, match=f"the smallest budget that works is {peaks[0]},"):
        best_plan(chain, peaks[0] - 1)


@pytest.mark.parametrize("points", [500, 5])
def test_long_chains(points: int) -> None:
    """The replay gives the time and the bytes promised, for every plan of the tradeoff; thinning
    keeps them true.
    """
    chain = random_chain(24, seed=9)
    solutions = tradeoff(chain, points)
    assert len(solutions) > 4
    for solution in solutions:
        assert replay(operations(solution.plan), chain) == (solution.time, solution.peak)
    for quick, slow in zip(solutions[1:], solutions, strict=False):
        assert quick.peak > slow.peak and quick.time < slow.time
    assert solutions[-1].time == sum(stage.forward + stage.backward for stage in chain.stages)
    assert solutions[0].peak == tradeoff(chain, 500)[0].peak


@pytest.mark.parametrize("root", [3, 4, 5, 6])
def test_the_textbook_segments_of_root_l_need_two_root_l_activations(root: int) -> None:
    """And one more forward at most; beside them, what any plan needs: one activation and two
    gradients.
    """
    chain = equal_chain(root**2)
    plan = tuple(tuple(range(start, start + root)) for start in range(0, root**2, root))
    time, peak = replay(operations(plan), chain)
    assert 2 * root <= peak <= 2 * root + 3
    assert time == 4 * root**2
    assert replay(operations(tuple(range(root**2))), chain) == (3 * root**2, root**2 + 2)
    best = best_plan(chain, peak)
    assert best.peak <= peak and best.time < time
    assert best_plan(chain, 10**9).plan == tuple(range(root**2))
    assert tradeoff(chain)[0].peak < peak, "nested, with even less memory"


def test_a_replay_finds_what_is_missing() -> None:
    chain = equal_chain(2)
    with pytest.raises(ValueError, match=r"backward 1 needs \[\('saved', 1\)\]"):
        replay([Operation("store", 0), Operation("keep", 1), Operation("backward", 1)], chain)
    with pytest.raises(ValueError, match=r"store 0 needs \[\('x', 0\)\]"):
        replay([Operation("forward", 0), Operation("store", 0)], chain)
    with pytest.raises(
        ValueError, match=r"leaves \[\('gradient', 1\), \('saved', 0\), \('x', 0\)\]"
    ):
        replay(operations((0, 1))[:-1], chain)


def test_a_chain_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="a chain of 0 stages"):
        best_plan(Chain((), input=1), 10)


def test_recompute_carries_a_plan_out_as_it_is_replayed() -> None:
    """Each block counts how often it is run: as often as the operations say."""
    chain = equal_chain(6, saved=3)
    plan = tradeoff(chain)[0].plan
    assert any(
        isinstance(part, tuple) and any(isinstance(inner, tuple) for inner in part) for part in plan
    ), "nested"
    stored, model = (
        GPT(GPTConfig(vocabulary=9, layers=6, hidden=8, heads=2), dtype=torch.float64)
        for _ in range(2)
    )
    recompute(model, plan)
    runs: list[int] = []
    for index in range(6):
        model.layers[index].register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    tokens = torch.arange(8)[None]
    for each in (stored, model):
        each(tokens).square().sum().backward()
    assert runs == [step.stage for step in operations(plan) if step.verb != "backward"]
    for ours, theirs in zip(model.parameters(), stored.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
