"""A row of published measurements as a `Setup`: only what its configuration says of sizes, layout and software counts.

No row, no model's name and no source is looked up. What a configuration leaves out is filled in by a rule for all:

    microbatch   one sequence in a pipeline or where it is said to be unknown, otherwise one microbatch a step
    recompute    "selective" with tp, as Megatron's sequence parallelism has it, otherwise nothing
    heads        the number that divides hidden and comes nearest to heads of 128 channels
    layers       what the number of parameters leaves for them
    gradients    of 32 bits in software that has both, but of 16 with fp16 or where their reduction is hidden
"""

from typing import Any

from minidist.plan.device import Constants, Device, Machine
from minidist.plan.model import Model
from minidist.plan.run import Setup, Software

Row = dict[str, Any]
POLICIES = {
    "none": "none",
    "full": "full",
    "op": "op",
    "layer": "half",
    "selective": "selective",
}  # the first that fits


class LeftOut(ValueError):
    """A row that cannot be predicted; the message says why."""


def text(config: Row, *names: str) -> str:
    """Return what a configuration says under these names, in small letters."""
    return " ".join(str(config.get(name) or "") for name in names).lower()


def setup(row: Row, known: Constants) -> Setup:
    """Return the setup of a row.

    Raises
    ------
    LeftOut
        If the configuration does not say enough.
    """
    config: Row = row.get("config") or {}
    if missing := [name for name in ("hidden", "seq", "gpus") if not isinstance(config.get(name), int)]:
        raise LeftOut(f"the configuration has no {missing[0]}")
    if isinstance(config.get("global_batch"), list) or ("model_parallel" in config and "tp" not in config):
        raise LeftOut("it does not say one batch, or tells tp and pp not apart")
    tp, pp, cp = (config.get(name) or 1 for name in ("tp", "pp", "cp"))
    dp = config.get("dp") or config["gpus"] // (tp * pp * cp)
    sizes, device, precision = model(config, pp), Device.named(device_name(config)), text(config, "precision")
    software, zero = Software.named(software_name(config, device)), config.get("zero") or 0
    microbatch, batch = batches(config, pp, dp)
    said = text(config, "recompute")
    recompute = next((ours for sign, ours in POLICIES.items() if sign in said), "selective" if tp > 1 else "none")
    narrow = "fp16" in precision or "overlap" in config
    chunks = chunks_of(config, sizes, pp)
    schedule = "interleaved" if chunks > 1 else text(config, "schedule").split(" ")[0] or "1f1b"
    speed = known["eight_bits_rows" if "row" in precision else "eight_bits"]
    return Setup(
        sizes, Machine(device.name, device, config["gpus"], config.get("node_size") or 8, network(config, device), 0.0),
        config["seq"], batch, microbatch, tp, pp, dp, cp, chunks=chunks, schedule=schedule,
        sp=bool(config.get("sequence_parallel")) or recompute == "selective" or device.generation == "hopper",
        zero=1 if "distributed_optimizer" in config else 2 if isinstance(zero, str) else zero, recompute=recompute,
        bits8=speed if "fp8" in precision or "float8" in precision else 0.0, offload="cpu" in text(config, "offload"),
        hidden_tensor=bool(config.get("async_tp")) or sizes.parallel or "overlap" in config,
        ends_less=sizes.layers % pp != 0 and (sizes.layers + 2) % pp == 0, fused_loss="liger" in text(config, "fused"),
        gradient_bytes=4 if "fp32 grad" in precision or (software.gradients == 4 and not narrow) else 2,
        software=software, known=known,
    )  # fmt: skip


def model(config: Row, pp: int) -> Model:
    """Return the sizes of the row's model."""
    arch, hidden = text(config, "arch"), config["hidden"]
    gated = arch.startswith("llama")
    divisors = [count for count in range(8, hidden, 8) if hidden % count == 0]
    heads = config.get("heads") or min(divisors, key=lambda count: abs(hidden / count - 128))
    vocabulary = config.get("vocab") or (128256 if gated else 51200)
    layers = config.get("layers")
    if not layers and "params_b" not in config:
        raise LeftOut("the configuration has neither layers nor parameters")
    layers = layers or round((config["params_b"] * 1e9 - vocabulary * hidden) / (12 * hidden**2) / pp) * pp
    return Model(
        layers, hidden, heads, vocabulary, config.get("kv_heads") or 0, config.get("ffn") or 0, gated=gated,
        tied=not gated, parallel="parallel block" in arch, window=1024 if "swa" in arch else 0,
        dropout=not gated and "sharding" not in config,
    )  # fmt: skip


def device_name(config: Row) -> str:
    """Return which of `devices.toml` the row names."""
    gpu = text(config, "gpu").replace("_", "-")
    small = "40gb" in gpu and "80gb" not in gpu
    names = {"v100": "v100", "h200": "h200", "b200": "b200", "500w": "h100-500w", "h100": "h100"}
    return next((ours for sign, ours in names.items() if sign in gpu), "a100-40" if small else "a100-80")


def software_name(config: Row, device: Device) -> str:
    """Return which of `software.toml` the options of the row belong to."""
    hopper = device.generation in ("hopper", "blackwell")
    if "sharding" in config or config.get("compile") is False:
        return "fsdp-eager"
    if text(config, "arch").startswith("llama") and config.get("zero") == 3:
        return "fsdp-compiled"
    if "deepspeed" in text(config, "schedule") or (config.get("zero") in (1, 3) and not hopper):
        return "deepspeed"
    if hopper or "parallel block" in text(config, "arch"):
        return "megatron-core"
    newer = "sequence_parallel" in config or "schedule" in config or isinstance(config.get("virtual_pp"), str)
    return "megatron-2022" if newer and "framework" not in config else "megatron-2021"


def batches(config: Row, pp: int, dp: int) -> tuple[int, int]:
    """Return sequences of a microbatch and of a step."""
    whole, local, count = (config.get(name) or 0 for name in ("global_batch", "local_batch", "num_microbatches"))
    unsaid = 1 if pp > 1 or local or "micro_batch" in config or not whole else whole // dp
    each = int(config.get("micro_batch") or unsaid)
    return each, whole or (count * each * dp if count else local * dp or each * dp)


def chunks_of(config: Row, sizes: Model, pp: int) -> int:
    """Return the chunks of a rank; "one layer per chunk" is as many as a stage has layers."""
    value = config.get("virtual_pp")
    digits = [int(word) for word in str(value or "").replace("(", " ").split() if word.isdigit()]
    several = value or "interleaved" in text(config, "schedule")
    return digits[0] if digits else max(1, (sizes.layers + 2) // pp) if several else 1


def network(config: Row, device: Device) -> float:
    """Return the bytes/s of a node's network cards."""
    if "inter_node_Gbps_per_node" in config:
        return float(config["inter_node_Gbps_per_node"]) / 8 * 1e9
    if "omni-path" in text(config, "interconnect"):
        return 4 * 12.5e9
    return float(config.get("inter_node_GBps", {"volta": 12.5, "ampere": 25}.get(device.generation, 50))) * 8e9


def seconds(row: Row, run: Setup) -> float:
    """Return the seconds of a step that the row measured, by whatever it was said.

    Raises
    ------
    LeftOut
        If it says no time.
    """
    measured, tokens, gpus = row["measured"], run.batch * run.sequence, run.machine.gpus
    if found := measured.get("step_time_s") or (row.get("derived") or {}).get("step_time_s"):
        return float(found)
    if found := measured.get("total_ms"):
        return float(found) / 1e3
    for name, work in (("tokens_per_s_per_gpu", tokens), ("samples_per_gpu_per_s", run.batch)):
        if measured.get(name):
            return float(work / (measured[name] * gpus))
    if not measured.get("tflops_per_gpu"):
        raise LeftOut("it says no time")
    counted, billions = run.model.flops(run.sequence), row["config"].get("params_b")
    if billions and str(measured.get("flops_convention")).startswith("hardware"):
        counted = 8e9 * billions  # for each parameter and token, with what is recomputed
    return float(counted * tokens / (measured["tflops_per_gpu"] * 1e12 * gpus))
