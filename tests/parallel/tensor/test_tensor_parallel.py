"""Tensor parallelism gives the serial run's numbers, sends what the formulas say, and holds its
part only.

One training run, serial and split, in float64. The model's middle width and vocabulary do not
divide, a matrix and a norm are frozen, and the ranks start from different weights. The same run is
the sample under mpirun.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import data_parallel
import pytest
import torch
from data_parallel import largest_difference
from ranks import mpirun
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import minidist
from minidist.full import DDP, clip_by_global_norm
from minidist.full.comm import Communicator, MismatchError
from minidist.full.ddp.sampler import share
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.placement import placement_of
from minidist.full.recompute.segments import recompute
from minidist.full.tensor.plan import Plan, gpt_plan, parallelize_tensor
from minidist.full.tensor.styles import (
    ColumnParallel,
    ParallelRegion,
    RowParallel,
    SplitSequence,
    VocabularyParallel,
)
from minidist.full.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum

STEPS, ROWS, TIME = 4, 3, 8


def config(**changes: object) -> GPTConfig:
    """Return a small model's sizes."""
    sizes = {
        "vocabulary": 19,
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "key_value_heads": 2,
        "intermediate": 22,
    }
    return GPTConfig(**({**sizes, "sequence": TIME} | changes))  # type: ignore[arg-type]


def build(config: GPTConfig, seed: int) -> GPT:
    """Return a model in which a matrix and a norm are frozen."""
    model = data_parallel.build(config, seed)
    model.layers[0].attention_norm.weight.requires_grad_(False)
    return model


def batch(step: int, vocabulary: int) -> Tensor:
    """Return the tokens of a step [B, T + 1]."""
    return torch.randint(
        vocabulary, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(100 + step)
    )


def train(model: GPT, comm: Communicator | None, steps: int = STEPS) -> list[float]:
    """Take AdamW steps; return the losses."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1
    )
    losses = []
    for step in range(steps):
        loss = loss_of(model, comm, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_of(model: GPT, comm: Communicator | None, step: int = 0) -> Tensor:
    """Return the mean loss of a step's batch; one target does not count."""
    tokens = batch(step, model.config.vocabulary)
    targets = tokens[:, 1:].clone()
    targets[0, 3] = -100
    logits = model(tokens[:, :-1], Where(seed=5, step=step))
    if comm is None:
        total = cross_entropy_sum(logits, targets)
    else:
        total = vocabulary_parallel_cross_entropy_sum(
            logits, targets, comm, model.config.vocabulary
        )
    return total / (targets.numel() - 1)


@cache
def serial(config: GPTConfig) -> tuple[dict[str, Tensor], list[float]]:
    """Return the parameters after a serial run, and its losses."""
    model = build(config, seed=0)
    losses = train(model, None)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def parallel(
    comm: Communicator, config: GPTConfig, sequence: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Return this rank's slices after a tensor-parallel run, and its losses."""
    model = build(config, seed=comm.rank)
    parallelize_tensor(model, comm, sequence=sequence)
    losses = train(model, comm)
    check_slices(model, config)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def check_slices(model: GPT, config: GPTConfig) -> None:
    """Assert that each parameter is its slice of the serial run's, and that the slices together are
    the whole.
    """
    expected = serial(config)[0]
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter).block
        if placement is None:  # one rank
            assert largest_difference({name: parameter.detach()}, {name: expected[name]}) <= 1e-9
            continue
        assert placement.name == name and placement.shape == expected[name].shape
        piece, whole = placement.take(expected[name]), placement.full(parameter)
        assert parameter.shape == piece.shape
        largest = expected[name].abs().max()
        assert (parameter.detach() - piece).abs().max() <= 1e-9 * largest, name
        assert (
            whole.shape == expected[name].shape
            and (whole - expected[name]).abs().max() <= 1e-9 * largest
        ), name


# ---------------------------------------------------------------- the numbers

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"tied": True},
    {"tied": True, "dropout": 0.3},
    {"key_value_heads": 1, "vocabulary": 23, "intermediate": 21},
    {"key_value_heads": 4, "vocabulary": 16, "intermediate": 24},
    {"heads": 8, "key_value_heads": 2, "hidden": 32, "tied": True},
)
each_variant = pytest.mark.parametrize("changes", VARIANTS, ids=str)


def test_the_case_is_a_hard_one() -> None:
    start = {name: parameter.detach() for name, parameter in build(config(), 0).named_parameters()}
    moved = {
        name: largest_difference({name: a}, {name: serial(config())[0][name]})
        for name, a in start.items()
    }
    frozen = {"layers.1.mlp.up.weight", "layers.0.attention_norm.weight"}
    assert {name for name, change in moved.items() if change < 0.01} == frozen
    assert largest_difference(serial(config(dropout=0.3))[0], serial(config())[0]) > 0.01
    assert not torch.equal(build(config(), 1).norm.weight, build(config(), 0).norm.weight)


@each_variant
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parity(ranks: int, changes: dict[str, Any]) -> None:
    check_run(ranks, config(**changes))


def test_parity_on_eight_ranks_of_which_four_share_a_key_value_head() -> None:
    check_run(8, config(heads=8, key_value_heads=2, hidden=32))


def test_parity_on_three_ranks() -> None:
    check_run(3, config(heads=6, key_value_heads=3, hidden=24, tied=True))


def check_run(ranks: int, config: GPTConfig, sequence: bool = False) -> None:
    """Train on threads; the slices are checked there. Here: what all hold is alike to the bit, and
    losses.
    """
    results = minidist.run(lambda comm: parallel(comm, config, sequence), ranks, debug=True)
    for found, losses in results:
        assert losses == results[0][1]
        assert losses == pytest.approx(serial(config)[1], rel=1e-9)
        whole = [
            name
            for name, parameter in found.items()
            if parameter.shape == serial(config)[0][name].shape
        ]
        assert len(whole) >= 2 * config.layers + 1
        assert all(torch.equal(found[name], results[0][0][name]) for name in whole)


def test_parity_with_clipping_counts_each_element_once() -> None:
    sizes = config(key_value_heads=1, tied=True)
    model = build(sizes, 0)
    loss_of(model, None).backward()
    norm = clip_by_global_norm(model.parameters(), 0.05)
    expected = gradients(model)

    def program(comm: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        split = build(sizes, comm.rank)
        parallelize_tensor(split, comm)
        loss_of(split, comm).backward()
        unclipped = clip_by_global_norm(split.parameters(), 0, comm)
        found = clip_by_global_norm(split.parameters(), 0.05, comm)
        assert torch.equal(found, unclipped), "a limit of 0 only measures"
        return found, {
            name: placement.full(parameter.grad)
            for name, parameter in split.named_parameters()
            if parameter.grad is not None
            and (placement := placement_of(parameter).block) is not None
        }

    for ranks in (2, 4):
        for found, clipped in minidist.run(program, ranks):
            assert found.item() == pytest.approx(norm.item(), rel=1e-12)
            assert largest_difference(clipped, expected) <= 1e-9
    assert norm > 0.1, "it was clipped"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("sequence", [False, True])
def test_parity_with_recomputation(policy: str, sequence: bool) -> None:
    sizes = config(tied=True, dropout=0.3, key_value_heads=1)
    expected = build(sizes, 0)
    loss_of(expected, None).backward()

    def program(comm: Communicator) -> None:
        model = build(sizes, comm.rank)
        parallelize_tensor(model, comm, sequence=sequence)
        recompute(model, policy)
        loss_of(model, comm).backward()
        found = {}
        for name, gradient in gradients(model).items():
            placement = placement_of(model.get_parameter(name)).block
            assert placement is not None
            found[name] = placement.full(gradient)
        assert largest_difference(found, gradients(expected)) <= 1e-9

    minidist.run(program, 4, debug=True)


def test_parity_with_data_parallelism_around_it_and_accumulation() -> None:
    sizes = config(tied=True, key_value_heads=1, dropout=0.3)
    tokens = batch(0, sizes.vocabulary).repeat(2, 1)[:5]

    def backward(model: nn.Module, rows: slice, comm: Communicator | None) -> None:
        logits = model(tokens[rows, :-1], Where(seed=5, rows=rows.start))
        if comm is None:
            cross_entropy_sum(logits, tokens[rows, 1:]).backward()
        else:
            vocabulary_parallel_cross_entropy_sum(
                logits, tokens[rows, 1:], comm, sizes.vocabulary
            ).backward()

    expected = build(sizes, 0)
    backward(expected, slice(0, 5), None)

    def program(world: Communicator) -> None:
        mesh = minidist.Mesh(world, minidist.Layout(dp=2, tp=2))
        model = build(sizes, world.rank)
        parallelize_tensor(model, mesh.tp)
        ddp = DDP(model, mesh.dp, op="sum", bucket_bytes=1000)
        rows = share(5, 2, mesh.dp.rank)
        with ddp.no_sync():
            backward(ddp, slice(rows.start, rows.start + 1), mesh.tp)
        backward(ddp, slice(rows.start + 1, rows.stop), mesh.tp)
        ddp.synchronize()
        whole = {}
        for name, parameter in model.named_parameters():
            placement = placement_of(parameter).block
            if parameter.grad is not None and placement is not None:
                whole[name] = placement.full(parameter.grad)
        assert largest_difference(whole, gradients(expected)) <= 1e-9

    minidist.run(program, 4, debug=True)


def test_under_mpirun() -> None:
    job = mpirun(
        2,
        """
        import minidist
        from test_tensor_parallel import config, parallel, serial

        comm = minidist.init(limit=90)
        cases = [({}, False), ({"tied": True, "dropout": 0.3}, True), ({"key_value_heads": 1}, True)]
        for changes, sequence in cases:
            sizes = config(**changes)
            losses = parallel(comm, sizes, sequence)[1]
            assert all(abs(a - b) <= 1e-9 * b for a, b in zip(losses, serial(sizes)[1], strict=True))
        print(f"{len(cases)} cases on {comm.wire.kind}")
        """,
        timeout=100,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("3 cases on mpi") == 2


# ---------------------------------------------------------------- what it sends

LONG = {
    "hidden": 32,
    "intermediate": 64,
    "vocabulary": 64,
    "key_value_heads": 4,
    "sequence": 64,
}  # 3 * 64 * 32 * 8 bytes


class Count:
    """Messages and bytes that all ranks together have sent since."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.messages, self.bytes = comm.traffic.messages, comm.traffic.bytes

    def stop(self) -> tuple[int, int]:
        """Return messages and bytes, summed over ranks."""
        mine = (
            self.comm.traffic.messages - self.messages,
            self.comm.traffic.bytes - self.bytes,
        )
        everyones = self.comm.all_gather_object(mine)
        return sum(messages for messages, _ in everyones), sum(bytes for _, bytes in everyones)


def ring(ranks: int, bytes: int, reductions: int = 1) -> tuple[int, int]:
    """Return messages and bytes of ring all-reduces, summed over ranks."""
    return reductions * 2 * ranks * (ranks - 1), reductions * 2 * (ranks - 1) * bytes


def traffic_of_parts(
    comm: Communicator, sequence: bool = False, **changes: Any
) -> dict[str, tuple[int, int]]:
    """Return what forward and backward of attention and MLP send, and of embedding and loss."""
    sizes = config(**(LONG | changes))
    model = build(sizes, 0)
    parallelize_tensor(model, comm, sequence=sequence)
    time = 64 // comm.size if sequence else 64
    x = torch.randn((ROWS, time, 32), dtype=torch.float64)
    rotary = model.rotary(torch.arange(64), torch.float64)
    found = {}
    for name in ("attention", "mlp"):
        part, inputs = getattr(model.layers[0], name), x.clone().requires_grad_()
        count = Count(comm)
        y = part(inputs, rotary) if name == "attention" else part(inputs)
        assert y.shape == x.shape
        found[f"{name} forward"] = count.stop()
        count = Count(comm)
        y.backward(torch.ones_like(y))
        found[f"{name} backward"] = count.stop()
    tokens = torch.zeros((ROWS, 64), dtype=torch.int64)
    count = Count(comm)
    embedded = model.embedding(tokens)
    found["embedding forward"] = count.stop()
    count = Count(comm)
    embedded.sum().backward()
    found["embedding backward"] = count.stop()
    count = Count(comm)
    logits = model.head(x.requires_grad_())
    found["head forward"] = count.stop()
    count = Count(comm)
    loss = vocabulary_parallel_cross_entropy_sum(logits, tokens, comm, sizes.vocabulary)
    found["loss forward"] = count.stop()
    count = Count(comm)
    loss.backward()
    found["head and loss backward"] = count.stop()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_all_reduce_forward_and_one_backward_per_attention_and_mlp(ranks: int) -> None:
    one = ring(ranks, ROWS * 64 * 32 * 8)
    nothing = (0, 0)
    rounds = {2: 1, 4: 2}[ranks]
    # of the loss: two all-reduces by doubling, of one and of two numbers a token
    numbers = ROWS * 64 * 8
    for found in minidist.run(traffic_of_parts, ranks):
        assert found == {
            "attention forward": one,
            "attention backward": one,
            "mlp forward": one,
            "mlp backward": one,
            "embedding forward": one,
            "embedding backward": nothing,
            "head forward": nothing,
            "loss forward": (2 * rounds * ranks, 3 * numbers * rounds * ranks),
            "head and loss backward": one,
        }


def test_shared_key_value_heads_are_summed_among_those_who_share_them() -> None:
    plain = minidist.run(traffic_of_parts, 4)[0]
    shared = minidist.run(lambda comm: traffic_of_parts(comm, key_value_heads=2), 4)[0]
    differing = {
        name: [b - a for a, b in zip(plain[name], shared[name], strict=True)] for name in plain
    }
    # Two groups of two ranks exchange two matrices of one head of 8 channels, by doubling: a
    # message a rank each.
    assert differing.pop("attention backward") == [2 * 4, 2 * 4 * 8 * 32 * 8]
    assert not any(number for pair in differing.values() for number in pair)


# ---------------------------------------------------------------- what it holds


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_held(ranks: int) -> None:
    """Parameters, gradients and AdamW's states: all matrices cut, norms whole, a key-value head on
    several ranks.
    """
    sizes = config(vocabulary=64, intermediate=24, key_value_heads=2)
    head, copies = 16 * 4, ranks // 2
    norms, matrices = (2 * 2 + 1) * 16, build(sizes, 0).config.parameter_count - (2 * 2 + 1) * 16
    key_value = 2 * 2 * 2 * head  # layers, both, heads
    cut = (matrices - key_value) // ranks + key_value * copies // ranks

    def program(comm: Communicator) -> tuple[int, int, int]:
        model = GPT(sizes, dtype=torch.float64)
        parallelize_tensor(model, comm)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, comm).backward()
        optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
        }
        return (
            sum(storages.values()),
            sum(p.grad.numel() * 8 for p in model.parameters() if p.grad is not None),
            sum(t.numel() * 8 for t in states),
        )

    for held in minidist.run(program, ranks):
        assert held == (8 * (norms + cut), 8 * (norms + cut), 16 * (norms + cut))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that this thread computes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_rank_ever_holds_the_full_logits() -> None:
    sizes = config(vocabulary=4000)  # rank 0's part of the logits is by far the largest tensor

    def program(comm: Communicator | None) -> int:
        model = build(sizes, 0)
        if comm is not None:
            parallelize_tensor(model, comm)
        with Largest() as largest:
            loss_of(model, comm).backward()
        return largest.elements

    assert program(None) == ROWS * TIME * 4000
    for ranks in (2, 4):
        assert minidist.run(program, ranks) == [ROWS * TIME * 4000 // ranks] * ranks


# ---------------------------------------------------------------- plans of one's own


class Inner(nn.Module):
    """Somebody else's MLP, with biases, and a parameter between the two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.slope = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x) * self.slope))
        return down


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), Inner()

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = x + self.inner(self.norm(x))
        return mapped


class Mine(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(7, 6), nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 5)
        self.double()
        draws = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=draws)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


INNER: Plan = {"blocks.*.inner.up": ColumnParallel(), "blocks.*.inner.down": RowParallel()}
PLANS: dict[str, Plan] = {
    "as few as can be": INNER,
    "a region": INNER | {"blocks.*.inner": ParallelRegion()},
    "all": INNER
    | {
        "blocks.*.inner": ParallelRegion(),
        "words": VocabularyParallel(),
        "out": ColumnParallel(gather=True),
    },
}


def gradients_of_mine(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.arange(12).reshape(2, 6) % 7
    (model(tokens).square() * torch.arange(5)).sum().backward()
    return gradients(model)


def check_plan(comm: Communicator, plan: Plan, sequence: bool = False) -> None:
    """Assert that gradients of all parameters are slices of the serial ones, those between two cuts
    included.
    """
    expected, model = Mine(0), Mine(comm.rank)
    if not any(isinstance(style, ParallelRegion) for style in plan.values()):
        for block in (*expected.blocks, *model.blocks):
            block.inner.slope.requires_grad_(False)  # nobody knows that it lies between two cuts
    parallelize_tensor(model, comm, plan, sequence)
    found = {}
    for name, gradient in gradients_of_mine(model).items():
        placement = placement_of(model.get_parameter(name)).block
        assert placement is not None
        found[name] = placement.full(gradient)
    assert largest_difference(found, gradients_of_mine(expected)) <= 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_for_modules_of_ones_own(plan: str, ranks: int) -> None:
    """Biases, widths and vocabularies that do not divide, a parameter between two cuts."""
    minidist.run(lambda comm: check_plan(comm, PLANS[plan]), ranks, debug=True)


def test_logits_can_be_gathered() -> None:
    expected = build(config(), 0)(batch(0, 19)[:, :-1])

    def program(comm: Communicator) -> Tensor:
        model = build(config(), comm.rank)
        parallelize_tensor(model, comm, {**gpt_plan(config()), "head": ColumnParallel(gather=True)})
        logits: Tensor = model(batch(0, 19)[:, :-1]).detach()
        return logits

    for found in minidist.run(program, 4):
        assert torch.allclose(found, expected, rtol=1e-9)


# ---------------------------------------------------------------- mistakes


def refused(
    plan: Plan | None, ranks: int = 2, sizes: GPTConfig | None = None, sequence: bool = False
) -> str:
    """Return the sentence, which all ranks must get before anything is sent, the model being what
    it was.
    """

    def program(comm: Communicator) -> str:
        model = build(sizes or config(), 0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises((ValueError, TypeError)) as caught:
            parallelize_tensor(model, comm, plan, sequence)
        assert comm.traffic.messages == 0
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        return str(caught.value)

    sentences = set(minidist.run(program, ranks))
    assert len(sentences) == 1
    return sentences.pop()


def test_mistakes_are_told_in_a_sentence() -> None:
    assert refused(None, 3) == (
        "layers.0.attention.query: 4 heads cannot be dealt out to 3 ranks: choose a number of "
        "ranks that divides 4"
    )
    assert (
        "key: 2 heads cannot be dealt out to 3 ranks: choose a number of ranks that divides 2, or "
        "one that 2"
    ) in (refused(None, 3, config(heads=6, hidden=24)))
    assert refused({"layers.*.attention.qury": ColumnParallel()}) == (
        "the plan names 'layers.*.attention.qury', which no module of the model has: the names "
        "are such as embedding, layers, layers.0, ..., head"
    )
    assert refused({"embedding": ColumnParallel()}) == (
        "embedding is of kind Embedding, but ColumnParallel splits Linear: change the plan"
    )
    assert "head is named twice in the plan, by 'head' and by 'hea*'" in (
        refused({"head": ColumnParallel(), "hea*": ColumnParallel()})
    )
    assert refused(None, 4, config(vocabulary=3)) == (
        "embedding has 3 rows or columns to cut, too few for 4 ranks: use at most 3"
    )
    assert "nothing in the plan splits the sequence" in refused(
        {"head": ColumnParallel()}, sequence=True
    )


@pytest.mark.parametrize(
    "plan",
    [
        {"head": ColumnParallel(gather=True)},
        {"embedding": VocabularyParallel()},
        {"embedding": VocabularyParallel(), "head": RowParallel()},
        {"embedding": SplitSequence()},
    ],
)
def test_tied_weights_are_planned_together(plan: Plan) -> None:
    sequence = any(isinstance(style, SplitSequence) for style in plan.values())
    assert refused(plan, 2, config(tied=True), sequence).startswith(
        "embedding.weight and head.weight are one parameter, but the plan treats their modules "
        "apart"
    )


def test_mistakes_that_are_not_the_plans() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="no plan is known for a Mine"):
            parallelize_tensor(Mine(0), comm)
        model = build(config(), 0)
        parallelize_tensor(model, comm)
        with pytest.raises(ValueError, match="has been split already"):
            parallelize_tensor(model, comm)
        with pytest.raises(IndexError, match="token ids from 0 to 19 for a vocabulary of 19"):
            model(torch.tensor([[0, 19]]))
        with pytest.raises(MismatchError, match="have different models"):
            parallelize_tensor(build(config(layers=2 + comm.rank), 0), comm)

    minidist.run(program, 2)


def test_the_model_is_what_it_was_on_one_rank_alone() -> None:
    def program(comm: Communicator) -> None:
        model = build(config(), 0)
        kinds = [type(module) for module in model.modules()]
        parallelize_tensor(model, comm)
        assert [type(module) for module in model.modules()] == kinds

    minidist.run(program, 1)
