"""`python -m minidist train`: the same program under `python`, `mpirun` and `torchrun`."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from minidist import further
from minidist.cli.profile import profiler
from minidist.cli.summary import summary
from minidist.cli.together import on_all_ranks, stopping_together, together
from minidist.cli.train_checks import check_files, check_memory, metrics_file, serial_metrics_file
from minidist.draw.gather_trace import gather_trace
from minidist.draw.perfetto import write
from minidist.draw.table import time_table
from minidist.full.checkpoint.store import DamagedError, complete, set_aside
from minidist.full.comm import Communicator
from minidist.full.comm.agree import all_or_none
from minidist.full.comm.errors import LaunchError, QuorumError
from minidist.full.comm.start import first_ranks, is_member, restarts
from minidist.full.comm.torch_wire import marks
from minidist.full.data.packed import Packed
from minidist.full.data.sources import said_twice
from minidist.full.data.text import Corpus, Samples, read_corpus
from minidist.full.data.tokenizers import Tokenizer, Tokens
from minidist.full.launch.leaving import Warned, listening
from minidist.full.mesh import AXES, Mesh
from minidist.full.model import generate
from minidist.full.trace import Trace
from minidist.full.trainer.checked import CheckedRun, check_order, check_run, layout_of
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.elastic.carry import Carrier, Enters
from minidist.full.trainer.elastic.elastic_run import accumulating, on_ranks_of, run_elastically
from minidist.full.trainer.flags import parse_with_notes
from minidist.full.trainer.loop import Outcome, Trainer
from minidist.full.trainer.metrics import Export, Reporter
from minidist.full.trainer.observed.exports import exports_of
from minidist.full.trainer.options import SpreadOptions
from minidist.full.trainer.resume import fingerprint, sizes_of
from minidist.full.trainer.start import Start, start_of
from minidist.full.trainer.verify import compare
from minidist.further.nf4.options import in_four_bits


def main(argv: Sequence[str]) -> int:
    """Train.

    Return the exit status: 0, 1 if `--verify` finds a difference, 2 for input that cannot be used.
    """
    if is_member():
        # here, because it connects to the launcher
        from minidist.full.comm.torch_wire.torch_member import this_member

        try:
            member = this_member()
        except LaunchError as error:
            print(f"minidist train: {error}", file=sys.stderr)
            return 2
        status = train_as(member, argv)
        if member.gpu is not None:
            member.end(status)
        return status
    return on_all_ranks("train", lambda comm: train(argv, comm))


def train(argv: Sequence[str], comm: Communicator) -> int:
    """Train as one of the ranks of `comm`; return the exit status, as `main`."""
    return stopping_together("train", comm, lambda: set_up_and_run(argv, comm))


def train_as(member: Enters, argv: Sequence[str]) -> int:
    """Train as a member of a job that goes on without the ranks that it loses; return the exit
    status.
    """

    def train_in_view(comm: Communicator, carrier: Carrier) -> int:
        return stopping_together("train", comm, lambda: set_up_and_run(argv, comm, carrier))

    # torch imports its compiler for the first optimizer, which takes a second: nobody waits for it now
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    try:
        return run_elastically(member, train_in_view)
    except QuorumError as error:
        print(f"minidist train: {error}", file=sys.stderr)
        return 1


def set_up_and_run(argv: Sequence[str], comm: Communicator, carrier: Carrier | None = None) -> int:
    """Set up the same on all ranks, then run, as the only run that saves to its folder."""
    config, notes = together(comm, lambda: asked_for(argv))
    asked, config = config, going_on(config, comm, carrier)
    by_itself = config.run.resume and not asked.run.resume
    if carrier is None:
        config = accumulating(config, comm.size, first_ranks())
    else:
        config = together(comm, lambda: on_ranks_of(config, comm.size, carrier.member.wanted))
    if comm.rank == 0 and notes:
        print("\n".join(notes), flush=True)
    torch.set_num_threads(
        max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // len(comm.node)))
    )
    comm.debug = comm.debug or config.run.debug
    comm.trace = Trace() if config.run.trace else None
    comm.ledger.mark = comm.ledger.mark or (marks.on_cpu if config.run.profile else None)
    mesh, nodes = Mesh(comm, together(comm, lambda: layout_of(config, comm.size))), comm.nodes
    if config.parallel.order != SpreadOptions.order:
        together(comm, lambda: check_order(mesh.layout, nodes))
    corpus = together(comm, lambda: read_corpus(config.data))
    vocabulary = corpus.tokenizer.vocabulary
    together(comm, lambda: check_memory(config, sizes_of(config, vocabulary), len(comm.node)))
    run = together(comm, lambda: check_run(config, mesh, vocabulary))
    with ExitStack() as held:  # also if a rank is lost before all have checked theirs
        again = carrier is not None and carrier.again
        together(comm, lambda: held.enter_context(check_files(config, comm, again)))
        return run_and_report(run, corpus, carrier, by_itself)


def asked_for(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the run that the command line asks for, and notes; raise `ConfigError` if it could not
    be.
    """
    config, notes = parse_with_notes(argv, further.Config)
    if config.data.eval_text and not config.run.eval_every:  # `losses` measures at the end
        raise ConfigError(
            f"--eval-text {' '.join(config.data.eval_text)} is for runs with --eval-every STEPS: "
            "add that, or leave --eval-text out"
        )
    return config, notes + said_twice(config.data.text, config.data.eval_text)


def going_on(config: Config, comm: Communicator, carrier: Carrier | None = None) -> Config:
    """Return the run that a job goes on with: one that was restarted, or that has lost ranks,
    resumes if it has saved anything.
    """
    again = restarts() or (carrier is not None and carrier.again)
    if not (config.run.save and again) or config.run.resume:
        return config
    folder = Path(config.run.save)
    there = together(comm, lambda: complete(folder) if comm.rank == 0 else [])
    resume = comm.all_gather_object(bool(there))[0]  # rank 0 looks for all
    return replace(config, run=replace(config.run, resume=resume))


def begin(run: CheckedRun, corpus: Corpus, by_itself: bool) -> Start:
    """Return what the run starts from. A job that goes on by itself does so from the newest
    checkpoint that is whole; others are set aside, and told. Collective.
    """
    comm, folder = run.mesh.world, Path(run.config.run.save)
    samples, held_out = corpus.samples, corpus.held_out
    while by_itself:
        try:
            return all_or_none(comm, partial(start_of, run, samples, held_out), DamagedError)
        except DamagedError as error:
            left, told = 0, str(error)
            aside = together(comm, lambda: set_aside(folder) if comm.rank == 0 else None)
            if aside is not None:
                left = len(complete(folder))
                print(f"minidist train: {told}; it is {aside.name} now", file=sys.stderr)
            if not comm.all_gather_object(left)[0]:
                run = run.from_nothing()
    return together(comm, partial(start_of, run, samples, held_out))


def run_and_report(
    run: CheckedRun, corpus: Corpus, carrier: Carrier | None = None, by_itself: bool = False
) -> int:
    """Train, and report on rank 0."""
    config, comm, samples = run.config, run.mesh.world, corpus.samples
    # what the ranks of a view hold is newer than what is on the disk
    begun = run if carrier is None or carrier.newest < 0 else run.from_nothing()
    start = begin(begun, corpus, by_itself and begun is run)
    trainer = together(comm, lambda: Trainer(run, start))
    if carrier is not None:
        carrier.prepare(trainer)
    options = config.run
    exports = together(comm, lambda: told_besides(trainer))
    # on every rank: who shares a node is for all to find out
    reporter = None
    line = (carrier.words if carrier else "") + headline(trainer, samples)
    if comm.rank == 0:
        print(line, flush=True)
        every, terminal = config.run.log_every, sys.stdout.isatty()
        reporter = Reporter(
            config.run.steps,
            metrics_file(config),
            trainer.first_step,
            every=every,
            in_place=terminal and not every,
            exports=exports,
        )
    if config.run.profile:
        trainer.profiler = profiler(config.run.profile, comm.rank, trainer.first_step)
    # a run that saves nothing has no reason to live on: signals end it, as ever
    with ExitStack() as stack:
        for export in exports:
            stack.callback(export.close)
        warned = stack.enter_context(listening() if options.save else nullcontext(Warned()))
        trainer.warned = warned.__bool__ if options.save else None
        outcome = together(comm, lambda: trainer.run(reporter))
    if config.run.trace:
        write_trace(comm, Path(config.run.trace))
    told = comm.all_gather_object((fingerprint(outcome.model), outcome.ties_alike))
    alike = len({bits for bits, _ in told}) == 1 and all(tied for _, tied in told)
    if comm.rank > 0:
        return 0
    if trainer.leaves:
        print(left_early(trainer, outcome, warned), flush=True)
        return 0 if alike else 1
    print_sample(config, outcome, corpus.tokenizer, corpus.prompt)
    verdict = None
    if config.run.verify:
        print("\nthe same run on one rank, without a strategy:", flush=True)
        vocabulary, file = corpus.tokenizer.vocabulary, serial_metrics_file(config)
        verdict = compare(config, samples, vocabulary, outcome, file)
    facts = summary(trainer, outcome, alike, verdict)
    print("\n" + facts, flush=True)
    return 0 if alike and (verdict is None or verdict.same) else 1


def told_besides(trainer: Trainer) -> list[Export]:
    """Return to whom else rank 0 tells each step."""
    options = trainer.config.run
    if trainer.comm.rank > 0:
        return []
    return exports_of(options.tensorboard, trainer.first_step)


def left_early(trainer: Trainer, outcome: Outcome, warned: Warned) -> str:
    """Say to the scheduler where the run stands, and how it goes on."""
    run, step = trainer.config.run, trainer.first_step + len(outcome.history)
    return (
        f"minidist train: saved and left after step {step} of {run.steps}, as "
        f"{warned.name or 'a signal to another rank'} asked; --save {run.save} --resume goes on "
        "from there"
    )


def headline(trainer: Trainer, samples: Samples | Packed) -> str:
    """Say what is about to be trained, on which text and ranks."""
    comm, config = trainer.comm, trainer.config
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    line = (
        f"{trainer.model.config.parameter_count:,} parameters in {config.precision}, "
        f"{samples.words(config.data.sequence)}; {ranks} on the "
        f"{comm.wire.kind} wire, {spreading(trainer)}"
    )
    memory, resumed = config.memory, trainer.start.resumed
    place = "memory" if memory.offload == "memory" else config.offload_to
    if config.adapter_rank:
        beside = " beside matrices in 4 bits" if in_four_bits(config.run) else ""
        line += f", adapters of rank {config.adapter_rank}{beside}"
    if config.run.init:
        line += f", beginning with the weights in {config.run.init}"
    if memory.recompute != "none":
        line += f", recompute {memory.recompute}"
    if config.parallel.compile:
        but = " but for dropout" if config.model.dropout > 0 else ""
        line += f", blocks compiled{but}"
    if memory.offload != "none":
        line += f", the optimizer's state in {place}"
    if resumed is not None:
        line += f"\nresumed after step {resumed.step}"
        line += (
            f", with options that are not what they were: {', '.join(resumed.changed)}"
            if resumed.changed
            else ""
        )
        line += "; nothing is left to train" if resumed.step == config.run.steps else ""
    return line


def spreading(trainer: Trainer) -> str:
    """Say in a few words how the model is spread over the ranks."""
    mesh = trainer.mesh
    links = mesh.layout.links_between(trainer.comm.nodes)
    apart = " and ".join(axis for axis in AXES if links[axis] in ("across", "both"))
    return trainer.checked.fit.words(mesh) + (
        f"; messages along {apart} leave the nodes" if apart else ""
    )


def write_trace(comm: Communicator, path: Path) -> None:
    """Have rank 0 write all ranks' events."""
    trace = gather_trace(comm)
    if comm.rank > 0:
        return
    try:
        write(trace.events, path)
    except OSError as error:
        print(
            f"minidist train: the trace {path} cannot be written ({error.strerror})",
            file=sys.stderr,
        )
    else:
        print(
            f"\n{time_table(trace.events)}\ntrace written to {path}: open it at "
            "https://ui.perfetto.dev",
            flush=True,
        )


def print_sample(config: Config, outcome: Outcome, tokenizer: Tokenizer, prompt: Tokens) -> None:
    """Let the model continue the held-out text."""
    if not config.run.sample:
        return
    generator = torch.Generator().manual_seed(config.run.seed)
    beginning = torch.tensor([prompt.tolist()], device=next(outcome.model.parameters()).device)
    tokens = generate(
        outcome.model, beginning, config.run.sample, generator, temperature=0.8, top_k=40
    )
    written = tokenizer.decode(tokens[0, len(prompt) :].tolist())
    print(
        f"\n--- a sample; the model was given {tokenizer.decode(prompt)!r} and "
        f"wrote:\n{written}\n---",
        flush=True,
    )
