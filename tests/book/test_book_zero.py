"""The three stages of ZeRO as loops: bytes sent and held are those of the table at the page's head."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from minidist.comm import Communicator
from minidist.threads import run
from minidist.zero import PlainZeRO, Unit

WIDTHS, ROWS = (5, 7, 7, 7, 3), 6
SIZES = [8 * (above * below + below) for above, below in pairwise(WIDTHS)]  # bytes of each layer
MICROBATCHES = 2


class Held:
    """The most bytes of parameters, gradients, and shard with state, over many looks."""

    def __init__(self, zero: PlainZeRO, optimizer: torch.optim.Optimizer) -> None:
        self.zero, self.optimizer = zero, optimizer
        self.parameters = self.gradients = self.owned = self.whole = 0

    def look(self, *_: object) -> None:
        units = self.zero.units
        whole = [unit.unsharded.untyped_storage().nbytes() for unit in units]
        gradients = [p.grad for unit in units for p in (*unit.parameters, unit.shard)]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        owned = [value for value in states if value.dim()] + self.zero.shards
        self.whole = max(self.whole, sum(size > 0 for size in whole))
        self.parameters = max(self.parameters, sum(whole))
        self.gradients = max(self.gradients, sum(g.nbytes for g in gradients if g is not None))
        self.owned = max(self.owned, sum(value.nbytes for value in owned))


def train(comm: Communicator, stage: int) -> tuple[Held, int]:
    """Take two steps of two microbatches; return what was held, and the bytes sent."""
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()).double() for pair in pairwise(WIDTHS)]
    zero = PlainZeRO(layers, comm, stage)
    optimizer = torch.optim.AdamW(zero.shards)
    held, before = Held(zero, optimizer), comm.traffic.bytes
    for layer, unit in zip(layers, zero.units, strict=True):
        layer.register_forward_pre_hook(held.look)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(held.look)  # type: ignore[no-untyped-call]
    for _ in range(2):
        for _ in range(MICROBATCHES):
            output = zero.forward(torch.ones(ROWS, WIDTHS[0], dtype=torch.float64))
            output.square().sum().backward()  # type: ignore[no-untyped-call]
            zero.backward(output.grad)
        zero.step(optimizer)
        held.look()
    return held, comm.traffic.bytes - before


def check_held(found: list[Held], stage: int) -> None:
    """Assert the page's table, but for an element more in a shard where nothing divides."""
    n, ranks, largest, little = sum(SIZES), len(found), max(SIZES), 8 * len(SIZES)
    for held in found:
        assert held.parameters <= (n if stage < 3 else largest)
        assert held.gradients <= (n if stage == 1 else largest) + n / ranks + little
        assert held.owned <= 3 * (n / ranks + little)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("ranks", (2, 3))
def test_what_is_held_is_what_the_table_says(stage: int, ranks: int) -> None:
    found, sent = zip(*run(train, ranks, stage), strict=True)
    check_held(list(found), stage)
    assert {held.whole for held in found} == {1 if stage == 3 else len(SIZES)}
    if stage < 3:
        with pytest.raises(AssertionError):
            check_held(list(found), stage + 1)
    gathered = 2 * MICROBATCHES if stage == 3 else 1
    assert sum(sent) == 2 * (gathered + MICROBATCHES) * (ranks - 1) * sum(SIZES)


def test_a_layer_comes_back_to_the_memory_that_autograd_has_saved() -> None:
    def program(comm: Communicator) -> None:
        layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
        unit = Unit(layer.parameters(), comm)
        unit.unshard()
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        output = layer(x)
        unit.reshard()
        assert unit.unsharded.untyped_storage().nbytes() == 0
        unit.unshard()
        assert all(map(torch.equal, layer.parameters(), before))
        output.sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        layer(x).sum().backward()
        again = [parameter.grad for parameter in layer.parameters()]
        torch.testing.assert_close(again, gradients, rtol=0, atol=0)

    run(program, 2)
