"""The account: measured bytes against what can be said beforehand, to the byte where it can."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gpt_activations import layer_activations_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist
from minidist.draw.memory import draw_memory
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2
from minidist.full.collectives import all_reduce
from minidist.full.comm import Cluster, Communicator
from minidist.full.memory.account import CATEGORIES, Account, Holder, Timeline, total
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.precision.masters import MasterWeights
from minidist.full.recompute.segments import measure_block, recompute
from minidist.full.trace import Trace
from minidist.plan.equation import model_states

CONFIG = GPTConfig(vocabulary=61, layers=3, hidden=32, heads=4, key_value_heads=2, sequence=16)
PARAMETERS = 4 * CONFIG.parameter_count
ROWS = 3


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed, is freed because nobody holds it; a cycle would stay."""
    gc.disable()
    yield
    gc.enable()


def loss_of(model: nn.Module, device: str = "cpu") -> Tensor:
    tokens = torch.zeros(ROWS, 17, dtype=torch.int64, device=device)
    return cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])


def expected(**bytes: int) -> dict[str, int]:
    return dict.fromkeys(CATEGORIES, 0) | bytes


# ---------------------------------------------------------------- one rank


def test_a_serial_step_of_adamw_to_the_byte(without_collector: None) -> None:
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    account = Account()
    account.watch(model, optimizer)
    # momentum, variance; a step count each
    state = 2 * PARAMETERS + 4 * len(list(model.parameters()))
    with account.recording():
        assert account.now == expected(parameters=PARAMETERS)
        loss = loss_of(model)
        saved = account.now["activations"]
        assert saved > 0
        loss.backward()
        assert account.sample() == expected(parameters=PARAMETERS, gradients=PARAMETERS)
        optimizer.step()
        assert account.now == expected(parameters=PARAMETERS, gradients=PARAMETERS, optimizer=state)
        optimizer.zero_grad()
    assert account.now == expected(parameters=PARAMETERS, optimizer=state)
    assert account.peaks == expected(
        parameters=PARAMETERS, gradients=PARAMETERS, optimizer=state, activations=saved
    )
    assert total(account.peak) == max(total(held) for _, held in account.timeline)


def test_activations_rise_in_forward_and_fall_in_backward() -> None:
    account, model = Account(), GPT(CONFIG)
    account.watch(model)
    with account.recording():
        loss = loss_of(model)
        turn = len(account.timeline)
        loss.backward()
    held = [each["activations"] for _, each in account.timeline]
    assert held[:turn] == sorted(held[:turn])
    assert held[turn - 1 :] == sorted(held[turn - 1 :], reverse=True)
    assert len(set(held[turn:])) > 10 * CONFIG.layers and held[-1] == 0


def test_a_graph_that_is_dropped_gives_back_its_activations(without_collector: None) -> None:
    account, model = Account(), GPT(CONFIG)
    account.watch(model)
    with account.recording():
        loss = loss_of(model)
        assert account.sample()["activations"] > 0
        del loss
        assert account.sample()["activations"] == 0


def test_recording_changes_no_number_and_leaves_no_hook() -> None:
    models = [GPT(CONFIG), GPT(CONFIG)]
    account = Account()
    optimizer = torch.optim.SGD(models[0].parameters())
    account.watch(models[0], optimizer)
    with account.recording():
        loss_of(models[0]).backward()
    loss_of(models[1]).backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert (
            ours.grad is not None
            and theirs.grad is not None
            and torch.equal(ours.grad, theirs.grad)
        )
    with pytest.raises(KeyboardInterrupt), account.recording():
        raise KeyboardInterrupt
    samples = len(account.timeline)
    loss_of(models[0])
    assert len(account.timeline) == samples
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in models[0].modules()
    )
    assert not optimizer._optimizer_step_post_hooks


def test_storages_count_once_and_at_their_present_size() -> None:
    flat = torch.zeros(100)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:40]), nn.Parameter(flat[40:])
    model.register_buffer("average", torch.zeros(5))
    account = Account()
    account.watch(model)
    assert account.sample() == expected(parameters=400 + 20)
    flat.untyped_storage().resize_(0)
    assert account.sample() == expected(parameters=20)
    flat.untyped_storage().resize_(400)
    assert account.sample() == expected(parameters=420)


def test_master_weights_belong_to_the_optimizer() -> None:
    model = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    master.grad = torch.zeros_like(master)
    account = Account()
    account.watch(model, torch.optim.SGD([master]))
    assert account.sample() == expected(parameters=64, gradients=128, optimizer=128)


@pytest.mark.parametrize("recomputed", (False, True))
def test_what_is_recomputed_counts_while_it_is_there(recomputed: bool) -> None:
    """A checkpoint that is an autograd Function: forward keeps the inputs, backward has a layer at
    a time.
    """
    account, model = Account(), GPT(CONFIG)
    account.watch(model)
    for layer in model.layers if recomputed else ():
        layer.forward = lambda *args, layer=layer: checkpoint(
            type(layer).forward, layer, *args, use_reentrant=True
        )  # type: ignore[method-assign]
    with account.recording():
        loss = loss_of(model)
        kept = account.now["activations"]
        loss.backward()
    a_layer = layer_activations_of(CONFIG, ROWS, 16, dtype_bytes=4)
    everything = CONFIG.layers * a_layer
    assert (kept < everything) == recomputed
    # When the last layer comes back, the logits are gone, its own input was kept anyway, the
    # others' inputs remain.
    seen = account.peaks["activations"]
    assert (a_layer < seen < 2 * a_layer) if recomputed else (seen > everything)
    assert account.now["activations"] == 0


EIGHT = GPTConfig(vocabulary=8, layers=8, hidden=64, heads=4, sequence=64)


def recomputed_peak(policy: str, sizes: tuple[int, int] | None = None) -> int:
    """The most activations of a step in which blocks are recomputed: as `policy` says, or each one
    by torch.
    """
    account, model = Account(), GPT(EIGHT)
    account.watch(model)
    if policy == "torch":
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    else:
        recompute(model, policy, sizes=sizes)
    with account.recording():
        model(torch.zeros(12, 64, dtype=torch.int64)).sum().backward()
    assert account.now["activations"] == 0
    return account.peaks["activations"]


def test_hooks_of_a_checkpoint_do_not_hide_what_it_recomputes(without_collector: None) -> None:
    """k * A + ceil(L/k) * c, less what the account does not see: c is the gradient that comes in.

    Where k does not divide L, the last segment is shorter, and its input gone when the peak comes.
    """
    model, x = GPT(EIGHT), torch.randn(12, 64, 64)
    c, a_block = measure_block(model.layers[0], x, model.rotary(torch.arange(64), x.dtype), Where())
    found = {k: recomputed_peak(f"every {k}") for k in range(1, 9)}
    for k, seen in found.items():
        assert seen == pytest.approx(k * a_block + (8 // k - 1) * c, rel=0.005)
    assert recomputed_peak("sqrt", (c, a_block)) == min(found.values())
    assert recomputed_peak("torch") == pytest.approx(found[1], rel=0.001)


def test_what_a_forward_within_backward_only_looks_at_is_not_its_own(
    without_collector: None,
) -> None:
    """Here: views of tensors that somebody else keeps."""
    account, kept = Account(), torch.ones(1000)
    with account.recording():
        x = torch.ones(10, requires_grad=True)
        loss = checkpoint(lambda x: (kept[:10] + x).exp(), x, use_reentrant=False).sum()
        loss.backward()
    assert 80 <= account.peaks["activations"] < 200


class Vault(nn.Linear):
    """Says that its weight is communication, and that it keeps an activation."""

    def __init__(self, category: str) -> None:
        super().__init__(4, 4, bias=False)
        self.category = category

    def held(self) -> dict[str, list[Tensor]]:
        return {self.category: [self.weight], "activations": [torch.zeros(2)]}


def test_what_a_holder_says_comes_first() -> None:
    account = Account()
    account.watch(nn.Sequential(Vault("communication"), nn.Linear(4, 4, bias=False)))
    assert isinstance(Vault("optimizer"), Holder) and not isinstance(nn.Linear(1, 1), Holder)
    assert account.sample() == expected(parameters=64, communication=64, activations=8)
    account.watch(Vault("wishes"))
    with pytest.raises(ValueError, match="'wishes': there are parameters, gradients"):
        account.sample()


# ---------------------------------------------------------------- ranks


def test_a_bucket_counts_once_and_as_gradients_while_empty_too() -> None:
    def program(comm: Communicator) -> tuple[list[dict[str, int]], int]:
        model = GPT(CONFIG)
        wrapped = DDP(model, comm, op="sum", bucket_bytes=8192, first_bucket_bytes=1024)
        account = Account(comm)
        account.watch(wrapped)
        seen = []
        with account.recording():
            loss_of(wrapped).backward()
            seen.append(account.sample())
            wrapped.zero_grad()
            seen.append(account.sample())
        return seen, sum(bucket.flat.nbytes for bucket in wrapped.reducer.buckets)

    for seen, buckets in minidist.run(program, 2):
        assert buckets == PARAMETERS
        full, empty = seen
        other = full["communication"]  # what collectives keep
        assert full == expected(parameters=PARAMETERS, gradients=PARAMETERS, communication=other)
        assert empty == full


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_measured_states_of_every_stage_are_those_of_the_zero_paper(stage: int) -> None:
    """Mixed-precision Adam: 2 + 2 + 12 bytes a parameter, and what of them is shared out among 4
    ranks.
    """

    def program(comm: Communicator) -> dict[str, int]:
        model = GPT(replace(CONFIG, hidden=64), dtype=torch.bfloat16)
        wrapped = (DDP, ZeRO1, ZeRO2, FSDP)[stage](model, comm, op="sum")
        if isinstance(wrapped, ZeRO1 | FSDP):
            optimizer = wrapped.optimizer(MasterWeights, optimizer=torch.optim.AdamW)
        else:
            optimizer = MasterWeights(model.parameters(), optimizer=torch.optim.AdamW)
        loss_of(wrapped).backward()
        optimizer.step()
        account = Account(comm)
        account.watch(wrapped, optimizer)
        return account.sample()

    count = replace(CONFIG, hidden=64).parameter_count
    states = model_states(count, ranks=4, stage=stage)
    # its shard of the sum, beside this rank's own
    gradients = states.gradients + (2 * count / 4 if stage == 1 else 0)
    for held in minidist.run(program, 4):
        measured = (held["parameters"], held["gradients"], held["optimizer"])
        assert measured == pytest.approx((states.parameters, gradients, states.optimizer), rel=0.02)


def test_a_piece_of_registered_memory_is_one_storage() -> None:
    """Also for who holds a view from its middle, which is a storage of its own to torch."""

    def program(comm: Communicator) -> list[dict[str, int]]:
        window = comm.allocate(100, torch.float32)
        layer = nn.Linear(10, 1, bias=False)
        account = Account(comm)
        account.watch(layer)
        seen = [account.sample()]
        layer.weight.grad = torch.from_numpy(window.numpy()[50:60]).view(1, 10)  # type: ignore[union-attr]
        return [*seen, account.sample()]

    for before, after in minidist.run(program, 2):
        assert before == expected(parameters=40, communication=400)
        assert after == expected(parameters=40, gradients=400)


def test_temporaries_of_collectives_are_seen() -> None:
    def program(comm: Communicator) -> list[int]:
        account, buffer = Account(comm), torch.zeros(999)
        found = [account.sample()["communication"]]
        for algorithm in ("ring", "hierarchical"):
            all_reduce(buffer, comm, algorithm=algorithm)
            found.append(account.sample()["communication"])
        return found

    for nothing, ring, both in minidist.run(program, 3):
        assert nothing == 0
        assert 999 * 4 / 3 <= ring <= 999 * 4
        assert both >= ring


def test_meta_tensors_on_a_modelled_cluster() -> None:
    """Time is virtual, bytes are those of the real thing, and the trace shows the total."""

    def program(comm: Communicator) -> Timeline:
        model = GPT(CONFIG, device="meta")
        account = Account(comm)
        account.watch(model)
        with account.recording():
            loss = loss_of(model, "meta")
            comm.advance(1.5)
            loss.backward()
        return account.timeline

    trace = Trace()
    timelines = list(minidist.run(program, 2, cluster=Cluster.h100(nodes=1), trace=trace))
    for rank, timeline in enumerate(timelines):
        assert {moment for moment, _ in timeline} == {0.0, 1.5}
        assert timeline[-1][1] == expected(parameters=PARAMETERS, gradients=PARAMETERS)
        held = [
            event.bytes for event in trace.events if event.rank == rank and event.kind == "held"
        ]
        assert held == [total(each) for _, each in timeline]


# ---------------------------------------------------------------- shown


def timeline(*totals: int) -> Timeline:
    return [
        (0.1 * number, expected(parameters=100, activations=each))
        for number, each in enumerate(totals)
    ]


def test_the_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, count in (("one.png", 1), ("three.svg", 3)):
        draw_memory([timeline(0, 1 << 20, 5)] * count, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "three.svg").read_text().count("<!-- peak 1.0 MiB -->") == 3
    with pytest.raises(ValueError, match="nothing was sampled"):
        draw_memory([[]], tmp_path / "none.png")
