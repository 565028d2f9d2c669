"""Whatever the strategy over the data axis: one loop that knows none of them trains with each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_parallel import CONFIG, ROWS, build, check_parity
from torch import Tensor

import minidist
from minidist.full import DDP, FSDP, NaiveDataParallel, ParameterServer, ZeRO1, ZeRO2
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share
from minidist.full.model import GPT, cross_entropy_sum
from minidist.full.replica import Alone, Replica

STRATEGIES = (DDP, NaiveDataParallel, ParameterServer, ZeRO1, ZeRO2, FSDP)
PACKAGE = Path(minidist.__file__).parent


def trained(replica: Replica, comm: Communicator) -> dict[str, Tensor]:
    """Take the steps of `data_parallel.train`, each of two microbatches; ask a replica what the
    protocol has.
    """
    optimizer = replica.optimizer(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    for step, rows in enumerate(ROWS):
        tokens = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(100 + step))
        replica.zero_grad()
        first, second = tokens[share(rows, comm.size, comm.rank)].tensor_split(2)
        with replica.no_sync():
            backward(replica, first, rows)
        backward(replica, second, rows)
        replica.synchronize()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in replica.unwrap().named_parameters()}


def backward(replica: Replica, tokens: Tensor, rows: int) -> None:
    logits = replica.called(tokens[:, :-1])
    (cross_entropy_sum(logits, tokens[:, 1:]) / (rows * 8)).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_that_knows_no_strategy_trains_with_each(
    strategy: Callable[[GPT, Communicator], Replica],
) -> None:
    def program(comm: Communicator) -> dict[str, Tensor]:
        return trained(strategy(build(CONFIG, seed=comm.rank), comm, op="sum"), comm)

    check_parity(minidist.run(program, 2), CONFIG)
    check_parity(minidist.run(lambda comm: trained(Alone(build(CONFIG, seed=0)), comm), 1), CONFIG)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_is_the_whole_model_once_a_group_and_what_is_trained_is_a_part_of_it(
    strategy: Callable[[GPT, Communicator], Replica],
) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        replica = strategy(build(CONFIG, seed=0), comm, op="sum")
        kept = {id(parameter) for parameter in replica.kept}
        assert kept >= {id(parameter) for parameter in replica.trained} and not replica.alone
        return sum(p.numel() for p in replica.kept), sum(p.numel() for p in replica.trained)

    model = build(CONFIG, seed=0)
    whole = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = whole - learnt
    expected = {
        FSDP: (whole, learnt),
        ZeRO1: (learnt + 2 * frozen, learnt),
        ZeRO2: (learnt + 2 * frozen, learnt),
    }
    found = tuple(map(sum, zip(*minidist.run(program, 2), strict=True)))
    assert found == expected.get(strategy, (2 * whole, 2 * learnt))  # type: ignore[call-overload]


def test_nobody_asks_which_strategy_it_is() -> None:
    """What differs between strategies is theirs to say: a chain of questions forgets the next
    one.
    """
    asks = re.compile(
        r"(isinstance|issubclass)\([^()]*\b(?!\w*Options)(DDP|ZeRO\w*|FSDP|Sharded\w*|DataParallel|Bucketed|Alone)\b"
    )
    found = [
        f"{file.name}: {words[0]}"
        for file in PACKAGE.rglob("*.py")
        for words in asks.finditer(file.read_text())
    ]
    assert found == []
