"""`python -m minidist train`: the same program under `python`, `mpirun` and `torchrun`."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from minidist.cli.together import on_all_ranks, stopping_together, together
from minidist.cli.train_checks import check_files, check_memory, check_precision, fitting_layout, metrics_file
from minidist.comm import Communicator
from minidist.comm.gather_trace import gather_trace
from minidist.mesh import Mesh
from minidist.model import generate
from minidist.parallel import FSDP
from minidist.trace import Trace
from minidist.trainer.config import Config
from minidist.trainer.flags import parse
from minidist.trainer.loop import Outcome, Trainer, device_of
from minidist.trainer.metrics import Reporter
from minidist.trainer.text import (
    Samples,
    Tokenizer,
    Tokens,
    documents,
    load_text,
    load_tokenizer,
    paragraphs,
    sequences,
    split,
)
from minidist.trainer.verify import Verdict, compare, fingerprint


def main(argv: Sequence[str]) -> int:
    """Train; return the exit status: 0, 1 if `--verify` finds a difference, 2 for input that cannot be used."""
    return on_all_ranks("train", lambda comm: train(argv, comm))


def train(argv: Sequence[str], comm: Communicator) -> int:
    """Train as one of the ranks of `comm`; return the exit status, as `main`."""
    return stopping_together("train", comm, lambda: train_and_report(together(comm, lambda: parse(argv)), comm))


def train_and_report(config: Config, comm: Communicator) -> int:
    """Set up on all ranks alike, run, and report on rank 0."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // len(comm.node))))
    comm.debug = comm.debug or config.run.debug
    comm.trace = Trace() if config.run.trace else None
    layout = together(comm, lambda: fitting_layout(config, comm.size))
    together(comm, lambda: check_precision(config, device_of(comm)))
    tokenizer, samples, prompt = together(comm, lambda: read_corpus(config))
    together(comm, lambda: check_memory(config, tokenizer.vocabulary, len(comm.node)))
    together(comm, lambda: check_files(config, comm.rank))
    mesh = Mesh(comm, layout)
    trainer = together(comm, lambda: Trainer(config, samples, tokenizer.vocabulary, mesh))
    reporter = None
    if comm.rank == 0:
        print(headline(trainer, samples), flush=True)
        reporter = Reporter(config.run.steps, metrics_file(config), trainer.first_step)
    outcome = together(comm, lambda: trainer.run(reporter))
    if config.run.trace:
        write_trace(comm, Path(config.run.trace))
    alike = len(set(comm.roll_call(fingerprint(outcome.model)))) == 1
    if comm.rank > 0:
        return 0
    print_sample(config, outcome, tokenizer, prompt)
    verdict = None
    if config.run.verify:
        print("\nthe same run on one rank, without a strategy:", flush=True)
        verdict = compare(config, samples, tokenizer.vocabulary, outcome)
    print("\n" + summary(trainer, outcome, alike, verdict), flush=True)
    return 0 if alike and (verdict is None or verdict.same) else 1


def read_corpus(config: Config) -> tuple[Tokenizer, Samples, Tokens]:
    """Return the tokenizer, the samples to train on, and an opening from the held-out text, or else from the text."""
    options = config.data
    text, tokenizer = load_text(options.text), load_tokenizer(options.tokenizer or None)
    name = " ".join(options.text) or "the built-in text"
    if options.by_length:
        training, rest = split([tokenizer.encode(part) for part in paragraphs(text)], options.held_out)
        samples = documents(training, options.sequence, name)
        prompt = next(part for part in (*rest, *training) if len(part))
    else:
        tokens, held_out = split(tokenizer.encode(text), options.held_out)
        samples = sequences(tokens, options.sequence, name)
        prompt = held_out if len(held_out) else tokens
    return tokenizer, samples, opening(prompt, tokenizer)


def opening(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Return 32 tokens of a text from where a paragraph begins, if one does soon: half a table is no opening."""
    found = re.search(r"\n\n([A-Z][^\n]{40}.{200})", tokenizer.decode(tokens[:8000]), re.DOTALL)
    return (tokenizer.encode(found[1].encode()) if found else tokens)[:32]


def headline(trainer: Trainer, samples: Samples) -> str:
    """Say what is about to be trained, on what."""
    comm, config = trainer.comm, trainer.config
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    line = (
        f"{trainer.model.parameter_count:,} parameters in {config.precision}, {len(samples):,} samples of up to "
        f"{config.data.sequence} tokens; {ranks} on the {comm.wire} wire, dp={trainer.mesh.dp.size} "
        f"({f'ZeRO-{config.parallel.zero}' if config.parallel.zero else config.parallel.strategy})"
    )
    memory = config.memory
    if memory.recompute != "none":
        line += f", recompute {memory.recompute}"
    if memory.offload != "none":
        line += f", the optimizer's state in {'memory' if memory.offload == 'memory' else config.offload_to}"
    if trainer.first_step:
        line += f"\nresumed after step {trainer.first_step}"
        line += f", with options that are not what they were: {', '.join(trainer.changed)}" if trainer.changed else ""
        line += "; nothing is left to train" if trainer.first_step == config.run.steps else ""
    return line


def write_trace(comm: Communicator, path: Path) -> None:
    """Have rank 0 write all ranks' events."""
    trace = gather_trace(comm)
    if comm.rank > 0:
        return
    try:
        trace.save(path)
    except OSError as error:
        print(f"minidist train: the trace {path} cannot be written ({error.strerror})", file=sys.stderr)
    else:
        print(f"\n{trace.table()}\ntrace written to {path}: open it at https://ui.perfetto.dev", flush=True)


def print_sample(config: Config, outcome: Outcome, tokenizer: Tokenizer, prompt: Tokens) -> None:
    """Let the model continue the held-out text."""
    if not config.run.sample:
        return
    generator = torch.Generator().manual_seed(config.run.seed)
    device = next(outcome.model.parameters()).device
    beginning = torch.tensor([prompt.tolist()], device=device)
    tokens = generate(outcome.model, beginning, config.run.sample, generator, temperature=0.8, top_k=40)
    written = tokenizer.decode(tokens[0, len(prompt) :].tolist())
    given = tokenizer.decode(prompt)
    print(f"\n--- a sample; the model was given {given!r} and wrote:\n{written}\n---", flush=True)


def summary(trainer: Trainer, outcome: Outcome, alike: bool, verdict: Verdict | None) -> str:
    """Return the table at the end."""
    history, ranks = outcome.history, trainer.mesh.dp.size
    seconds = sum(metrics.seconds for metrics in history)
    rows = [("loss, first and last step", f"{history[0].loss:.4f} -> {history[-1].loss:.4f}")] if history else []
    if verdict is not None:
        answer = "yes" if verdict.same else "NO"
        rows.append(
            ("same parameters as the serial run", f"{answer}: largest relative difference {verdict.difference:.2e}")
        )
        rows.append(("    the criterion", verdict.criterion))
    rows.append(("same bits on every rank", "yes" if alike else "NO"))
    if outcome.scaler is not None:
        skipped = sum(not math.isfinite(metrics.gradient_norm) for metrics in history)
        rows.append(("steps left out for an overflow", f"{skipped}; the loss scale is {outcome.scaler.scale:g}"))
    if ranks > 1 and trainer.config.parallel.strategy == "ddp":
        label, formula = volume(trainer)
        what = "gradients and parameters" if trainer.config.parallel.zero else "gradients"
        rows.append((f"bytes of {what} sent by rank 0", f"{outcome.gradient_bytes_sent:,}"))
        rows.append((f"    {label} x steps", f"{formula * len(history):,.0f}"))
    if history:
        tokens = sum(metrics.tokens_per_second * metrics.seconds for metrics in history)
        waiting = sum(metrics.communication * metrics.seconds for metrics in history)
        rows.append(("tokens per second", f"{tokens / seconds:,.0f}"))
        rows.append(("share of time in communication", f"{waiting / seconds:.1%}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def volume(trainer: Trainer) -> tuple[str, float]:
    """Return in words and in bytes what a rank sends in a step."""
    ranks, bytes = trainer.mesh.dp.size, sum(p.nbytes for p in trainer.model.parameters())
    if not isinstance(trainer.replica, FSDP):
        return "2 (P - 1)/P x bytes", 2 * (ranks - 1) / ranks * bytes
    parallel = trainer.config.parallel
    group, microbatches = parallel.hsdp or ranks, parallel.accumulate
    root = sum(parameter.nbytes for flat in trainer.replica.root.flats for parameter in flat.parameters)
    gathered = (2 * microbatches + 1) * bytes - microbatches * root
    inside = (group - 1) / group * gathered
    across = 2 * (1 - group / ranks) * bytes / group
    if group == ranks:
        return f"(P - 1)/P x ({2 * microbatches + 1} x bytes - {microbatches} x root's)", inside
    return f"the formula for groups of {group}", inside + across
