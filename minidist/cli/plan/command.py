"""`python -m minidist plan`: which layout, how long, how much, before anything is rented.

--model llama-70b --cluster h100:64 --tokens 1.4T --batch 4M --sequence 4096 [--fixed tp=8 --fixed pp=2]
check --rows rows.json                         predictions and published measurements
--as-published                                 named runs, GPU hours as planned beside those that were published
goodput                                        what failures left of published runs, and what is predicted
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from minidist.cli.plan import as_published
from minidist.cli.plan.answer import Bill, as_json, name_of, text
from minidist.cli.plan.between_sites import sites_picture
from minidist.cli.plan.runnable import Offer, offers
from minidist.draw.plan import draw_plan
from minidist.full.data.files import retold
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.mesh import AXES
from minidist.full.options import FRACTION, read_number, shown
from minidist.plan.compute.products import PRECISIONS, check_precision
from minidist.plan.cost import REPAIR
from minidist.plan.device import PlanError, machine, ranges
from minidist.plan.failures.policies import POLICIES
from minidist.plan.failures.published import goodput_text
from minidist.plan.model import model
from minidist.plan.published import report
from minidist.plan.run import Setup, Software
from minidist.plan.search import RESERVE, Answer, Found, search
from minidist.plan.sites.ways import Wire
from minidist.plan.trust.kinds import range_around, ranks_of, trusted
from minidist.plan.trust.runs import newest

KNOWN: dict[str, Any] = {
    "true": True,
    "false": False,
    **{",".join(order): order for order in permutations(AXES)},
}
CHOICES = (*PRECISIONS, "autocast")  # autocast: 16 bits in products alone
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
OF_BATCH = {"K": 2**10 / 1e3, "M": 2**20 / 1e6}  # batches are powers of two in nearly every paper
WHAT = (__doc__ or "").split("\n")[0]  # python -OO keeps no docstrings
OTHERS = (
    "`plan check` and `plan goodput` answer for published runs, and have a --help "
    "of their own; `plan --as-published` does so for named ones."
)
BATCH = "tokens of a step: 4M is 4 x 2^20, and 512K is 512 x 2^10"
SEQUENCES = 100_000  # of a step: `train` lays out each microbatch of a pipeline when it is asked
SHOWN = 5  # layouts, unless --top says otherwise


def main(argv: Sequence[str]) -> int:
    """Plan; return the exit status: 0, or 2 for what cannot be planned."""
    try:
        if argv and argv[0] == "check":
            return report.main(argv[1:])
        if argv and argv[0] == "goodput":
            Parser("python -m minidist plan goodput").parse_args(argv[1:])
            print(goodput_text())
            return 0
        if "--as-published" in argv:
            return as_published.main([word for word in argv if word != "--as-published"])
        asked = parser().parse_args(argv)
        if asked.cluster == "here":
            if list(argv) not in (["--cluster", "here"], ["--cluster=here"]):
                raise PlanError(
                    "--cluster here measures a small model of its own: leave all other options out"
                )
            return measure_here()
        found = planned(asked)
        if asked.picture:
            picture(asked, [each.found for each in found[0]], found[2])
        print(json.dumps(as_json(*found), indent=1) if asked.format == "json" else text(*found))
    except BrokenPipeError:
        raise  # whoever reads the answer has seen enough: no fault of the plan's
    except (PlanError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def planned(asked: argparse.Namespace) -> tuple[list[Offer], dict[str, int], Bill, Answer]:
    """Return the layouts to show, what is refused and how often, what runs are to cost, and all that
    was found.
    """
    start = setup(asked)
    answer = search(start, fields_of([*asked.fixed, *asked.why.split()]), asked.reserve)
    offered, more = offers(answer.groups(), asked.top)
    refused = {
        **answer.refused,
        **{f"`train` does not run: {why}": count for why, count in more.items()},
    }
    bill = Bill(
        amount(asked.tokens),
        asked.price,
        asked.grid,
        asked.mtbf,
        asked.reserve,
        asked.policy or "spare",
        asked.repair,
        asked=bool(asked.policy or asked.mtbf),
        wire=wire_of(asked.sites),
    )
    return offered, refused, bill, answer


def measure_here() -> int:
    """Predict steps of a small model on this machine, and measure them; return the exit status."""
    fix = "): pip install torch, or name a cluster, as in --cluster h100:64"
    before = "--cluster here trains a small model on this machine, which takes torch ("
    with retold(PlanError, ImportError, before=before, after=fix):
        from minidist.cli.plan import here
    return here.main()


def check_picture(file: str) -> None:
    """Raise PlanError if no picture can be drawn there."""
    if Path(file).suffix not in (".png", ".svg", ".pdf"):
        raise PlanError(f"--picture {file} has no known format: let it end in .png, .svg or .pdf")
    fix = "): pip install matplotlib, or leave --picture out"
    before = f"--picture {file} needs the library `matplotlib` ("
    with retold(PlanError, ImportError, before=before, after=fix):
        import matplotlib.figure  # noqa: F401


def picture(asked: argparse.Namespace, shown: Sequence[Found], bill: Bill) -> None:
    """Draw the layouts that are shown, or with several sites what joins them."""
    run = shown[0].run
    title = f"{asked.model} on {run.machine.total:,} GPUs of {run.machine.name}, "
    title += f"{run.batch:,} sequences of {run.sequence:,} tokens a step"
    if sites := bill.sites(shown[0]):
        sites_picture(sites, bill.tokens, asked.picture, title)
        return
    draw_plan(
        names=[
            f"{place} (rank {rank})  {name_of(each.run)}"
            for place, (rank, each) in enumerate(zip(ranks_of(shown), shown, strict=True), start=1)
        ],
        bytes=[each.bytes for each in shown],
        steps=[each.step for each in shown],
        room=run.machine.device.memory,
        ranges=[range_around(each.run, each.seconds) for each in shown],
        said=trusted(shown),
        path=asked.picture,
        title=title,
    )


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    found = Parser("python -m minidist plan", description=WHAT, epilog=OTHERS)
    found.add_argument(
        "--model", default="", help="a name in models.toml, a config.json, or a TOML of ours"
    )
    found.add_argument(
        "--cluster",
        required=True,
        help="h100:64, two sites as h100:32+a100:32@12.5e9, a TOML, or here",
    )
    found.add_argument("--tokens", default="1T", help="of the whole run, as 1.4T")
    found.add_argument("--batch", default="4M", help=BATCH)
    found.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    found.add_argument("--top", type=int, default=SHOWN, help="how many layouts to show")
    found.add_argument(
        "--fixed",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="tp=8, zero=1, recompute=full",
    )
    found.add_argument(
        "--why", default="", metavar="LAYOUT", help='explain one: "tp=8 pp=2 zero=1"'
    )
    found.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="of matrices in layers"
    )
    found.add_argument("--precision", choices=CHOICES, default="bf16", help="of products")
    found.add_argument(
        "--software", help="a generation in software.toml; unsaid: the newest that the devices had"
    )
    found.add_argument("--price", type=float, help="$ an hour and GPU; unsaid: the cluster's")
    found.add_argument(
        "--grid", type=float, default=400, help="g of CO2 a kWh: 57 in France, 400 the world's mean"
    )
    found.add_argument(
        "--mtbf",
        type=float,
        default=0,
        help="hours between two failures of the job; 0: from the GPUs",
    )
    sites = "so many of this cluster, and the bytes/s between them: 2@125e6"
    found.add_argument("--sites", default="", metavar="NUMBER@BYTES", help=sites)
    found.add_argument(
        "--policy",
        choices=POLICIES,
        help="how the run goes on when a machine is lost; unsaid: spare",
    )
    found.add_argument(
        "--repair", type=float, default=REPAIR, help="hours until a lost machine is replaced"
    )
    share = "of a GPU's memory that has to stay free, from 0 to below 1"
    found.add_argument(
        "--reserve", type=flag_of(float, FRACTION), default=RESERVE, metavar="SHARE", help=share
    )
    found.add_argument(
        "--picture", default="", metavar="FILE", help="memory and the step, as .png or .svg"
    )
    found.add_argument("--format", choices=("text", "json"), default="text")
    return found


def amount(text: str) -> float:
    """Return the number that 1.4T or 500M says."""
    unit = UNITS.get(text[-1:].upper(), 0)
    try:
        return read_number(text[:-1] if unit else text, float) * (unit or 1)
    except ValueError as error:
        raise PlanError(f"{shown(text)} {error}: write 1.4T, 500M or 1e12") from None


def wire_of(text: str) -> Wire | None:
    """Return what joins several sites, as 2@125e6 says it; None if nothing is said."""
    if not text:
        return None
    sites, _, bandwidth = text.partition("@")
    number, speed = ranges("sites").values()
    with retold(PlanError, ValueError, before=f"--sites {shown(text)} is not like 2@125e6: it "):
        return Wire(read_number(sites, *number), read_number(bandwidth, *speed))


def fields_of(words: Iterable[str]) -> dict[str, Any]:
    """Return the fields that words such as tp=8 and order=pp,dp,cp,tp say."""
    found = {}
    for name, _, value in (word.partition("=") for word in words):
        try:
            found[name] = read_number(value, int)
        except ValueError:  # a word, which the search knows or refuses
            found[name] = KNOWN.get(value, value)
    return found


def setup(asked: argparse.Namespace) -> Setup:
    """Return the run that is asked for, with a batch of whole sequences."""
    if not asked.model:
        raise PlanError("say which --model: a name in models.toml, a config.json or a TOML")
    for name, (kind, limit) in ranges("command").items():
        if (value := getattr(asked, name, None)) is not None:
            if name in ("tokens", "batch"):
                with retold(PlanError, PlanError, before=f"--{name} "):
                    value = amount(value)
            with retold(PlanError, ValueError, before=f"--{name} {value} "):
                read_number(value, kind, limit)
    tokens = amount(asked.batch) * OF_BATCH.get(asked.batch[-1:].upper(), 1)
    if tokens < asked.sequence:
        raise PlanError(
            f"--batch {asked.batch} holds no sequence of {asked.sequence} tokens: give a larger "
            "batch"
        )
    if (sequences := round(tokens / asked.sequence)) > SEQUENCES:
        raise PlanError(
            f"--batch {asked.batch} holds {sequences:,} sequences of {asked.sequence} tokens, and a "
            f"plan is made for {SEQUENCES:,} at most: give longer ones, or a smaller batch"
        )
    wire_of(asked.sites)
    if asked.picture:
        check_picture(asked.picture)
    where = machine(asked.cluster)
    for site in where.sites:
        check_precision(asked.precision, site.device)
    start = Setup(model(asked.model), where, asked.sequence, sequences)
    if asked.precision == "autocast":
        start = replace(start, autocast="bfloat16")
    else:
        start = replace(start, precision=asked.precision)
    software = Software.named(asked.software) if asked.software else newest(where)
    return replace(start, software=software, optimizer=asked.optimizer, fused_loss=True)
