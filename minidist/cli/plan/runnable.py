"""A planned run as a command of `train`, and whether `train` would take it.

    run ──unsaid──▶ why no option says it          (two matrices in an MLP, two sites, ...)
        ──options──▶ --layers 32 --tp 8 ...        the one place where planned sizes and layouts become options
        ──refusal──▶ what `train` says to these    its own parser and checks, on ranks that exist on paper alone

Nothing is planned here. `answer.py` prints what is found.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.cli.train_checks import host_memory
from minidist.comm import Communicator
from minidist.comm.buffers import Array
from minidist.comm.ledger import Ledger
from minidist.comm.wire import Request, Wire
from minidist.mesh import AXES, Layout, Mesh
from minidist.plan.run import Setup
from minidist.plan.search import Found
from minidist.trainer.checked import CheckedRun, check_order, check_run, layout_of
from minidist.trainer.config import ConfigError, flag
from minidist.trainer.corpus.tokenizers import ByteTokenizer
from minidist.trainer.flags import parse

TOKENIZER = "tokenizer.json"  # of the user: a plan knows its number of tokens alone
DROPOUT = 0.1  # a plan knows only whether there is any
ASKED = 3  # variants of a group of which `train` is asked
# refusals after which no further layout is looked at: each takes a tenth of a second
MOST_REFUSED = 12


# ---------------------------------------------------------------- in options


def unsaid(run: Setup) -> str:
    """Return what no option of `train` says; nothing if its options say all."""
    model, machine = run.model, run.machine
    usual = model.hidden // model.heads
    lacks = {
        "MLPs of two matrices (its own have three, with SwiGLU)": not model.gated,
        f"attention to the last {model.window:,} tokens alone": bool(model.window),
        "attention and MLP beside each other": model.parallel,
        f"heads of {model.head_dim} channels where hidden / heads is {usual}": model.head_dim
        != usual,
        "two sites with other numbers of layers": machine.slower is not None,
        "TPUs": machine.device.generation == "tpu",
    }
    found = [what for what, true in lacks.items() if true]
    return f"it has no {', and no '.join(found)}" if found else ""


def options(run: Setup) -> dict[str, Any]:
    """Return a run as options of `train`, by name. True is a switch; what `train` does anyway is
    left out.
    """
    model = run.model
    said: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "key_value_heads": model.kv,
        "intermediate": model.ffn,
        "tied": model.tied,
        "dropout": DROPOUT * model.dropout,
    }
    if model.experts:
        said |= {"experts": model.experts, "top_k": model.top_k, "shared_experts": model.shared}
        # of one expert, a share in the chosen would always be 1
        said["raw_weights"] = model.top_k == 1
    said["tokenizer"] = TOKENIZER if model.vocabulary != ByteTokenizer.vocabulary else ""
    said |= {"sequence": run.sequence, "batch": run.batch}
    said |= {
        axis: size for axis in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(run, axis)) > 1
    }
    if run.pp > 1:
        said |= {"schedule": run.schedule, "chunks": run.chunks if run.chunks > 1 else 0}
    said["order"] = "" if run.order == AXES else ",".join(run.order)
    if run.microbatches > 1:
        said |= {"microbatches" if run.pp > 1 else "accumulate": run.microbatches}
    said |= {"zero": run.zero, "hsdp": run.shard, "sp": run.sp}
    said["recompute"] = "" if run.recompute == "none" else run.recompute
    said["offload"] = "memory" if run.offload else ""
    sixteen = "float16" if run.machine.device.generation == "volta" else "bfloat16"
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
    node = min(run.machine.node, run.machine.total)
    lines = [
        f"#SBATCH --nodes={run.machine.total // node} --ntasks-per-node={node} "
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
    checked = dry_run(run)
    needed = host_memory(checked.config, checked.sizes, node) / 1e9
    lines.append(
        f"# each rank first draws the whole model: train asks a node for {needed:,.0f} GB of its "
        "own memory"
    )
    return [*lines, f"srun python -m minidist train {' '.join(said)}"]


# ---------------------------------------------------------------- would `train` take it?


def refusal(run: Setup) -> str:
    """Return why `train` does not run this, as the end of a sentence; nothing if it does."""
    if lacks := unsaid(run):
        return lacks
    try:
        dry_run(run)
    except ConfigError as error:
        return f'it says: "{error}"'
    return ""


def dry_run(run: Setup) -> CheckedRun:
    """Have `train` read its command line and check it, for these ranks. Nothing is sent, and no
    weight is drawn.

    Files and memory, which are another machine's, are not checked.

    Raises
    ------
    ConfigError
        What `train` says.
    """
    config = parse(words(run))
    mesh = PaperMesh(layout_of(config, run.machine.total), run.machine.node)
    if config.parallel.order != ",".join(AXES):
        check_order(mesh.layout, mesh.world.nodes)
    return check_run(config, mesh, run.model.vocabulary)


class PaperWire(Wire):
    """The wire of a rank whose other ranks do not exist: it knows where they would be, and sends
    nothing.
    """

    kind = "paper"

    def isend(self, array: Array, to: int, tag: int) -> Request:
        raise NotImplementedError("ranks on paper send nothing")

    def irecv(self, array: Array, source: int, tag: int) -> Request:
        raise NotImplementedError("ranks on paper receive nothing")

    def roll_call(self, answer: Any) -> list[Any]:
        raise NotImplementedError("ranks on paper do not answer")

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> Wire:
        raise NotImplementedError("ranks on paper form no groups: PaperMesh has them all")

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        raise NotImplementedError("ranks on paper have no memory")

    def fail(self, error: BaseException) -> None:
        raise error


class PaperMesh(Mesh):
    """The mesh of rank 0 among ranks on paper, `node` of them in a node: checks ask it for sizes
    and places.
    """

    def __init__(self, layout: Layout, node: int) -> None:
        homes = [rank // node for rank in range(layout.size)]

        def among(*axes: str) -> Communicator:
            return Communicator(PaperWire(0, layout.group(axes, 0), "paper", homes), Ledger())

        self.layout, self.coordinate = layout, layout.coordinate(0)
        self.world = among(*AXES)
        self.dp, self.pp, self.cp, self.tp, self.ep = map(among, ("dp", "pp", "cp", "tp", "ep"))
        self.data = among("dp", "cp")


# ---------------------------------------------------------------- what is offered


class Offer(NamedTuple):
    """A layout that is shown, its variants, and why `train` does not run it (nothing: it does)."""

    found: Found
    variants: Sequence[Found]
    refusal: str


def offers(
    groups: Sequence[Sequence[Found]], most: int, why: Callable[[Setup], str] = refusal
) -> tuple[list[Offer], Counter[str]]:
    """Return the best of the first groups that `train` takes, at most `most`, and what it says to
    others.

    If it takes none that was looked at, the best are returned as they are.
    """
    taken: list[Offer] = []
    refused: Counter[str] = Counter()
    for group in groups:
        if unsaid(group[0].run) or len(taken) == most or refused.total() >= MOST_REFUSED:
            break
        for each in group[:ASKED]:
            if reason := why(each.run):
                refused[reason] += 1
            else:
                taken.append(Offer(each, [other for other in group if other is not each], ""))
                break
    if taken:
        return taken, refused
    return [Offer(group[0], group[1:], why(group[0].run)) for group in groups[:most]], Counter()
