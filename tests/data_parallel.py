"""One training run, serial and data-parallel, in float64: shared by the tests on threads, mpirun
and torchrun.

The model has tied weights and a frozen parameter, the ranks start from different weights, and the
global batches have 6, 5, 3 and 1 rows: they do not divide, and some ranks get no row at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from minidist.full import DDP, FSDP, DataParallel, NaiveDataParallel, ParameterServer, ZeRO1
from minidist.full.comm import Communicator
from minidist.full.ddp.after_backward import PlainDataParallel
from minidist.full.ddp.sampler import share
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum

VARIANTS: tuple[type[DataParallel], ...] = (
    DDP,
    PlainDataParallel,
    NaiveDataParallel,
    ParameterServer,
)
CONFIG = GPTConfig(
    vocabulary=19,
    layers=2,
    hidden=16,
    heads=4,
    key_value_heads=2,
    intermediate=24,
    sequence=8,
    tied=True,
)
DROPPING = GPTConfig(**(vars(CONFIG) | {"dropout": 0.3}))
ROWS = (6, 5, 3, 1)  # of the global batch, step by step

Zero = Callable[[nn.Module, torch.optim.Optimizer], None]


def to_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As most loops do."""
    optimizer.zero_grad(set_to_none=True)


def to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As loops did before torch 2."""
    optimizer.zero_grad(set_to_none=False)


def by_wrapper(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The strategy's own."""
    model.zero_grad()


ZEROS: tuple[Zero, ...] = (to_none, to_zero, by_wrapper)


@dataclass(frozen=True)
class Case:
    """How to train."""

    variant: type[DataParallel] = DDP
    config: GPTConfig = CONFIG
    microbatches: int = 1
    zero: Zero = to_none
    bucket_bytes: int = 4096  # several buckets even for this small model


def build(config: GPTConfig, seed: int) -> GPT:
    """Return a model with norms that are not one, so that no gradient is small by luck, and a
    frozen matrix.
    """
    draws = torch.Generator().manual_seed(seed)
    model = GPT(config, draws, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * 0.2)
    model.layers[-1].mlp.up.weight.requires_grad_(False)
    return model


def wrap(model: nn.Module, comm: Communicator, case: Case, **options: object) -> DataParallel:
    """Apply the strategy, with small buckets where it has any."""
    if issubclass(case.variant, DDP | ZeRO1):
        options |= {"bucket_bytes": case.bucket_bytes, "first_bucket_bytes": case.bucket_bytes // 4}
    elif case.variant is PlainDataParallel:
        options |= {"bucket_bytes": case.bucket_bytes}
    return case.variant(model, comm, **({"op": "sum"} | options))  # type: ignore[arg-type]


def train(model: nn.Module, case: Case, ranks: int, rank: int) -> None:
    """Take one AdamW step per entry of `ROWS`."""
    options = {"lr": 0.02, "weight_decay": 0.1}
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded = isinstance(model, ZeRO1 | FSDP)
    optimizer = (
        model.optimizer(torch.optim.AdamW, **options)
        if sharded
        else torch.optim.AdamW(trained, **options)
    )
    for step, rows in enumerate(ROWS):
        tokens = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(100 + step))
        case.zero(model, optimizer)
        mine = share(rows, ranks, rank)
        for number in range(case.microbatches):
            part = share(mine.stop - mine.start, case.microbatches, number)
            first, last = mine.start + part.start, mine.start + part.stop
            skip = isinstance(model, DataParallel) and number < case.microbatches - 1
            with model.no_sync() if skip else contextlib.nullcontext():  # type: ignore[operator]
                logits = model(tokens[first:last, :-1], Where(seed=5, step=step, rows=first))
                (cross_entropy_sum(logits, tokens[first:last, 1:]) / (rows * 8)).backward()
        if isinstance(model, DataParallel):
            model.synchronize()
        optimizer.step()


@cache
def serial(config: GPTConfig) -> dict[str, Tensor]:
    """Return the parameters after a serial run."""
    model = build(config, seed=0)
    train(model, Case(config=config), ranks=1, rank=0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def parallel(comm: Communicator, case: Case, **options: object) -> dict[str, Tensor]:
    """Return this rank's parameters after a data-parallel run."""
    model = build(case.config, seed=comm.rank)
    wrapped = wrap(model, comm, case, **options)
    train(wrapped, case, comm.size, comm.rank)
    if isinstance(wrapped, FSDP):
        whole = dict(wrapped.full_tensors())
        return {name: whole[name] for name, _ in model.named_parameters()}
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest max|a - b| / max|b| of all parameters."""
    assert list(ours) == list(theirs)
    return max(float((ours[name] - b).abs().max() / b.abs().max()) for name, b in theirs.items())


def check_parity(results: Iterable[dict[str, Tensor]], config: GPTConfig) -> None:
    """Assert that every rank ended where the serial run did, and that all ranks hold the same
    bits.
    """
    first, *others = results
    assert largest_difference(first, serial(config)) <= 1e-9
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
