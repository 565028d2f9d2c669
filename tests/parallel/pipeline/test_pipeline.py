"""Pipelines: the serial numbers from every schedule, counted messages, and no stage that holds more
than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, build
from layouts import Case, one_step, spread
from ranks import mpirun, torchrun
from test_hidden_behind_computing import HIDDEN, Layer, began
from torch import Tensor, nn

import minidist
from minidist import Cluster
from minidist.full.comm import Communicator
from minidist.full.ddp.strategy import DataParallel
from minidist.full.mesh import Layout
from minidist.full.model import GPTConfig, Where, cross_entropy_sum
from minidist.full.pipeline.actions import Action
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.executor import Pipeline, Run
from minidist.full.pipeline.schedules import plan
from minidist.full.pipeline.stage import balance, take_stages, tie_stages, tied_names
from minidist.full.trace import Trace
from minidist.further import Recipe

DEEP = GPTConfig(**(vars(CONFIG) | {"layers": 8, "dropout": 0.2, "tied": False}))
TIED = GPTConfig(**(vars(DEEP) | {"tied": True}))
ROWS = (2, 1, 3, 1, 2, 2, 1, 1)  # of the microbatches: uneven
STEPS = 2


def data(step: int) -> tuple[list[Tensor], list[Where]]:
    """Return the tokens of each microbatch, and where its rows lie in the global batch."""
    tokens = torch.randint(19, (sum(ROWS), 9), generator=torch.Generator().manual_seed(step))
    firsts = [sum(ROWS[:number]) for number in range(len(ROWS))]
    return list(tokens.split(ROWS)), [Where(seed=5, step=step, rows=first) for first in firsts]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy_sum(logits, targets) / (sum(ROWS) * 8)


@cache
def serial(config: GPTConfig, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return the parameters and losses of a run without a pipeline."""
    model, losses = build(config, 0), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        total = sum(loss(model(t[:, :-1], w), t[:, 1:]) for t, w in zip(*data(step), strict=True))
        total.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(total.detach()))  # type: ignore[union-attr]
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}, losses


def pipeline(comm: Communicator, config: GPTConfig, name: str, chunks: int = 1) -> Pipeline:
    """Return this rank's part."""
    schedule = with_communication(plan(name, comm.size, len(ROWS), chunks))
    whole = build(config, 0)
    parts, tied = balance([1.0] * config.layers, schedule.stages), tied_names(whole)

    def carried(tokens: Tensor) -> Tensor:
        return torch.empty(len(tokens), 8, config.hidden, dtype=torch.float64, device="meta")

    mine = schedule.stages_of(comm.rank)
    stages = take_stages(whole, parts, mine)
    return Pipeline(stages, comm, schedule, loss, carried, tie_stages(whole, tied, comm))


def train(pipe: Pipeline, steps: int) -> list[float]:
    parameters = {
        p for module in pipe.stages.values() for p in module.parameters() if p.requires_grad
    }
    optimizer, losses = torch.optim.AdamW(list(parameters), lr=0.02), []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, where = data(step)
        losses.append(
            float(pipe.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens], where))
        )
        optimizer.step()
    return losses


SCHEDULES = (
    ("naive", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb1p", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
)


@pytest.mark.parametrize("name, chunks", SCHEDULES, ids=[name for name, _ in SCHEDULES])
@pytest.mark.parametrize(
    "ranks", (*(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 2)), 4)
)
@pytest.mark.parametrize(
    "config", (pytest.param(DEEP, marks=pytest.mark.soak), TIED), ids=("untied", "tied")
)
def test_parity_with_the_serial_run(name: str, chunks: int, ranks: int, config: GPTConfig) -> None:
    results = minidist.run(lambda comm: trained(comm, config, name, chunks), ranks)
    expected, losses = serial(config, STEPS)
    assert set().union(*(names for names, _, _ in results)) | {"head.weight"} == expected.keys() | {
        "head.weight"
    }
    assert max(difference for _, difference, _ in results) <= 1e-9
    assert [sum(rank[2][step] for rank in results) for step in range(STEPS)] == pytest.approx(
        losses, rel=1e-12
    )


def trained(
    comm: Communicator, config: GPTConfig, name: str, chunks: int
) -> tuple[set[str], float, list[float]]:
    """Train; return the names of this rank's parameters, the largest max|a - b| / max|b|, and the
    losses.
    """
    pipe = pipeline(comm, config, name, chunks)
    losses, expected = train(pipe, STEPS), serial(config, STEPS)[0]
    found = [
        (n, p.detach()) for module in pipe.stages.values() for n, p in module.named_parameters()
    ]
    differences = [float((p - expected[n]).abs().max() / expected[n].abs().max()) for n, p in found]
    return {n for n, _ in found}, max(differences), losses


PROGRAM = """
import minidist
from test_pipeline import TIED, trained

comm = minidist.init()
for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
    _, difference, _ = trained(comm, TIED, name, chunks)
    assert difference <= 1e-9, (name, difference)
print("through")
"""


@pytest.mark.parametrize(
    "start, ranks",
    (
        (mpirun, 2),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((mpirun, 4), (torchrun, 2))),
    ),
)
def test_between_processes(start: Callable[..., Any], ranks: int) -> None:
    job = start(ranks, PROGRAM, timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("through") == ranks


@pytest.mark.parametrize("name", ("gpipe", "1f1b", "zb-h1"))
def test_messages_and_bytes_are_two_a_cut_and_microbatch(name: str) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        pipe = pipeline(comm, DEEP, name)
        messages, sent = comm.traffic.messages, comm.traffic.bytes
        train(pipe, 1)
        return comm.traffic.messages - messages, comm.traffic.bytes - sent

    messages, sent = zip(*minidist.run(program, 4), strict=True)
    assert sum(messages) == 3 * 2 * len(ROWS)  # cuts, ways, microbatches
    assert sum(sent) == 3 * 2 * sum(ROWS) * 8 * DEEP.hidden * 8  # positions, channels, float64


@pytest.mark.parametrize(
    "name, most", (("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("naive", [1, 1, 1, 1]))
)
def test_a_stage_holds_the_graphs_of_as_many_microbatches_as_its_schedule_says(
    name: str, most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, int] = {}
    before = Run.do

    def do(self: Run, action: Action) -> None:
        before(self, action)
        held[action.stage] = max(held.get(action.stage, 0), len(self.left))

    monkeypatch.setattr(Run, "do", do)
    minidist.run(lambda comm: train(pipeline(comm, DEEP, name), 1) and None, 4)
    assert [held[stage] for stage in range(4)] == most


def test_a_rank_computes_on_while_its_output_is_sent() -> None:
    """Which takes three quarters of the second that a forward takes."""
    cluster, trace = Cluster.uniform(0, 2 * HIDDEN * 4 / 0.75), Trace()

    def program(comm: Communicator) -> None:
        pipe = Pipeline(
            {comm.rank: Layer(comm)},
            comm,
            with_communication(plan("gpipe", 2, 4)),
            lambda y, _: y.sum(),
            lambda x: torch.empty(2, HIDDEN),
        )
        pipe.step([torch.ones(2, HIDDEN)] * 4, [None] * 4)

    minidist.run(program, 2, cluster=cluster, trace=trace)
    assert began(trace, "forward") == [0.0, 1.0, 2.0, 3.0]


def test_an_output_is_let_go_when_its_gradient_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the first rank under GPipe, which sends nothing any more while its backwards run."""
    left: list[int] = []
    before = Run.do

    def do(self: Run, action: Action) -> None:
        before(self, action)
        if (action.stage, action.kind) == (0, "B"):
            left.append(len(self.sending))

    monkeypatch.setattr(Run, "do", do)
    minidist.run(lambda comm: train(pipeline(comm, DEEP, "gpipe"), 1) and None, 2)
    assert all(sent <= 7 - done for done, sent in enumerate(left)) and len(left) == 8


def test_weight_gradients_come_when_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between I and W of a microbatch a matrix has no gradient of it yet, and afterwards it has."""
    seen: list[tuple[str, bool]] = []
    before = Run.do

    def do(self: Run, action: Action) -> None:
        before(self, action)
        if action.stage == 1 and action.microbatch == 0 and action.kind in "IW":
            weight = next(
                p
                for n, p in self.pipeline.stages[1].named_parameters()
                if n.endswith("query.weight")
            )
            seen.append((action.kind, weight.grad is not None))

    monkeypatch.setattr(Run, "do", do)
    minidist.run(lambda comm: train(pipeline(comm, DEEP, "zb-h1"), 1) and None, 2)
    assert seen == [("I", False), ("W", True)]


def test_gradients_are_reduced_over_the_data_axis_because_the_plan_says_so() -> None:
    case = Case(Layout(dp=2, pp=2), Recipe(schedule="zb-h1", microbatches=3), batch=6, steps=1)

    def program(comm: Communicator, reduces: bool) -> bool:
        """Take a step; tell whether the data axis has the same gradients."""
        parallel = spread(comm, case)
        pipe = parallel.pipeline
        assert pipe is not None and pipe.plan.reduces
        if not reduces:
            pipe.plan = with_communication(plan("zb-h1", 2, 3))
        parallel.zero_grad()
        one_step(parallel, case, 0)
        there = [p.grad for p in parallel.model.parameters() if p.grad is not None]
        found = [gradient.as_subclass(torch.Tensor).tolist() for gradient in there]
        first, second = parallel.mesh.dp.all_gather_object(found)
        return bool(first == second)

    for reduces in (True, False):
        assert (
            minidist.run(lambda comm, reduces=reduces: program(comm, reduces), 4) == [reduces] * 4
        )


def test_layers_are_cut_by_cost() -> None:
    assert sorted(len(part) for part in balance([1] * 10, 4)) == [2, 2, 3, 3]
    assert balance([4, 1, 1, 1, 1], 2) == [range(1), range(1, 5)]
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        balance([1, 1], 3)


def test_mistakes_get_a_sentence() -> None:
    def program(comm: Communicator) -> None:
        pipe = pipeline(comm, DEEP, "1f1b")
        with pytest.raises(
            ValueError, match="3 inputs and 3 targets, but the plan has 8 microbatches"
        ):
            pipe.step([1, 2, 3], [1, 2, 3])
        with pytest.raises(
            ValueError,
            match=rf"rank {comm.rank} brings stages \[5\], but the plan gives it \[{comm.rank}\]",
        ):
            Pipeline({5: pipe.stages[comm.rank]}, comm, pipe.plan, loss, pipe.carried)
        reducing = with_communication(pipe.plan.compute_only(), reduce=True)
        with pytest.raises(
            ValueError,
            match="no replica= is given, but the plan 1f1b reduces gradients over a data axis",
        ):
            Pipeline(pipe.stages, comm, reducing, loss, pipe.carried)
        with pytest.raises(
            ValueError, match="replica= is given, but the plan 1f1b does not reduce gradients"
        ):
            Pipeline(
                pipe.stages,
                comm,
                pipe.plan,
                loss,
                pipe.carried,
                replica=DataParallel(nn.Linear(1, 1), comm, op="sum"),
            )
        with pytest.raises(ValueError, match=r"GPT is to be cut into 9 layers, but has 8 of them"):
            take_stages(build(DEEP, 0), [range(7), range(7, 9)], [0])

    minidist.run(program, 2)


# ---------------------------------------------------------------- several tensors across a cut


class Part(nn.Module):
    """A stage that takes a stream, a sum on the side and a mask, and returns all three."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Return [B, 4], [B] and integers [B, 4]."""
        side, mask = rest or (x.new_zeros(len(x)), (x > 0).long())
        y = torch.tanh(x @ self.weight) * (1 + mask)
        return y, side + y.square().sum(-1), 1 - mask


def both(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return (output[0] * target).sum() + output[1].square().sum() + output[2].sum()


@pytest.mark.parametrize(
    "name, ranks", (("gpipe", 3), ("1f1b", 3), ("1f1b", 2), ("zb-v", 2), ("1f1b", 1))
)
def test_several_tensors_cross_a_cut(name: str, ranks: int) -> None:
    """What has no gradient is sent forward only; the gradient on the side counts."""
    batch = torch.randn(7, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    inputs, targets = list(batch.split(2)), list(batch.flip(0).split(2))

    def program(comm: Communicator) -> tuple[float, dict[int, Tensor], int]:
        schedule = with_communication(plan(name, ranks, len(inputs)))
        stages = {stage: Part(stage) for stage in schedule.stages_of(comm.rank)}

        def carried(x: Tensor) -> tuple[Tensor, ...]:
            return torch.empty_like(x), x.new_empty(len(x)), torch.empty(x.shape, dtype=torch.int64)

        before = comm.traffic.messages
        loss = Pipeline(stages, comm, schedule, both, carried).step(inputs, targets)
        sent = comm.traffic.messages - before
        return float(loss), {stage: part.weight.grad for stage, part in stages.items()}, sent  # type: ignore[misc]

    results = minidist.run(program, ranks)
    count = sum(len(gradients) for _, gradients, _ in results)
    parts = [Part(stage) for stage in range(count)]
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs, targets, strict=True):
        output: tuple[Tensor, ...] = (x,)
        for part in parts:
            output = part(*output)
        loss = both(output, target)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    assert sum(loss for loss, _, _ in results) == pytest.approx(float(total), rel=1e-12)
    for _, gradients, _ in results:
        for stage, gradient in gradients.items():
            assert torch.allclose(gradient, parts[stage].weight.grad, rtol=1e-12)  # type: ignore[arg-type]
    cuts = ranks - 1 if name != "zb-v" else 2 * (ranks - 1)
    assert sum(sent for _, _, sent in results) == len(inputs) * cuts * (3 + 2)
