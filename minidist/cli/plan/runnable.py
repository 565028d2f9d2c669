"""A planned run as a command of `train`, and whether `train` would take it.

    run ──unsaid──▶ why no option says it          (two matrices in an MLP, two sites, ...)
        ──options──▶ --layers 32 --tp 8 ...        the one place where planned sizes and layouts become options
        ──refusal──▶ what `train` says to these    `dry_run.py` asks it

`train` needs torch even to check its options. Where there is no torch, `train` is not asked, and the
command says so. Nothing is planned here. `answer.py` prints what is found.
"""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from minidist.full.data.tokenizers import ByteTokenizer
from minidist.full.launch.parser import flag
from minidist.full.mesh import AXES
from minidist.plan.run import Setup
from minidist.plan.search import Found

OF_MODEL = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv": "key_value_heads",
    "ffn": "intermediate",
    "window": "attention_window",
    "tied": "tied",
}
OF_EXPERTS = {"experts": "experts", "top_k": "top_k", "shared": "shared_experts"}
"""Sizes of the planner's models, and what `train` calls them."""
TOKENIZER = "tokenizer.json"  # of the user: a plan knows its number of tokens alone
DROPOUT = 0.1  # a plan knows only whether there is any
ASKED = 3  # variants of a group of which `train` is asked
# refusals after which no further layout is looked at: each takes a tenth of a second
MOST_REFUSED = 12
UNASKED = (
    "# torch is not installed here, so `train` was not asked whether it takes these options: "
    "plan again where it is"
)


# ---------------------------------------------------------------- in options


def unsaid(run: Setup) -> str:
    """Return what no option of `train` says; nothing if its options say all."""
    model, machine = run.model, run.machine
    usual = model.hidden // model.heads
    lacks = {
        "MLPs of two matrices (its own have three, with SwiGLU)": not model.gated,
        "attention and MLP beside each other": model.parallel,
        f"heads of {model.head_dim} channels where hidden / heads is {usual}": model.head_dim
        != usual,
        "two sites with other numbers of layers": machine.slower is not None,
        "latent attention": model.latent > 0,
        "dense layers before those with experts": model.dense_layers > 0,
        "heads for tokens after the next": model.predicted > 0,
        f"products of {run.precision}": run.precision not in ("bf16", "fp8"),
        "TPUs": machine.device.generation == "tpu",
        "Trainium": machine.device.generation == "trainium",
    }
    found = [what for what, true in lacks.items() if true]
    return f"it has no {', and no '.join(found)}" if found else ""


def options(run: Setup) -> dict[str, Any]:
    """Return a run as options of `train`, by name.

    True is a switch; what `train` does anyway is left out.
    """
    model = run.model
    said = {theirs: getattr(model, ours) for ours, theirs in OF_MODEL.items()}
    said["dropout"] = DROPOUT * model.dropout
    if model.experts:
        said |= {theirs: getattr(model, ours) for ours, theirs in OF_EXPERTS.items()}
        # Of one expert, a share in the chosen would always be 1.
        said["raw_weights"] = model.top_k == 1
    said["tokenizer"] = TOKENIZER if model.vocabulary != ByteTokenizer.vocabulary else ""
    said |= {"sequence": run.sequence, "batch": run.batch}
    said |= {
        axis: size for axis in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(run, axis)) > 1
    }
    if run.pp > 1:
        said |= {"schedule": run.schedule, "chunks": run.chunks if run.chunks > 1 else 0}
        said["light_ends"] = run.ends_less
    said["order"] = "" if run.order == AXES else ",".join(run.order)
    if run.microbatches > 1:
        said |= {"microbatches" if run.pp > 1 else "accumulate": run.microbatches}
    said |= {"zero": run.zero, "hsdp": run.hsdp, "sp": run.sp}
    said["optimizer"] = "" if run.optimizer == "adamw" else run.optimizer
    said["recompute"] = "" if run.recompute == "none" else run.recompute
    said["offload"] = "memory" if run.offload else ""
    sixteen = "float16" if run.machine.device.generation == "volta" else "bfloat16"
    if run.autocast:
        sixteen = f"autocast-{sixteen}"
    said["precision"] = "fp8" if run.bits8 else sixteen
    return {name: value for name, value in said.items() if value}


def words(run: Setup) -> list[str]:
    """Return a run as the words of a command line of `train`."""
    found: list[str] = []
    for name, value in options(run).items():
        found += [flag(name)] if value is True else [flag(name), str(value)]
    return found


def command(run: Setup) -> list[str]:
    """Return the lines of a batch job that trains a run which `train` takes."""
    total = run.machine.total
    node = min(run.machine.hosted, total)
    whole = "" if total % node == 0 else f"--ntasks={total} "
    lines = [
        f"#SBATCH --nodes={-(-total // node)} {whole}--ntasks-per-node={node} "
        f"--gpus-per-node={node}"
    ]
    if TOKENIZER in (said := words(run)):
        lines.append(
            f"# {TOKENIZER} is yours: a plan for {run.model.vocabulary:,} tokens takes one of as "
            "many"
        )
    if "--dropout" in said:
        lines.append(
            f"# a plan knows that there is dropout, and not how much: {DROPOUT} stands for yours"
        )
    lines.append(needs_of_host(run, node) if train_can_be_asked() else UNASKED)
    return [*lines, f"srun python -m minidist train {' '.join(said)}"]


def needs_of_host(run: Setup, node: int) -> str:
    """Return a comment that says how much of its own memory a node of `node` ranks needs."""
    from minidist.cli.plan.dry_run import bytes_of_host  # here, because it needs torch

    return (
        "# each rank first draws the whole model: train asks a node for "
        f"{bytes_of_host(words(run), run, node) / 1e9:,.0f} GB of its own memory"
    )


# ---------------------------------------------------------------- would `train` take it?


def refusal(run: Setup) -> str:
    """Return why `train` does not run this, as the end of a sentence; nothing if it does, or cannot
    be asked.
    """
    if lacks := unsaid(run):
        return lacks
    if not train_can_be_asked():
        return ""
    from minidist.cli.plan.dry_run import complaint  # here, because it needs torch

    said = complaint(words(run), run)
    return f'it says: "{said}"' if said else ""


def train_can_be_asked() -> bool:
    """Tell whether `train` can check its options here: it does so with torch."""
    return find_spec("torch") is not None


# ---------------------------------------------------------------- what is offered


class Offer(NamedTuple):
    """A layout that is shown, its variants, and why `train` does not run it (nothing: it does)."""

    found: Found
    variants: Sequence[Found]
    refusal: str


def offers(groups: Sequence[Sequence[Found]], most: int) -> tuple[list[Offer], Counter[str]]:
    """Return the best of the first groups that `train` takes, at most `most`, and what it says to
    others.

    If it takes none that was looked at, the best are returned as they are.
    """
    taken: list[Offer] = []
    refused: Counter[str] = Counter()
    for group in groups:
        if unsaid(group[0].run) or len(taken) == most or refused.total() >= MOST_REFUSED:
            break
        for place, each in enumerate(group[:ASKED], start=1):
            if reason := refusal(each.run):
                refused[reason] += 1
            else:
                taken.append(Offer(each, group[place:], ""))
                break
    if taken:
        return sorted(taken, key=lambda offer: offer.found.seconds), refused
    return [Offer(group[0], group[1:], refusal(group[0].run)) for group in groups[:most]], Counter()
