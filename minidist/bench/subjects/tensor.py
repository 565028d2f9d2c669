"""A training step with tensor parallelism: minidist's, and that of torch's `parallelize_module`
(DTensor) over gloo.

    serial      forward and backward, AdamW; all ranks do it at once, each by itself
    tensor      minidist.full.parallelize_tensor, vocabulary_parallel_cross_entropy_sum
    DTensor     torch.distributed.tensor.parallel.parallelize_module, loss_parallel

Both cut the same matrices in the same way, and reduce at the same places: one all-reduce forward
and one backward for each attention and MLP, one after the embedding, one before the head, and a few
numbers a token for the loss.

    forward     embedding ─▶ Σ ─┬▶ attention ─▶ Σ ─┬▶ mlp ─▶ Σ ─▶ ... ─┬▶ head ─▶ loss
    backward                    Σ                  Σ                   Σ

Before anything is timed, all of them take two steps from the same weights, and must agree on their
losses.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor

from minidist.bench.measure import Run
from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import (
    BATCH,
    TIME,
    Backward,
    adamw_step,
    expect_same,
    forward_backward,
    gpt,
    text,
)
from minidist.full import parallelize_tensor, vocabulary_parallel_cross_entropy_sum
from minidist.full.comm import Communicator
from minidist.full.model import GPT

SAME = 1e-5  # float32 sums in another order differ by some 1e-6


@subject(peers=("serial", "DTensor"))
def tensor(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width; every rank is given the same batch."""
    builds: dict[str, Callable[[GPT, Tensor], Backward]] = {"serial": forward_backward}
    builds["tensor"] = partial(ours, comm=setting.comm)
    if setting.gloo is not None:
        builds["DTensor"] = partial(by_torch, ranks=setting.comm.size)
    for hidden in setting.options.hidden:
        runs: dict[str, Run] = {}
        for name, build in builds.items():
            model = gpt(hidden)
            runs[name] = adamw_step(model, build(model, text()))
        for _ in range(2):
            expect_same({name: run() for name, run in runs.items()}, SAME)
        yield Case(f"D={hidden}, {BATCH} x {TIME}", runs)


def ours(model: GPT, tokens: Tensor, comm: Communicator) -> Backward:
    """Split the model by minidist; all of `tokens` [B, T + 1] are there on every rank."""
    parallelize_tensor(model, comm)
    loss = partial(
        vocabulary_parallel_cross_entropy_sum, comm=comm, vocabulary=model.config.vocabulary
    )
    return forward_backward(model, tokens, loss=loss)


def by_torch(model: GPT, tokens: Tensor, ranks: int) -> Backward:
    """Split the model by torch, as its tutorial on tensor parallelism does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    parallelize_module(model, init_device_mesh("cpu", (ranks,)), torch_plan())
    run = forward_backward(model, tokens)  # its logits are a DTensor [B, T, V], split along V

    def backward() -> Tensor:
        with loss_parallel():
            return cast(Any, run()).full_tensor()  # type: ignore[no-any-return]

    return backward


def torch_plan() -> dict[str, Any]:
    """Return torch's plan for our GPT.

    Attention and MLP enter once, through `PrepareModuleInput`: were query, key and value each to
    take a plain tensor, backward would reduce three times.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    enters = PrepareModuleInput(
        input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
    )
    columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        **dict.fromkeys(("layers.*.attention", "layers.*.mlp"), enters),
        **{f"layers.*.{name}": ColwiseParallel() for name in columns},
        **{f"layers.*.{name}": RowwiseParallel() for name in ("attention.output", "mlp.down")},
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
