"""ZeRO++: a quarter of the bytes between nodes, each block off by half a step at most."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full import FSDP, MixedPrecision
from minidist.full.comm import Communicator
from minidist.further import ZeROPlusPlus
from minidist.further.few_bits import BLOCK, pack, unpack
from minidist.further.zero_plus_plus.zero_plus_plus import Nodes

WIDTH = 64  # 64 * 64 elements a layer: 16 blocks, which 8 ranks share out evenly


@pytest.mark.parametrize("bits", (8, 4))
def test_a_number_is_off_by_half_a_step_at_most(bits: int) -> None:
    draws = torch.Generator().manual_seed(bits)
    rows = torch.randn(3, 4 * BLOCK, generator=draws) * 10 ** torch.randint(
        -6, 6, (3, 4 * BLOCK), generator=draws
    )
    rows[1, BLOCK : 2 * BLOCK] = 0
    packed = pack(rows, bits)
    assert packed.shape == (3, 4 * BLOCK * bits // 8 + 4 * 4) and packed.dtype == torch.uint8
    back = unpack(packed, 4 * BLOCK, bits)
    largest = rows.view(3, 4, BLOCK).abs().amax(-1, keepdim=True)
    error = (rows - back).view(3, 4, BLOCK).abs()
    assert (error <= largest / (2 ** (bits - 1) - 1) / 2 * (1 + 1e-5)).all()
    assert torch.equal(back[1, BLOCK : 2 * BLOCK], torch.zeros(BLOCK))
    assert error.max() > 0
    assert torch.equal(unpack(pack(back, bits), 4 * BLOCK, bits), back)  # what is on the grid stays


@pytest.mark.parametrize("ranks, node", ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (6, 3)))
def test_rows_are_gathered_in_order_and_summed_for_their_owners(ranks: int, node: int) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        nodes = Nodes(comm, node)
        mine = torch.full((BLOCK,), float(comm.rank))
        rows = torch.arange(ranks * 1.0)[:, None].expand(ranks, BLOCK) * 10 ** (comm.rank % 2)
        return nodes.gather(mine)[:, 0], nodes.reduce(rows.contiguous())

    factor = sum(10 ** (rank % 2) for rank in range(ranks))
    for rank, (gathered, summed) in enumerate(minidist.run(program, ranks)):
        torch.testing.assert_close(gathered, torch.arange(ranks * 1.0))
        torch.testing.assert_close(summed, torch.full((BLOCK,), float(rank * factor)))


def blocks(seed: int, count: int = 3) -> nn.Module:
    """Return linear layers, each a unit."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("ranks, node", ((4, 2), (8, 2), (8, 4)))
def test_three_times_n_between_nodes_becomes_three_quarters(ranks: int, node: int) -> None:
    def program(comm: Communicator) -> tuple[int, int, int]:
        model = blocks(comm.rank)
        wrapped = ZeROPlusPlus(
            model, comm, op="sum", node_ranks=node, precision=MixedPrecision(torch.bfloat16)
        )
        sizes = [parameter.numel() for parameter in model.parameters()]
        wrapped(torch.randn(2, WIDTH)).sum().backward()
        return wrapped.nodes.across.traffic.bytes, sum(sizes), comm.traffic.bytes

    sent, elements, _ = zip(*minidist.run(program, ranks), strict=True)
    nodes = ranks // node
    scales = 2 * elements[0] // BLOCK * 4  # of parameters and of gradients
    between = sum(sent) / nodes  # that a node receives
    assert between == (nodes - 1) / nodes * (0.75 * 2 * elements[0] + scales)


def test_backward_gathers_inside_the_node_what_forward_used() -> None:
    def program(comm: Communicator) -> tuple[bool, bool, bool, bool]:
        model = blocks(comm.rank)
        wrapped = ZeROPlusPlus(model, comm, op="sum", node_ranks=2)
        optimizer = wrapped.optimizer(torch.optim.SGD, lr=0.1)
        seen: list[Tensor] = []
        layer = model[0]
        layer.register_forward_pre_hook(lambda *_: seen.append(layer.weight.detach().clone()))
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))  # type: ignore[no-untyped-call]
        for _ in range(2):
            wrapped(torch.ones(2, WIDTH)).sum().backward()
            held = sum(tensor.numel() for tensor in wrapped.held()["parameters"])
            # a quarter, and a half inside the node
            counted = held == sum(3 * len(flat.mine) for flat in wrapped.flats)
            optimizer.step()
        left = sum(flat.second is not None for flat in wrapped.flats)  # type: ignore[attr-defined]
        return torch.equal(seen[0], seen[1]), not torch.equal(seen[1], seen[2]), left == 0, counted

    assert all(all(answers) for answers in minidist.run(program, 4))


@pytest.mark.parametrize("op", ("sum", "mean"))
def test_it_trains_as_fsdp_does_but_for_rounding(op: str) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        found = []
        for kind, options in ((FSDP, {}), (ZeROPlusPlus, {"node_ranks": 2})):
            model = kind(blocks(comm.rank), comm, op=op, **options)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
            model(x).square().sum().backward()
            parts = [piece.grad.clone() for piece in model.slices if piece.grad is not None]
            found.append(torch.cat(parts))  # of this rank
        return found[0], found[1]

    for exact, rounded in minidist.run(program, 6):
        # Of 256 normal numbers the largest is about 3: a step of 3/7 rounds each hop by 3/7/√12 =
        # 0.12.
        assert 0.1 < (exact - rounded).norm() / exact.norm() < 0.25


@pytest.mark.parametrize("read", ("gathered", "unwrap", "state"))
def test_what_is_read_is_not_rounded(read: str) -> None:
    def program(comm: Communicator) -> bool:
        model = blocks(0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        wrapped = ZeROPlusPlus(model, comm, op="sum", node_ranks=2)
        wrapped(torch.randn(2, WIDTH)).sum().backward()
        if read == "state":
            return all(
                torch.equal(a, b)
                for a, b in zip(wrapped.full_state_dict().values(), before, strict=True)
            )
        with wrapped.gathered() if read == "gathered" else nullcontext(wrapped.unwrap()):
            return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))

    assert all(minidist.run(program, 4))


def test_nodes_of_unequal_size_are_refused() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            ValueError, match="node_ranks=2 must divide the 3 ranks into nodes of one size"
        ):
            ZeROPlusPlus(blocks(0), comm, op="sum", node_ranks=2)

    minidist.run(program, 3)
