"""A row of published measurements becomes a `Setup`. Only its configuration counts: sizes, layout
and software.

Neither rows nor names of models nor sources are looked up. One rule for all rows fills in what a
configuration leaves out:

    microbatch   one sequence in a pipeline or where it is said to be unknown, otherwise one microbatch a step
    recompute    "selective" with tp, as Megatron's sequence parallelism has it, otherwise nothing
    latent       mla says no sizes: keys and values have 512 latent channels, queries 1,536 of a model with more than
                 16 heads, and 64 are rotary, as every published model with latent attention has them
    heads        the number that divides hidden and comes nearest to heads of 128 channels
    layers       what the number of parameters leaves for them
    gradients    of 32 bits in software that has both, but of 16 with fp16 or where their reduction is hidden

A row that says something unknown, such as another GPU, is left out: nothing stands in for it.
"""

import re
from dataclasses import replace

from minidist.full.data.files import retold
from minidist.full.mesh import AXES
from minidist.full.options import shown
from minidist.plan.device import Constants, Device, Machine, PlanError, table
from minidist.plan.model import Model
from minidist.plan.published.fields import (
    LeftOut,
    PublishedRow,
    check_row,
    positive,
    read_config,
    text,
)
from minidist.plan.run import Setup, Software

SIZES = ("ffn", "head_dim", "experts", "top_k", "shared", "dense_layers", "dense_ffn")
"""Sizes that rows name as `Model` does, and need not say."""


def setup(row: PublishedRow, known: Constants) -> Setup:
    """Return the setup of a row.

    Raises
    ------
    LeftOut
        If the configuration does not say enough, or says what is not known here.
    """
    check_row(row)
    config: PublishedRow = row.get("config") or {}
    if missing := [name for name in ("hidden", "seq", "gpus") if config.get(name) is None]:
        raise LeftOut(f"the configuration has no {missing[0]}")
    if isinstance(config.get("global_batch"), list) or (
        "model_parallel" in config and "tp" not in config
    ):
        raise LeftOut("it does not say one batch, or tells tp and pp not apart")
    config = read_config(config)
    tp, pp, cp, dp, ep, shard = axes(config)
    device = Device.named(device_name(config))
    precision = precision_of(config, device)
    with retold(LeftOut, PlanError):
        sizes = model(config, pp)
    software = software_of(row, config, device)
    zero = zero_of(config, software, device)
    microbatch, batch = batches(config, pp, dp)
    recompute = first_of("recompute", config) or ("selective" if tp > 1 else "none")
    said_precision = text(config, "precision")
    narrow = "fp16" in said_precision or "overlap" in config
    # recipes reduce gradients in 16 bits (grad_reduce_in_fp32): first those of 8 bits, from 2025 all
    narrow |= release(row) >= (25 if precision == "bf16" else 24)
    chunks = chunks_of(config, sizes, pp)
    schedule = "interleaved" if chunks > 1 else schedule_of(config)
    node = config.get("node_size") or 8
    across = network(config, device)
    sp = recompute == "selective" or device.generation == "hopper"
    wide_gradients = "fp32 grad" in said_precision or (software.gradients == 4 and not narrow)
    return Setup(
        sizes,
        Machine(device.name, device, config["gpus"], node, across, price=0.0),
        config["seq"],
        batch,
        microbatch,
        tp,
        pp,
        dp,
        cp,
        ep,
        chunks=chunks,
        schedule=schedule,
        hsdp=shard,
        sp=sp or bool(config.get("sequence_parallel")),
        zero=zero,
        recompute=recompute,
        order=order_of(config),
        precision=precision,
        offload="cpu" in text(config, "offload"),
        hidden_tensor=bool(config.get("async_tp")) or sizes.parallel or "overlap" in config,
        ends_less=sizes.layers % pp != 0 and (sizes.layers + 2) % pp == 0,
        fused_loss="liger" in text(config, "fused"),
        gradient_bytes=4 if wide_gradients else 2,
        cp_comm="ulysses" if "a2a" in text(config, "cp_comm") else "ring",
        software=software,
        known=known,
    )


def device_name(config: PublishedRow) -> str:
    """Return which of `devices.toml` the row names.

    Raise LeftOut for any other: none stands in for it.
    """
    said = re.sub(r"\(paper.*\)", "", text(config, "gpu"))  # what follows is a citation
    forms = table("rows")["known"]["forms"]
    name = " ".join(word for word in re.findall(r"[a-z0-9]+", said) if word not in forms)
    devices = table("rows")["devices"]
    if name not in devices:
        raise LeftOut(f"the GPU {config.get('gpu')!r} is not in the table of devices")
    return str(devices[name])


def network(config: PublishedRow, device: Device) -> float:
    """Return the bytes/s of a node's network cards."""
    if config.get("inter_node_Gbps_per_node"):
        return float(config["inter_node_Gbps_per_node"]) / 8 * 1e9
    if "omni-path" in text(config, "interconnect"):
        return 4 * 12.5e9
    node = config.get("node_size") or 8
    return float(config.get("inter_node_GBps") or table("rows")["cards"][device.name]) * node * 1e9


def axes(config: PublishedRow) -> tuple[int, int, int, int, int, int]:
    """Return tp, pp, cp, dp, ep and the ranks that ZeRO-3 shards over, 0 for all.

    Raise LeftOut if they do not fit.
    """
    gpus, tp, pp, cp, ep = (config.get(name) or 1 for name in ("gpus", "tp", "pp", "cp", "ep"))
    dp = config.get("dp") or max(1, gpus // (tp * pp * cp))
    shard = config.get("shard") or 0
    if tp * pp * cp * dp != gpus:
        raise LeftOut(f"tp={tp} x pp={pp} x cp={cp} x dp={dp} is not {gpus} GPUs")
    # Megatron shares experts out over tp, too: tp 2 and ep 64 are 64 ranks. A `Setup` counts those
    # along tp apart, if they can be.
    if ep % tp == 0 and config.get("experts"):
        ep //= tp
    if dp * cp % ep:
        raise LeftOut(f"ep={config['ep']} does not divide tp x dp x cp = {tp * dp * cp}")
    if shard and (config.get("zero") != 3 or dp * cp % shard):
        raise LeftOut(
            f"shard={shard} of dp x cp = {dp * cp} ranks needs zero=3, and has to divide them"
        )
    if cp > 1 and text(config, "cp_comm") not in ("", "ring", "p2p", "a2a"):
        raise LeftOut(f"cp_comm {config['cp_comm']!r} is not modelled: rings and a2a are")
    return tp, pp, cp, dp, ep, 0 if shard == dp * cp else shard


def precision_of(config: PublishedRow, device: Device) -> str:
    """Return the precision of products, one of `PRECISIONS`; raise LeftOut if it is not known.

    8 bits whose scales are unsaid have one for each tensor.
    """
    found = first_of("precision", config) or "bf16"
    if found == "nvfp4" and not device.peak4:
        raise LeftOut(f"{device.name} has no products of 4 bits")
    return found


def first_of(field: str, config: PublishedRow) -> str:
    """Return what the words of a field mean by `rows.toml`; nothing if the row does not say.

    Raise LeftOut for words that are not known.
    """
    said = text(config, field)
    for sign, found in table("rows")[field].items():
        if sign in said:
            return str(found)
    if said:
        raise LeftOut(f"{'the ' * (field == 'precision')}{field} {said!r} is not known")
    return ""


def schedule_of(config: PublishedRow) -> str:
    """Return the schedule of the pipeline, without remarks."""
    said = text(config, "schedule").split(" ")[0].rstrip("*") or "1f1b"
    if said not in table("rows")["schedule"]:
        raise LeftOut(f"the schedule {said!r} is not known")
    return str(table("rows")["schedule"][said])


def zero_of(config: PublishedRow, software: Software, device: Device) -> int:
    """Return the stage of ZeRO. FSDP's words for sharding optimizer and gradients mean 2; where nothing
    is said, Megatron Core has its distributed optimizer on Hopper and later, as its examples turn it on.
    """
    said = config.get("zero")
    if said is None:
        newer = device.generation in ("hopper", "blackwell")
        said = 1 if software.engine and newer else 0
    if isinstance(said, str) and not said.lower().startswith("fsdp: shard optimizer+grads"):
        raise LeftOut(f"zero {shown(said)} is not known")
    if "distributed_optimizer" in config:
        return 1
    return 2 if isinstance(said, str) else said


def order_of(config: PublishedRow) -> tuple[str, ...]:
    """Return the axes from the outermost; rows list them from the innermost, as Megatron does."""
    if not (said := text(config, "order")):
        return ("pp", "dp", "cp", "tp")
    order = tuple(reversed(re.findall("[a-z]+", said)))
    if sorted(order) != sorted(AXES):
        raise LeftOut(f"the order {said!r} does not name each of {', '.join(AXES)} once")
    return order


def model(config: PublishedRow, pp: int) -> Model:
    """Return the sizes of the row's model."""
    arch, hidden = text(config, "arch"), config["hidden"]
    if arch not in table("rows")["known"]["architectures"]:
        raise LeftOut(f"the architecture {arch!r} is not known")
    gated = arch.startswith("llama")
    if (arch == "llama-moe") != bool(config.get("experts")):
        raise LeftOut(
            f"the architecture {arch!r} goes with experts = {config.get('experts')} in no model"
        )
    divisors = [count for count in range(8, hidden, 8) if hidden % count == 0]
    if not config.get("heads") and not divisors:
        raise LeftOut("the configuration has no heads")
    heads = config.get("heads") or min(divisors, key=lambda count: abs(hidden / count - 128))
    vocabulary = config.get("vocab") or (128256 if gated else 51200)
    layers = config.get("layers")
    if not layers and (not config.get("params_b") or config.get("experts")):
        raise LeftOut("the configuration has neither layers nor parameters")
    layers = (
        layers
        or round((config["params_b"] * 1e9 - vocabulary * hidden) / (12 * hidden**2) / pp) * pp
    )
    latent: dict[str, int] = {}
    if config.get("mla"):  # rows say only that it is there
        latent = {"latent": 512, "query_latent": 1536 if heads > 16 else 0, "rotary": 64}
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        kv=0 if config.get("mla") else config.get("kv_heads") or 0,
        gated=gated,
        tied=not gated,
        **{name: config.get(name) or 0 for name in SIZES},
        **latent,
        parallel="parallel block" in arch,
        window=1024 if "swa" in arch else 0,
        dropout=not gated and "sharding" not in config,
    )


def software_of(row: PublishedRow, config: PublishedRow, device: Device) -> Software:
    """Return the software that the options of the row belong to."""
    software = Software.named(software_name(config, device, release(row)))
    if (overlap := config.get("overlap_grad_reduce")) is not None:
        software = replace(software, overlap=overlap)
    return software


def release(row: PublishedRow) -> float:
    """Return the release of the software that a row says, as 25.09 for September 2025; 0.0 if none.

    Rows say it beside their source ("container 25.09"), where it is the only word on the software's
    year.
    """
    found = re.search(r"container [A-Za-z]*(\d\d\.\d\d)", str(row.get("source")))
    return float(found.group(1)) if found else 0.0


def software_name(config: PublishedRow, device: Device, year: float) -> str:
    """Return which of `software.toml` the options of the row belong to."""
    if device.generation == "tpu":
        return "xla"
    hopper = device.generation in ("hopper", "blackwell")
    if config.get("zero") == 3 and year:
        return "megatron-fsdp"
    if device.generation == "cdna":
        return "megatron-rocm"
    if hopper and year >= 25:
        if device.generation == "hopper" and config.get("experts"):
            return "megatron-core-2025-eager"
        return "megatron-core-2026" if year >= 26.06 else "megatron-core-2025"
    if "sharding" in config:
        return "llm-foundry"
    if config.get("compile") is False:
        return "fsdp-eager"
    if text(config, "arch").startswith("llama") and config.get("zero") == 3:
        return "fsdp-compiled"
    if "deepspeed" in text(config, "schedule") or (config.get("zero") in (1, 3) and not hopper):
        return "deepspeed"
    if hopper or "parallel block" in text(config, "arch"):
        return "megatron-core"
    newer = (
        "sequence_parallel" in config
        or "schedule" in config
        or isinstance(config.get("virtual_pp"), str)
    )
    return "megatron-2022" if newer and "framework" not in config else "megatron-2021"


def batches(config: PublishedRow, pp: int, dp: int) -> tuple[int, int]:
    """Return sequences of a microbatch and of a step."""
    batch = config.get("global_batch") or 0
    local = config.get("local_batch") or 0
    count = config.get("num_microbatches") or 0
    unsaid = 1 if pp > 1 or local or "micro_batch" in config or not batch else batch // dp
    microbatch = config.get("micro_batch") or unsaid
    if not microbatch:
        raise LeftOut(f"global_batch={batch} is less than dp={dp}")
    if not batch:
        of_rank = count * microbatch if count else local or microbatch
        batch = of_rank * dp
    return microbatch, batch


def chunks_of(config: PublishedRow, sizes: Model, pp: int) -> int:
    """Return the chunks of a rank; "one layer per chunk" is as many as a stage has layers."""
    value = config.get("virtual_pp")
    words = [word for word in str(value or "").replace("(", " ").split() if word.isdecimal()]
    several = value or "interleaved" in text(config, "schedule")
    chunks = 1
    if words:
        chunks = int(words[0])
    elif several:
        chunks = max(1, (sizes.layers + 2) // pp)
    # the embedding and the head count as layers of their own
    if not 1 <= chunks * pp <= sizes.layers + 2:
        raise LeftOut(f"pp={pp} x {chunks} chunks is more than {sizes.layers} layers")
    return chunks


def seconds(row: PublishedRow, run: Setup) -> float:
    """Return the seconds of a step that the row measured, as a time or as a throughput.

    Raises
    ------
    LeftOut
        If it says no time, or an impossible one.
    """
    measured, tokens, gpus = row["measured"], run.batch * run.sequence, run.machine.gpus
    if found := positive(measured, "step_time_s") or positive(
        row.get("derived") or {}, "step_time_s"
    ):
        return found
    if found := positive(measured, "total_ms"):
        return found / 1e3
    for name, work in (("tokens_per_s_per_gpu", tokens), ("samples_per_gpu_per_s", run.batch)):
        if rate := positive(measured, name):
            return work / (rate * gpus)
    if not (rate := positive(measured, "tflops_per_gpu")):
        raise LeftOut("it says no time")
    counted, billions = run.model.flops(run.sequence), row["config"].get("params_b")
    if billions and str(measured.get("flops_convention")).startswith("hardware"):
        counted = 8e9 * billions  # for each parameter and token, with what is recomputed
    return float(counted * tokens / (rate * 1e12 * gpus))
