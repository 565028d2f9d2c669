"""`python -m minidist train`: the same program under `python`, `mpirun` and `torchrun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from minidist.comm import Communicator, LaunchError, init
from minidist.mesh import Layout, Mesh
from minidist.model import generate
from minidist.trace import Trace
from minidist.trainer.checkpoint import CheckpointError
from minidist.trainer.config import Config, ConfigError
from minidist.trainer.flags import HelpAsked, parse
from minidist.trainer.loop import Outcome, Trainer
from minidist.trainer.metrics import Reporter
from minidist.trainer.text import Samples, TextError, Tokenizer, load_text, load_tokenizer, paragraphs, sequences, split
from minidist.trainer.text import documents as as_documents
from minidist.trainer.verify import Verdict, compare, fingerprint

Ready = TypeVar("Ready")
USER_ERRORS = (ConfigError, TextError, CheckpointError, ValueError)


def main(argv: Sequence[str]) -> int:
    """Train; return the exit status: 0, 1 if `--verify` finds a difference, 2 for input that cannot be used."""
    try:
        comm = init()
    except LaunchError as error:
        print(f"minidist train: {error}", file=sys.stderr)
        return 2
    try:
        return train(argv, comm)
    except StopAll as stop:
        if comm.rank == 0:
            stop.stream.write(stop.text + "\n")
        return stop.status


class StopAll(Exception):
    """Every rank stops, and rank 0 says why."""

    def __init__(self, text: str, status: int) -> None:
        self.text, self.status = text, status
        self.stream = sys.stdout if status == 0 else sys.stderr


def train(argv: Sequence[str], comm: Communicator) -> int:
    """Set up on all ranks alike, run, and report on rank 0."""
    config = together(comm, lambda: parse(argv))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // len(comm.node))))
    comm.debug = config.run.debug
    comm.trace = Trace() if config.run.trace else None
    layout = Layout(dp=config.parallel.dp or comm.size)
    together(comm, lambda: layout.check(comm.size))
    mesh = Mesh(comm, layout)
    tokenizer, samples, held_out = together(comm, lambda: read_corpus(config))
    trainer = together(comm, lambda: Trainer(config, samples, tokenizer.vocabulary, mesh))
    reporter = None
    if comm.rank == 0:
        print(headline(config, trainer, samples), flush=True)
        reporter = Reporter(config.run.steps, metrics_file(config), trainer.first_step)
    outcome = trainer.run(reporter)
    if comm.trace is not None:
        write_trace(comm, Path(config.run.trace))
    alike = len(set(comm.roll_call(fingerprint(outcome.model)))) == 1
    if comm.rank > 0:
        return 0
    print_sample(config, outcome, tokenizer, held_out)
    verdict = None
    if config.run.verify:
        print("\nthe same run on one rank, without a strategy:", flush=True)
        torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are done
        verdict = compare(config, samples, tokenizer.vocabulary, outcome.model)
    print("\n" + summary(trainer, outcome, alike, verdict))
    return 0 if alike and (verdict is None or verdict.same) else 1


def together(comm: Communicator, work: Callable[[], Ready]) -> Ready:
    """Do `work` on every rank; if it fails on any with a user's mistake, stop all ranks with that one sentence."""
    problem, status, result = None, 2, None
    try:
        result = work()
    except HelpAsked as asked:
        problem, status = str(asked), 0
    except USER_ERRORS as error:
        problem = f"minidist train: {error}"
    first = next((other for other in comm.roll_call(problem and (problem, status)) if other), None)
    if first:
        raise StopAll(*first)
    return result  # type: ignore[return-value]


def read_corpus(config: Config) -> tuple[Tokenizer, Samples, str]:
    """Return the tokenizer, the samples to train on, and the beginning of the held-out text."""
    text, tokenizer = load_text(config.data.text), load_tokenizer(config.data.tokenizer or None)
    name = " ".join(config.data.text) or "the built-in text"
    if config.data.by_length:
        training, held_out = split([tokenizer.encode(part) for part in paragraphs(text)], config.data.held_out)
        return tokenizer, as_documents(training, config.data.sequence, name), tokenizer.decode(held_out[0][:32])
    tokens, rest = split(tokenizer.encode(text), config.data.held_out)
    return tokenizer, sequences(tokens, config.data.sequence, name), tokenizer.decode(rest[:32])


def headline(config: Config, trainer: Trainer, samples: Samples) -> str:
    """Say what is about to be trained, on what."""
    comm, model = trainer.comm, trainer.model
    resumed = f", resumed after step {trainer.first_step}" if trainer.first_step else ""
    return (
        f"{model.parameter_count:,} parameters in {config.precision}, {len(samples):,} samples of up to "
        f"{config.data.sequence} tokens; {comm.size} ranks on the {comm.wire} wire, dp={trainer.mesh.dp.size} "
        f"({config.parallel.strategy}){resumed}"
    )


def metrics_file(config: Config) -> Path | None:
    """Return where the metrics go."""
    if config.run.metrics:
        return Path(config.run.metrics)
    return Path(config.run.save) / "metrics.jsonl" if config.run.save else None


def write_trace(comm: Communicator, path: Path) -> None:
    """Have rank 0 write all ranks' events."""
    from minidist.comm.gather_trace import gather_trace

    trace = gather_trace(comm)
    if trace is not None:
        trace.save(path)
        print(f"\n{trace.table()}\ntrace written to {path}: open it at https://ui.perfetto.dev", flush=True)


def print_sample(config: Config, outcome: Outcome, tokenizer: Tokenizer, prompt: str) -> None:
    """Let the model continue the held-out text."""
    if not config.run.sample:
        return
    generator = torch.Generator().manual_seed(config.run.seed)
    beginning = torch.tensor([[int(token) for token in tokenizer.encode(prompt.encode() or b"\n")]])
    device = next(outcome.model.parameters()).device
    tokens = generate(outcome.model, beginning.to(device), config.run.sample, generator, temperature=0.8, top_k=40)
    written = tokenizer.decode(tokens[0, beginning.shape[1] :].tolist())
    print(f"\n--- a sample; the model was given {prompt!r} and wrote:\n{written}\n---", flush=True)


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
    if ranks > 1 and trainer.config.parallel.strategy == "ddp":
        gradients = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        formula = 2 * (ranks - 1) / ranks * gradients * len(history)
        rows.append(("bytes of gradients sent by rank 0", f"{outcome.gradient_bytes_sent:,}"))
        rows.append(("    2 (P - 1)/P x bytes x steps", f"{formula:,.0f}"))
    if history:
        tokens = sum(metrics.tokens_per_second * metrics.seconds for metrics in history)
        waiting = sum(metrics.communication * metrics.seconds for metrics in history)
        rows.append(("tokens per second", f"{tokens / seconds:,.0f}"))
        rows.append(("share of time in communication", f"{waiting / seconds:.1%}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
