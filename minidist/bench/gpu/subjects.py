"""What `bench gpu` measures: steps of sharded and of replicated models, matrix products in 8 bits,
and attention.

    sharded       no strategy, fully_shard, FSDP           4 x 2048 tokens: eager, compiled; both also recomputed
    replicated    torch DDP, DDP, ZeRO-1                   8 x 2048 tokens: compiled
    eight_bits    FSDP, the same in fp8                    those that do not recompute
    products      bf16, fp8                                of a linear layer, 8192 wide
    attention     flash, torch's FLASH_ATTENTION, cuDNN    causal, 16384 tokens, 16 heads of 128 channels

The model is a GPT of 0.94 billion parameters. The bounds are for one H100 and these sizes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minidist.bench.gpu.competitors import Work
from minidist.bench.gpu.turns import ROUNDS, side_by_side
from minidist.bench.measure import Run, alternate
from minidist.bench.options import Options
from minidist.bench.subject import Counted, Setting, subject
from minidist.bench.subjects.alone import Attention, forward_backward
from minidist.full.context.flash import flash_attention
from minidist.full.model import GPTConfig
from minidist.full.model.attention import capability
from minidist.full.precision.fp8 import E4M3, E5M2, quantize, scaled_matmul
from minidist.full.precision.mixed import supports

# Layers, hidden, sequence, vocabulary, batches; backend of the compiler; width and tokens of
# `products`.
SIZES: dict[str, tuple[int, int, int, int, tuple[int, ...], str, int]] = {
    "cuda": (16, 2048, 2048, 32_000, (4, 8), "inductor", 8192),
    "cpu": (2, 64, 32, 128, (1, 2), "aot_eager", 64),
}
ATTENTION = {"cuda": (16, 16_384, 128), "cpu": (2, 64, 16)}  # heads, length, channels of a head


@subject(peers=("no strategy", "fully_shard", "fully_shard, forward"), gloo=False)
def sharded(setting: Setting) -> Iterator[Counted]:
    """Seconds and GiB of a step, sharded over one rank: its parameters are gathered, cast and freed
    all the same.
    """
    for work in works(setting.options):
        names = (
            "no strategy",
            "fully_shard",
            *(["fully_shard, forward"] if work.backend else []),
            "FSDP",
        )
        yield from side_by_side(names, work, setting)


@subject(peers=("torch DDP",), gloo=False)
def replicated(setting: Setting) -> Iterator[Counted]:
    """Seconds and GiB of a step of a rank that has no other rank to reduce its gradients with."""
    for work in works(setting.options):
        yield from side_by_side(("torch DDP", "DDP", "ZeRO-1"), work, setting)


@subject(peers=("FSDP",), gloo=False)
def eight_bits(setting: Setting) -> Iterator[Counted]:
    """Seconds and GiB of a sharded step whose blocks multiply in 8 bits, beside 16; nothing else
    differs.
    """
    for work in works(setting.options):
        if not work.recompute and supports(E4M3, work.device):
            yield from side_by_side(("FSDP", "FSDP, fp8"), work, setting)


@subject(peers=("bf16",), gloo=False)
def products(setting: Setting) -> Iterator[Counted]:
    """Seconds of x weightᵀ, gradient weight and gradientᵀ x: of operands that have 16 or 8 bits
    already.
    """
    device = torch.device(setting.options.device)
    width = SIZES[setting.options.device][-1]
    if not wanted("products", setting.options) or not supports(E4M3, device):
        return
    one = torch.ones((), device=device)
    wide = [torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in "xwg"]
    narrow = [quantize(each, dtype) for each, dtype in zip(wide, (E4M3, E4M3, E5M2), strict=True)]

    def three(
        multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, gradient: Tensor
    ) -> None:
        multiply(x, weight.t())
        multiply(gradient, weight)
        multiply(gradient.t(), x)

    in_8_bits = partial(
        scaled_matmul,
        a_scale=one,
        b_scale=one,
        dtype=torch.bfloat16,
    )
    runs = {"bf16": partial(three, torch.matmul, *wide), "fp8": partial(three, in_8_bits, *narrow)}
    times = alternate(
        runs,
        setting.comm,
        setting.options.rounds or ROUNDS,
        0.1,
    )
    yield Counted(f"{width} wide", times, flops=6 * width**3)


@subject(peers=("FLASH_ATTENTION", "cuDNN"), gloo=False)
def attention(setting: Setting) -> Iterator[Counted]:
    """Seconds of causal attention in bfloat16 by `flash_triton.py`, and by the kernels that torch
    has.
    """
    options = setting.options
    if not wanted("attention", options):
        return
    heads, length, size = ATTENTION[options.device]
    shape = (1, length, heads, size)
    q, k, v, gradient = (
        torch.randn(shape, device=options.device, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    backends = {"FLASH_ATTENTION": SDPBackend.FLASH_ATTENTION}
    if options.device == "cuda" and capability() != (0, 0):
        backends["cuDNN"] = SDPBackend.CUDNN_ATTENTION
    kinds: dict[str, Attention] = {"flash": lambda q, k, v: flash_attention(q, k, v, True)[0]}
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    kinds |= {name: sdpa_kernel(backend)(causal) for name, backend in backends.items()}
    forward: dict[str, Run] = {name: partial(kind, q, k, v) for name, kind in kinds.items()}
    both = {name: forward_backward(kind, q, k, v, gradient) for name, kind in kinds.items()}
    products = 2 * heads * length * length * size  # of Q Kᵀ and P V, of which the mask leaves half
    for how, runs, flops in (
        ("forward", forward, products),
        ("with backward", both, 7 * products // 2),
    ):
        times = alternate(
            runs,
            setting.comm,
            options.rounds or ROUNDS,
            0.1,
        )
        yield Counted(f"{length} tokens, {how}", times, flops=flops)


def works(options: Options) -> Iterator[Work]:
    """Yield what is trained: by default the first batch in all four ways, and the others
    compiled.
    """
    layers, hidden, sequence, vocabulary, batches, backend, _ = SIZES[options.device]
    batches = (options.batch,) if options.batch else batches
    hidden = min(options.hidden, default=hidden)
    config = GPTConfig(
        vocabulary, options.layers or layers, hidden, max(1, hidden // 128), sequence=sequence
    )
    for batch, again, compiler in product(batches, (False, True), ("", backend)):
        work = Work(
            config,
            batch,
            torch.device(options.device),
            compiler,
            again,
        )
        if wanted(work.name, options, batch == batches[0] or (compiler != "" and not again)):
            yield work


def wanted(case: str, options: Options, usually: bool = True) -> bool:
    """Tell whether a case is to be measured: if cases were chosen, those with the words in their
    names.
    """
    if not options.case:
        return usually
    return any(words in case for words in options.case)
