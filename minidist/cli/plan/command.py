"""`python -m minidist plan`: which layout, how long, how much, before anything is rented.

--model llama-70b --cluster h100:64 --tokens 1.4T --batch 4M --sequence 4096 [--fixed tp=8 --fixed pp=2]
check --rows rows.json                         predictions beside published measurements
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from minidist.cli.plan import here
from minidist.draw.table import aligned
from minidist.mesh import AXES
from minidist.plan.cost import cost
from minidist.plan.device import Constants, PlanError, machine
from minidist.plan.held import GB
from minidist.plan.model import model
from minidist.plan.published import check
from minidist.plan.run import Setup, Software
from minidist.plan.search import Answer, Found, search
from minidist.plan.sent import sent

KNOWN: dict[str, Any] = {"true": True, "false": False, **{",".join(order): order for order in permutations(AXES)}}
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SHOWN = 5  # layouts, unless --top says otherwise


def main(argv: Sequence[str]) -> int:
    """Plan; return the exit status: 0, or 2 for what cannot be planned."""
    try:
        if argv and argv[0] == "check":
            return check.main(argv[1:])
        asked = parser().parse_args(argv)
        if asked.cluster == "here":
            if len(argv) > 2:
                raise PlanError("--cluster here measures a small model of its own: leave all other options out")
            return here.main()
        start = setup(asked)
        answer = search(start, fields_of([*asked.fixed, *asked.why.split()]))
        how = (amount(asked.tokens), asked.price, asked.grid, asked.mtbf)
        costs = [cost(each, *how) for each in answer.found[: asked.top]]
        if asked.picture:
            from minidist.draw.plan import draw_plan

            shown = answer.found[: asked.top]
            names, room = [name_of(each.run) for each in shown], start.machine.device.memory
            draw_plan(names, [each.held for each in shown], [each.step for each in shown], room, asked.picture)
        print(
            json.dumps(as_json(answer, costs), indent=1) if asked.format == "json" else text(answer, costs, asked.grid)
        )
    except (PlanError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    found = argparse.ArgumentParser("python -m minidist plan", description=__doc__.split("\n")[0])
    found.add_argument("--model", default="", help="a name in models.toml, a config.json, or a TOML of ours")
    found.add_argument("--cluster", required=True, help="h100:64, two sites as h100:32+a100:32@12.5e9, a TOML, or here")
    found.add_argument("--tokens", default="1T", help="of the whole run, as 1.4T")
    found.add_argument("--batch", default="4M", help="tokens of a step: 4M is 4 x 2^20")
    found.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    found.add_argument("--top", type=int, default=SHOWN, help="how many layouts to show")
    found.add_argument(
        "--fixed", action="append", default=[], metavar="NAME=VALUE", help="tp=8, zero=1, recompute=full"
    )
    found.add_argument("--why", default="", metavar="LAYOUT", help='explain one: "tp=8 pp=2 zero=1"')
    found.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="of products")
    found.add_argument("--software", help="a generation in software.toml; unsaid: the newest that the devices had")
    found.add_argument("--price", type=float, help="$ an hour and GPU; unsaid: the cluster's")
    found.add_argument("--grid", type=float, default=400, help="g of CO2 a kWh: 57 in France, 400 the world's mean")
    found.add_argument("--mtbf", type=float, default=0, help="hours between two failures of the job; 0: from the GPUs")
    found.add_argument("--picture", default="", metavar="FILE", help="memory and the step, as .png or .svg")
    found.add_argument("--format", choices=("text", "json"), default="text")
    return found


def amount(text: str) -> float:
    """Return the number that 1.4T or 500M says."""
    try:
        unit = UNITS.get(text[-1:].upper(), 0)
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise PlanError(f"{text!r} is no number: write 1.4T, 500M or 1e12") from None


def fields_of(words: Iterable[str]) -> dict[str, Any]:
    """Return the fields that words such as tp=8 and order=pp,dp,cp,tp say."""
    pairs = (word.partition("=") for word in words)
    return {name: int(value) if value.isdigit() else KNOWN.get(value, value) for name, _, value in pairs}


def setup(asked: argparse.Namespace) -> Setup:
    """Return the run that is asked for, with a batch of whole sequences."""
    if not asked.model:
        raise PlanError("say which --model: a name in models.toml, a config.json or a TOML")
    tokens = amount(asked.batch) * (2**20 / 1e6 if asked.batch[-1:].upper() == "M" else 1)
    if asked.sequence < 1 or tokens < asked.sequence:
        raise PlanError(f"--batch {asked.batch} holds no sequence of {asked.sequence} tokens: give a larger batch")
    least = {"top": 1, "tokens": 1, "price": 0, "grid": 0, "mtbf": 0}
    for name, value in vars(asked).items():
        if name in least and value is not None and not amount(str(value)) >= least[name]:
            raise PlanError(f"--{name} {value} cannot be: it is at least {least[name]}")
    if asked.picture and Path(asked.picture).suffix not in (".png", ".svg", ".pdf"):
        raise PlanError(f"--picture {asked.picture} has no known format: let it end in .png, .svg or .pdf")
    where, bits8 = machine(asked.cluster), Constants.table()["eight_bits"] if asked.precision == "fp8" else 0.0
    if bits8 and where.device.peak8 == where.device.peak:
        raise PlanError(f"--precision fp8: {where.device.name} multiplies no faster in 8 bits: leave it out")
    newest = "megatron-core-ampere" if where.device.generation in ("volta", "ampere") else "megatron-core"
    start = Setup(model(asked.model), where, asked.sequence, round(tokens / asked.sequence), bits8=bits8)
    return replace(start, software=Software.named(asked.software or newest), fused_loss=True)


def name_of(run: Setup) -> str:
    """Return a layout in words: what differs from one GPU alone."""
    axes = [f"{axis}={size}" for axis in ("tp", "pp", "cp", "ep", "dp") if (size := getattr(run, axis)) > 1]
    if run.pp > 1:
        axes.append(f"{run.schedule} x{run.chunks}" if run.chunks > 1 else run.schedule)
    axes += [f"order={','.join(run.order)}"] * (run.order != AXES)
    axes += [f"zero={run.zero}"] * (run.zero > 0) + [f"hsdp={run.shard}"] * (run.shard > 0)
    axes += ["recompute"] * (run.recompute != "none") + ["offload"] * run.offload + [f"microbatch={run.microbatch}"]
    return " ".join(axes)


def text(answer: Answer, costs: Sequence[dict[str, float]], grid: float) -> str:
    """Return what the command prints."""
    shown, first = answer.found[: len(costs)], costs[0]
    run, tokens = shown[0].run, shown[0].run.batch * shown[0].run.sequence
    title = ("layout", "step", "MFU", "tokens/s", "days", "money", "a GPU holds")
    rows = [
        (f"{place} {name_of(each.run)}", f"{each.seconds:.2f} s", f"{mfu(each):.1%}", f"{tokens / each.seconds:,.0f}",
         f"{price['days']:,.1f}", f"{price['money']:,.0f} $", f"{sum(each.held.values()) / GB:.1f} GB")
        for place, (each, price) in enumerate(zip(shown, costs, strict=True), start=1)
    ]  # fmt: skip
    refused = sorted(answer.refused.items(), key=lambda each: -each[1])
    parts = [
        f"{run.model.parameters / 1e9:.1f}B parameters on {run.machine.total} GPUs of {run.machine.name}, "
        f"{run.batch:,} sequences of {run.sequence:,} tokens a step",
        aligned(title, rows),
        by_kind("seconds of a step", [each.step for each in shown], 1.0),
        by_kind("GB of a GPU", [each.held for each in shown], GB),
        by_kind("GB sent a step, by all", [sent(each.run) for each in shown], GB),
        "\n".join(f"{place}. loses by {loses(shown[0], each)}" for place, each in enumerate(shown[1:], start=2)),
        crossing(run),
        f"{first['steps']:,} steps, {first['gpu_hours']:,.0f} GPU hours, {first['money']:,.0f} $, "
        f"{first['kwh']:,.0f} kWh, {first['co2']:,.1f} t CO2 at {grid:g} g a kWh\n"
        f"a failure every {first['mtbf_hours']:,.1f} h: save every {first['every'] / 60:,.0f} min, "
        f"{first['write']:,.0f} s each; {first['writing']:.1%} of the time is writing, {first['lost']:.1%} is lost",
        "\n".join(f"refused: {count} that {reason}" for reason, count in refused),
        "\n".join(command(run)),
    ]
    return "\n\n".join(part for part in parts if part)


def by_kind(title: str, values: Sequence[Mapping[str, float]], unit: float) -> str:
    """Return a table with a row for each kind that shows, and a column for each layout."""
    kinds = [kind for kind in values[0] if any(each[kind] >= 5e-4 * unit for each in values)]
    rows = [(f"  {kind}", *(f"{each[kind] / unit:.3f}" for each in values)) for kind in kinds]
    return aligned((title, *map(str, range(1, len(values) + 1))), rows) if rows else ""


def mfu(found: Found) -> float:
    """Return the model's operations beside what all devices could do: of the 8-bit peak, if products have 8 bits."""
    run = found.run
    peak = sum(site.gpus * (site.device.peak8 if run.bits8 else site.device.peak) for site in run.machine.sites)
    return run.model.flops(run.sequence) * run.batch * run.sequence / (found.seconds * peak)


def loses(best: Found, other: Found) -> str:
    """Say what another layout spends more on than the best, and how much it gains elsewhere."""
    more = sorted(((other.step[kind] - best.step[kind], kind) for kind in best.step), reverse=True)
    worse = ", ".join(f"{kind} +{seconds:.3f} s" for seconds, kind in more[:3] if seconds > 5e-4)
    gained = -sum(seconds for seconds, _ in more if seconds < 0)
    return (worse or "nothing that shows") + (f"; elsewhere it gains {gained:.3f} s" if gained > 5e-4 else "")


def crossing(run: Setup) -> str:
    """Say which axis crosses which link."""
    groups = {axis: group for axis in reversed(run.order) if (group := run.group(axis)).ranks > 1}
    where = {
        axis: "crosses nodes" if group.crosses(run.machine) else "stays inside nodes" for axis, group in groups.items()
    }
    said = "; ".join(f"{axis} {how}" for axis, how in where.items())
    if run.machine.slower:
        crossed = 2 * run.batch * run.sequence * run.model.hidden * run.software.width / GB
        said += (
            f"\nlayers of the stages: {', '.join(map(str, run.cut))}; {crossed:,.1f} GB a step cross the thin link: "
        )
        said += "activations and their gradients"
    return said


def command(run: Setup) -> list[str]:
    """Return the command that runs a layout, and the lines of a batch job around it; none for what `train` lacks."""
    generation = run.machine.device.generation
    if not run.model.gated or run.model.window or run.machine.slower or generation == "tpu":
        return ["`train` has no such model or machine: there is no command line for it"]
    each = run.model
    sizes = {"layers": each.layers, "hidden": each.hidden, "heads": each.heads, "key-value-heads": each.kv}
    sizes |= {"intermediate": each.ffn, "sequence": run.sequence, "batch": run.batch}
    if each.experts:
        sizes |= {"experts": each.experts, "top-k": each.top_k, "shared-experts": each.shared}
    layout = {axis: size for axis in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(run, axis)) > 1}
    if run.pp > 1:
        layout |= {"schedule": run.schedule, "chunks": run.chunks if run.chunks > 1 else 0}
    layout |= {"order": ",".join(run.order)} if run.order != AXES else {}
    layout |= {"microbatches" if run.pp > 1 else "accumulate": run.microbatches, "zero": run.zero, "hsdp": run.shard}
    saving = {"recompute": run.recompute} if run.recompute != "none" else {}
    saving |= {"offload": "memory"} if run.offload else {}
    precision = "fp8" if run.bits8 else "float16" if generation == "volta" else "bfloat16"
    options = sizes | layout | saving | {"precision": precision}
    said = " ".join(f"--{name} {value}" for name, value in options.items() if value) + " --sp" * run.sp
    node = min(run.machine.node, run.machine.total)
    return [
        f"#SBATCH --nodes={run.machine.total // node} --ntasks-per-node={node} --gpus-per-node={node}",
        f"srun python -m minidist train {said}",
    ]


def as_json(answer: Answer, costs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the same for programs."""
    layouts = [
        {"layout": name_of(each.run), "seconds": each.seconds, "mfu": mfu(each), "step": each.step, "bytes": each.held,
         "sent": sent(each.run), "links": crossing(each.run), "cost": price, "command": command(each.run)}
        for each, price in zip(answer.found, costs, strict=False)
    ]  # fmt: skip
    return {"layouts": layouts, "refused": dict(answer.refused)}
