"""Weights of stages that wait: the plan is right, no step is longer, no bit changes, and the bytes are
gone while they are away.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import build
from layouts import Case, one_step, spread
from test_pipeline import DEEP, ROWS, TIED, data, loss
from torch import Tensor, nn

import minidist
from minidist.full.comm import Communicator
from minidist.full.memory.account import Account
from minidist.full.mesh import Layout
from minidist.full.model import GPTConfig
from minidist.full.pipeline import (
    Action,
    Kind,
    Plan,
    ScheduleError,
    check,
    plan,
    read_plan,
    simulate,
    with_communication,
    with_offload,
)
from minidist.full.pipeline.actions import TRANSFERS
from minidist.full.pipeline.executor import Pipeline, Run
from minidist.full.pipeline.offload.host import HostMemory, Port
from minidist.full.pipeline.stage import balance, take_stages, tie_stages, tied_names
from minidist.full.recipe import RecipeError
from minidist.further import Recipe

PLANS = [
    plan("interleaved", 1, 3, 3),
    plan("interleaved", 2, 4, 2),
    plan("interleaved", 4, 8, 2),
    plan("interleaved", 3, 6, 4),
    plan("zb1p", 2, 4, 4),
    plan("zb1p", 4, 8, 3),
    plan("zb-v", 4, 8),
    plan("dualpipe-v", 3, 7),
    read_plan("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1F0 1F1 1B0 1B1"),
]
COPIES = (0.0, 0.3, 1.0, 2.0, 3.5, 100.0)  # how many forwards a copy takes


def without(leaving: Plan) -> Plan:
    """Return the plan without its copies."""
    rows = (tuple(a for a in row if a.kind not in TRANSFERS) for row in leaving.actions)
    return replace(leaving, actions=tuple(rows))


# ---------------------------------------------------------------- the plan, and its time


@pytest.mark.parametrize("copy", COPIES)
def test_every_action_still_begins_when_it_did(copy: float) -> None:
    draw = random.Random(1)
    left = 0
    for each in PLANS:
        for costs in (
            {},
            {"forward": draw.random(), "backward": 2 * draw.random(), "latency": 0.1},
        ):
            leaving = with_offload(each, copy, **costs)
            check(leaving)
            assert without(leaving) == each
            before = simulate(each, **costs)
            after = simulate(leaving, transfer=copy, **costs)
            assert after.length == before.length and after.bubble == before.bubble
            for rank in range(each.ranks):
                assert after.spans(rank) == before.spans(rank)
                left += check_port(leaving, after.transfers(rank))
    assert left > 0 if copy < 100 else left == 0


def check_port(leaving: Plan, transfers: list[tuple[Action, float, float]]) -> int:
    """Check that a rank makes one copy at a time, and frees something in each pause; return how
    many pauses there are.
    """
    left: dict[int, float] = {}
    free = 0.0
    for action, start, end in transfers:
        assert start >= free
        free = end
        if action.kind == Kind.OFFLOAD:
            left[action.stage] = end
        else:
            assert start > left.pop(action.stage)
    assert left == {}
    return len(transfers) // 2


def test_a_link_that_is_slower_than_was_said_makes_the_step_longer() -> None:
    """Else the clock would price nothing."""
    for each in PLANS:
        leaving = with_offload(each, 1.0)
        if leaving.offloads:
            before, late = simulate(each), simulate(leaving, transfer=30.0)
            assert late.length > before.length
            # and not only because the last copy ends late
            starts = [[start for _, start, _ in late.spans(rank)] for rank in range(each.ranks)]
            assert any(start != [*then] for start, then in zip(starts, before.start, strict=True))


def test_by_hand() -> None:
    """One rank, three stages, forwards of 1 and backwards of 2, copies of 3/4."""
    leaving = with_offload(plan("interleaved", 1, 1, 3), 0.75)
    assert leaving.text() == ("0F0 0OFF0 1F0 1OFF0 2F0 1FETCH0 2B0 0FETCH0 2OFF0 1B0 2FETCH0 0B0\n")
    transfers = simulate(leaving, transfer=0.75).transfers(0)
    assert [(str(action), start, end) for action, start, end in transfers] == [
        ("0OFF0", 1.0, 1.75),
        ("1OFF0", 2.0, 2.75),
        ("1FETCH0", 3.0, 3.75),  # as late as it can: 1B0 begins at 5, and the place before is at 3
        ("0FETCH0", 5.0, 5.75),
        ("2OFF0", 5.75, 6.5),  # the port makes one copy at a time
        ("2FETCH0", 7.0, 7.75),
    ]


def test_weights_are_copied_to_the_host_once_a_step() -> None:
    """A stage that leaves again frees its memory at once: its copy is still right."""
    for each in PLANS:
        again = 0
        for rank in range(each.ranks):
            for action, start, end in simulate(with_offload(each, 0.5), transfer=0.5).transfers(
                rank
            ):
                first = action.kind == Kind.FETCH or action.microbatch == 0
                assert end - start == pytest.approx(0.5 if first else 0.0)
                again += not first
        assert again > 0 or each.microbatches < 4


@pytest.mark.parametrize(
    ("name", "chunks", "most"), (("interleaved", 4, 3), ("interleaved", 2, 2), ("zb-v", 2, 1))
)
def test_stages_that_are_there_at_the_peak_of_activations(
    name: str, chunks: int, most: int
) -> None:
    """As `docs/combinations.md` has it."""
    leaving = with_offload(plan(name, 4, 16, chunks), 1.0)
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUTS: -1}
    for rank, row in enumerate(leaving.actions):
        waiting, here = 0, len(leaving.stages_of(rank))
        held: dict[int, int] = {}  # most stages, by how many activations there are
        for action in row:
            waiting += change.get(action.kind, 0)
            here += (action.kind == Kind.FETCH) - (action.kind == Kind.OFFLOAD)
            held[waiting] = max(here, held.get(waiting, 0))
        assert held[max(held)] == most


def test_messages_and_reductions_go_around_the_copies() -> None:
    for each in PLANS:
        leaving = with_offload(each, 0.5)
        for reduce in (False, True):
            whole = with_communication(leaving, reduce=reduce)
            check(whole)
            assert read_plan(whole.text()) == whole
            assert without(whole) == with_communication(each, reduce=reduce)
        assert with_communication(leaving).compute_only() == leaving


@pytest.mark.parametrize(
    ("text", "sentence", "marked"),
    [
        ("1OFF0 0F0 1FETCH0 1F0 1B0 0B0", "", ""),
        ("1OFF0 0F0 1F0 1FETCH0 1B0 0B0", "1F0 stands before 1FETCH0, but needs", "[1F0]"),
        ("0F0 1F0 0OFF0 1B0 0B0 0FETCH0", "0B0 stands before 0FETCH0, but needs", "[0B0]"),
        ("0F0 0I0 0OFF0 1F0 1B0 0W0 0FETCH0", "0W0 stands before 0FETCH0, but needs", "[0W0]"),
        ("0F0 1F0 1B0 1OFF0 0B0", "1FETCH0 is missing: the step ends without", "[1OFF0]"),
        ("0F0 1FETCH0 1F0 1B0 0B0", "1FETCH0 stands where no weights of stage 1 are away", "[1FET"),
        ("1OFF0 1OFF1 0F0 1FETCH0 1F0 1B0 0B0", "1OFF1 stands before 1FETCH0, so", "[1OFF1]"),
        ("1OFF1 0F0 1FETCH1 1F0 1B0 0B0", "1OFF1 should be 1OFF0: stage 1 has come", "[1OFF1]"),
        ("1OFF0 0F0 1FETCH1 1F0 1B0 0B0", "1FETCH1 should be 1FETCH0: stage 1 has", "[1FETCH1]"),
        ("1OFF0 0F0 1FETCH0 1F0 1B0 1OFF0 0B0 1FETCH1", "1OFF0 stands twice", "[1OFF0]"),
        ("0F0 1OFF0 0B0 1FETCH0\n1F0 1B0", "1OFF0 stands on rank 0, but stage 1 is", "[1OFF0]"),
        ("1OFF 0F0 1F0 1B0 0B0", "'1OFF' is no action", "[1OFF]"),
    ],
)
def test_what_the_checker_says(text: str, sentence: str, marked: str) -> None:
    if not sentence:
        check(read_plan(text))
        return
    with pytest.raises(ScheduleError) as caught:
        check(read_plan(text) if "\n" not in text else replace(read_plan(text), rank_of=(0, 1)))
    first, _, rest = str(caught.value).partition("\n")
    assert sentence in first and marked in rest


def test_every_copy_that_is_left_out_is_found() -> None:
    for each in PLANS:
        leaving = with_offload(each, 0.3)
        for rank, row in enumerate(leaving.actions):
            for at, action in enumerate(row):
                if action.kind in TRANSFERS:
                    rows = [*leaving.actions]
                    rows[rank] = row[:at] + row[at + 1 :]
                    with pytest.raises(ScheduleError):
                        check(replace(leaving, actions=tuple(rows)))


def test_plans_in_which_no_stage_can_leave() -> None:
    with pytest.raises(ValueError, match="no rank of the plan 1f1b has several stages"):
        with_offload(plan("1f1b", 4, 8), 1.0)
    some = plan("zb-v", 2, 4)
    for added in (with_communication(some), with_offload(some, 0.5)):
        with pytest.raises(ValueError, match="has more than what is computed"):
            with_offload(added, 0.5)
    with pytest.raises(ValueError, match="is no time: give numbers"):
        with_offload(some, -1.0)
    assert with_offload(some, 1e9) == some


# ---------------------------------------------------------------- carried out


def pipeline(comm: Communicator, config: GPTConfig, schedule: Plan) -> Pipeline:
    """Return this rank's part."""
    whole = build(config, 0)
    parts, tied = balance([1.0] * config.layers, schedule.stages), tied_names(whole)

    def carried(tokens: Tensor) -> Tensor:
        return torch.empty(len(tokens), 8, config.hidden, dtype=torch.float64, device="meta")

    stages = take_stages(whole, parts, schedule.stages_of(comm.rank))
    ties = tie_stages(whole, tied, comm)
    return Pipeline(stages, comm, with_communication(schedule), loss, carried, ties)


def parameters_of(pipe: Pipeline) -> dict[str, nn.Parameter]:
    return {n: p for module in pipe.stages.values() for n, p in module.named_parameters()}


def trained(
    comm: Communicator, config: GPTConfig, schedule: Plan
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the parameters after three steps, and the losses."""
    pipe = pipeline(comm, config, schedule)
    mine = parameters_of(pipe)
    optimizer = torch.optim.AdamW(list({p for p in mine.values() if p.requires_grad}), lr=0.02)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        tokens, where = data(step)
        inputs, targets = [t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens]
        losses.append(float(pipe.step(inputs, targets, where)))
        if step == 1:
            losses.append(float(pipe.evaluate(inputs, targets, where)))
        optimizer.step()
        for parameter in mine.values():
            parameter.detach().numpy()  # torch does not resize what numpy has seen
    return {name: p.detach().clone() for name, p in mine.items()}, losses


@pytest.mark.parametrize(
    "config", (pytest.param(DEEP, marks=pytest.mark.soak), TIED), ids=("untied", "tied")
)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    (("interleaved", 2, 4), ("zb1p", 2, 4), ("zb-v", 2, 2), ("dualpipe-v", 4, 2), ("zb1p", 1, 3)),
)
def test_no_bit_changes(name: str, ranks: int, chunks: int, config: GPTConfig) -> None:
    schedule = plan(name, ranks, len(ROWS), chunks)
    leaving = with_offload(schedule, 0.5)
    assert leaving.offloads
    stayed = minidist.run(partial(trained, config=config, schedule=schedule), ranks)
    left = minidist.run(partial(trained, config=config, schedule=leaving), ranks)
    for (expected, losses), (found, others) in zip(stayed, left, strict=True):
        assert losses == others
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_weights_are_copied_to_the_host_once_however_often_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not change within a step, so what leaves again is freed without a copy."""
    leaving = with_offload(plan("interleaved", 2, len(ROWS), 4), 0.5)
    copies: Counter[int] = Counter()
    copy = Port.copy

    def counted(port: Port, target: Tensor, source: Tensor) -> None:
        copies[id(port)] += 1
        copy(port, target, source)

    monkeypatch.setattr(Port, "copy", counted)

    def program(comm: Communicator) -> tuple[int, int]:
        pipe = pipeline(comm, DEEP, leaving)
        tokens, where = data(0)
        pipe.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens], where)
        expected = 0
        for action in leaving.actions[comm.rank]:
            if action.kind in TRANSFERS and (action.kind == Kind.FETCH or action.microbatch == 0):
                expected += len(pipe.host.weights[action.stage].parameters)
        return copies[id(pipe.host.port)], expected

    rows = [[a for a in row if a.kind == Kind.OFFLOAD] for row in leaving.actions]
    assert any(action.microbatch > 0 for row in rows for action in row)
    for found, expected in minidist.run(program, 2):
        assert found == expected


def after_each_action(do: Callable[[Run, Action], None]) -> Any:
    """Return `Run.do` that calls `do` after each action, when the host's port has done its work."""
    before = Run.do

    def replaced(self: Run, action: Action) -> None:
        before(self, action)
        if port := self.pipeline.host.port:
            port.worker.submit(lambda: None).result()
        do(self, action)

    return replaced


@pytest.mark.parametrize(
    "config", (pytest.param(DEEP, marks=pytest.mark.soak), TIED), ids=("untied", "tied")
)
@pytest.mark.parametrize("name", ("interleaved", "zb1p", "zb-v"))
def test_the_bytes_are_those_of_the_stages_that_are_there(
    name: str, config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each action of two steps, to the byte; a parameter that two stages share stays."""
    leaving = with_offload(plan(name, 2, len(ROWS), 2 if name == "zb-v" else 4), 0.5)

    def program(comm: Communicator) -> tuple[int, int, float]:
        pipe = pipeline(comm, config, leaving)
        whole = nn.ModuleList(pipe.stages.values())
        users = Counter(p for module in pipe.stages.values() for p in set(module.parameters()))
        shared = {p for p, count in users.items() if count > 1}
        bytes = {
            stage: sum(p.nbytes for p in module.parameters() if p not in shared)
            for stage, module in pipe.stages.items()
        }
        everything = sum(p.nbytes for p in users)
        account = Account()
        account.watch(whole)
        before = account.sample()["parameters"]
        assert before >= everything
        buffers = before - everything
        away: set[int] = set()
        seen = []

        def note(run: Run, action: Action) -> None:
            if run.pipeline is not pipe:
                return
            if action.kind == Kind.OFFLOAD:
                away.add(action.stage)
            elif action.kind == Kind.FETCH:
                away.remove(action.stage)
            held = account.sample()["parameters"] - buffers
            assert held == everything - sum(bytes[stage] for stage in away), str(action)
            seen.append(held / everything)

        notes[comm.rank] = note
        for step in range(2):
            tokens, where = data(step)
            pipe.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens], where)
            assert away == set() and account.sample()["parameters"] == before
            for parameter in users:
                parameter.detach().numpy()
        return len(seen), len(shared), min(seen)

    notes: dict[int, Callable[[Run, Action], None]] = {}

    def do(run: Run, action: Action) -> None:
        notes[run.pipeline.comm.rank](run, action)

    monkeypatch.setattr(Run, "do", after_each_action(do))
    found = minidist.run(program, 2)
    rows = with_communication(leaving).actions
    assert [count for count, _, _ in found] == [2 * len(row) for row in rows]
    # the first and the last stage are on one rank in a V
    assert sum(shared for _, shared, _ in found) == (config is TIED and name == "zb-v")
    least = 0.8 if name == "zb-v" else 0.6
    assert min(held for _, _, held in found) < least


def test_computing_goes_on_beside_a_copy_and_waits_where_it_needs_it() -> None:
    """The port is kept busy: `offload` and `fetch` return at once, `ready` does not."""
    stage = nn.Linear(8, 8)
    expected = stage.weight.detach().clone()
    host = HostMemory({0: stage}, [0])
    assert host.port is not None
    gate = threading.Event()
    host.port.worker.submit(gate.wait)
    host.begin()
    host.offload(0, copy=True)
    host.fetch(0)
    assert stage.weight.untyped_storage().nbytes() == expected.nbytes
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    host.ready(0)
    assert gate.is_set() and torch.equal(stage.weight, expected)
    host.offload(0, copy=False)
    host.port.worker.submit(lambda: None).result()
    assert stage.weight.untyped_storage().nbytes() == 0
    host.finish()
    assert torch.equal(stage.weight, expected)


def test_an_error_leaves_no_parameter_without_its_values() -> None:
    leaving = with_offload(plan("interleaved", 1, len(ROWS), 4), 0.5)

    def program(comm: Communicator) -> None:
        pipe = pipeline(comm, DEEP, leaving)
        mine = parameters_of(pipe)
        before = {name: p.detach().clone() for name, p in mine.items()}
        pipe.loss = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
        tokens, where = data(0)
        with pytest.raises(ZeroDivisionError):
            pipe.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens], where)
        assert all(torch.equal(p, before[name]) for name, p in mine.items())

    minidist.run(program, 1)


def test_weights_in_one_buffer_cannot_leave_alone() -> None:
    stage = nn.Linear(2, 2, bias=False)
    stage.weight.data = torch.zeros(8)[:4].view(2, 2)
    with pytest.raises(ValueError, match="the weights of stage 3 lie in one buffer with others"):
        HostMemory({3: stage}, [3])


# ---------------------------------------------------------------- asked for in a recipe


@pytest.mark.parametrize("layout", (Layout(dp=2, pp=2), Layout(pp=2, tp=2)), ids=str)
def test_a_recipe_changes_no_bit(layout: Layout) -> None:
    """Beside data and tensor parallelism, with recomputation."""
    recipe = Recipe(schedule="interleaved", chunks=2, microbatches=4, recompute="full")

    def program(comm: Communicator, offload: float) -> list[Tensor]:
        case = Case(layout, replace(recipe, offload_stages=offload), batch=8)
        parallel = spread(comm, case)
        assert parallel.pipeline is not None
        assert parallel.pipeline.plan.offloads == (offload > 0)
        for step in range(2):
            parallel.zero_grad()
            one_step(parallel, case, step)
            with torch.no_grad():
                for parameter in parallel.model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        return [p.detach() for p in parallel.model.parameters()]

    stayed, left = (minidist.run(partial(program, offload=t), 4) for t in (0.0, 0.5))
    for expected, found in zip(stayed, left, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


CHUNKED = Recipe(schedule="interleaved", chunks=2, microbatches=4, offload_stages=0.5)


@pytest.mark.parametrize(
    ("layout", "recipe", "sentence"),
    [
        (
            Layout(pp=2),
            Recipe(offload_stages=1.0),
            "offload_stages=1 is for ranks with several stages, of which all but one wait: use the",
        ),
        (Layout(dp=2), Recipe(offload_stages=1.0), "is for ranks with several stages"),
        (
            Layout(dp=2, pp=2),
            replace(CHUNKED, zero=1),
            "offload_stages=0.5 does not go with ZeRO 1, which keeps weights of several stages in",
        ),
        (
            Layout(pp=2),
            replace(CHUNKED, offload_stages=50.0),
            "offload_stages=50, but no stage waits for as long as weights take to leave and to",
        ),
        (Layout(pp=2), replace(CHUNKED, offload_stages=-1.0), "a copy takes no negative time"),
        (
            Layout(pp=2),
            Recipe(schedule=with_offload(plan("zb-v", 2, 4), 0.5), offload_stages=0.5),
            "the plan has its OFF and FETCH already",
        ),
        (
            Layout(dp=2, pp=2),
            Recipe(schedule=with_offload(plan("zb-v", 2, 4), 0.5), zero=1),
            "a plan with OFF and FETCH does not go with ZeRO 1",
        ),
    ],
)
def test_recipes_that_are_refused(layout: Layout, recipe: Recipe, sentence: str) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(RecipeError, match=sentence):
            spread(comm, Case(layout, recipe))

    minidist.run(program, layout.size)
