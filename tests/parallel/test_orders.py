"""Strategies applied by hand: in any order that works they give the serial numbers, in all others
the right order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist
from minidist.full import (
    DDP,
    FSDP,
    ZeRO1,
    ZeRO2,
    compile_blocks,
    gather_from,
    parallelize_tensor,
)
from minidist.full.adapters import add_lora
from minidist.full.comm import Communicator
from minidist.full.expert.expert_parallel import parallelize_experts
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.placement import placement_of
from minidist.full.precision.fp8 import to_fp8
from minidist.full.recompute import recompute
from minidist.further import add_qlora

SMALL = GPTConfig(
    vocabulary=18,
    layers=2,
    hidden=16,
    heads=4,
    key_value_heads=4,
    intermediate=16,
    sequence=8,
    experts=4,
    top_k=2,
)
DENSE = GPTConfig(
    vocabulary=18, layers=2, hidden=16, heads=4, key_value_heads=4, intermediate=16, sequence=8
)
Step = Callable[[GPT, Mesh], Any]

STEPS: dict[str, Step] = {
    "experts": lambda model, mesh: parallelize_experts(model, mesh),
    "tensor": lambda model, mesh: parallelize_tensor(model, mesh.tp),
    "LoRA": lambda model, mesh: add_lora(model, 2),
    "QLoRA": lambda model, mesh: add_qlora(model, 2),
    "fp8": lambda model, mesh: to_fp8(model),
    "DDP": lambda model, mesh: DDP(model, mesh.data, "sum"),
    "ZeRO1": lambda model, mesh: ZeRO1(model, mesh.data, "sum"),
    "ZeRO2": lambda model, mesh: ZeRO2(model, mesh.data, "sum"),
    "FSDP": lambda model, mesh: FSDP(model, mesh.data, "sum"),
    "full recomputation": lambda model, mesh: recompute(model, "full"),
    "selective recomputation": lambda model, mesh: recompute(model, "selective"),
    "compiling": lambda model, mesh: compile_blocks(model.layers, "aot_eager"),
}
WRAPPED = ("DDP", "ZeRO1", "ZeRO2", "FSDP")
ORDERS: list[tuple[str, str, str]] = [
    *(
        (first, "tensor", f"{first} waits .*: parallelize_tensor comes before {first}")
        for first in WRAPPED
    ),
    *(
        (first, "experts", f"{first} waits .*: parallelize_experts comes before {first}")
        for first in WRAPPED
    ),
    *((first, "LoRA", f"{first} waits .*: add_lora comes before {first}") for first in WRAPPED),
    *((first, "QLoRA", f"{first} waits .*: add_lora comes before {first}") for first in WRAPPED),
    ("tensor", "experts", "call parallelize_experts once, and before parallelize_tensor"),
    (
        "tensor",
        "LoRA",
        "query is a ColumnParallelLinear already, .*: add_lora comes before tensor parallelism",
    ),
    (
        "fp8",
        "LoRA",
        "query is a Float8Linear already, .*: add_lora comes before .* and before to_fp8",
    ),
    ("fp8", "tensor", "multiplies in 8 bits already, .*: to_fp8 comes after parallelize_tensor"),
]


@pytest.mark.parametrize(("first", "then", "sentence"), ORDERS)
def test_a_wrong_order_is_named_with_the_right_one(first: str, then: str, sentence: str) -> None:
    """On every rank, before anything is sent."""

    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        model = GPT(DENSE if then == "QLoRA" else SMALL)
        kept = STEPS[first](model, mesh)
        sent = comm.traffic.messages
        with pytest.raises(ValueError, match=sentence):
            STEPS[then](model, mesh)
        assert comm.traffic.messages == sent
        del kept

    minidist.run(program, 4)


def gradients(model: GPT) -> dict[str, Tensor]:
    """Return those of a loss over two rows."""
    tokens = torch.randint(18, (2, 9), generator=torch.Generator().manual_seed(0))
    cross_entropy_sum(model(tokens[:, :-1], Where(weight=1 / 16)), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert None not in found.values()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("compiled_first", "policy"),
    (
        (True, "full recomputation"),
        (False, "selective recomputation"),
        pytest.param(False, "full recomputation", marks=pytest.mark.soak),
        pytest.param(True, "selective recomputation", marks=pytest.mark.soak),
    ),
)
def test_compiling_and_recomputing_go_in_both_orders(policy: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    model, mesh = (
        GPT(DENSE, dtype=torch.float64),
        Mesh(minidist.run(lambda comm: comm, 1)[0], Layout()),
    )
    for step in ("compiling", policy) if compiled_first else (policy, "compiling"):
        STEPS[step](model, mesh)
    wanted = gradients(GPT(DENSE, dtype=torch.float64))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)
    torch._dynamo.reset()


def test_experts_are_shared_out_before_matrices_are_cut() -> None:
    """Both by hand, as `parallelize` does it."""

    def program(comm: Communicator) -> None:
        tokens = torch.randint(18, (2, 8), generator=torch.Generator().manual_seed(0))
        serial, model = (GPT(SMALL, dtype=torch.float64) for _ in range(2))
        mesh = Mesh(comm, Layout(tp=2))
        STEPS["experts"](model, mesh)
        STEPS["tensor"](model, mesh)
        found = gather_from(model(tokens), mesh.tp, -1, 18)
        torch.testing.assert_close(found, serial(tokens), rtol=1e-9, atol=1e-12)
        found.square().sum().backward()  # type: ignore[no-untyped-call]
        serial(tokens).square().sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            placement, wanted = placement_of(parameter).block, serial.get_parameter(name).grad
            assert placement is not None and parameter.grad is not None and wanted is not None
            here = parameter.grad.as_subclass(Tensor)
            torch.testing.assert_close(here, placement.take(wanted), rtol=1e-9, atol=1e-12)

    minidist.run(program, 2)
