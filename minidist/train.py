"""Train a GPT on any mesh of ranks:

    python -m minidist.train --ranks 8 --dp 2 --tp 2 --pp 2 --verify          simulated ranks, threads
    mpirun -n 8 python -m minidist.train --dp 2 --tp 2 --pp 2 --verify        processes, over MPI
    torchrun --nproc-per-node 8 -m minidist.train --dp 2 --tp 2 --pp 2        gloo; NCCL on GPUs

Each strategy changes what the one before has made, and none knows the others:

    GPT ─▶ tensor_parallel ─▶ Stage ─▶ context_parallel ─▶ recompute_layers ─▶ DDP, ZeRO or FSDP
           cuts matrices      keeps     replaces `attend`   wraps `forward`     hooks gradients
                              layers

The loss is divided by the tokens of the whole batch, and gradients are summed. Therefore every layout
computes the serial gradient, and `--verify` compares every parameter with a serial run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minidist import tensor
from minidist.budget import Layout, bytes_sent, option
from minidist.checkpoint import Piece, assemble, load, newest, save, without_copies
from minidist.collectives import all_gather_object, all_reduce
from minidist.comm import Communicator
from minidist.context import context_parallel
from minidist.data import Batches, Share, read_text
from minidist.ddp import DDP
from minidist.fsdp import FSDP
from minidist.mesh import Mesh
from minidist.model import GPT, GPTConfig, cross_entropy_sum
from minidist.pipeline import SCHEDULES, Pipeline, Stage, check
from minidist.precision import MixedPrecision
from minidist.processes import init
from minidist.recompute import recompute_layers
from minidist.threads import run
from minidist.zero import ZeRO

# The largest difference from the serial run, as a share of the largest element of a parameter.
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
CHOICES = {"zero": range(4), "schedule": SCHEDULES, "precision": BOUNDS}


@dataclass(frozen=True)
class Options(Layout):
    """Options of a run: a layout, and the rest. Each field is a flag."""

    dp: int = option(0, "data parallel ranks; 0: all that the other axes leave")
    microbatches: int = option(0, "parts in which a rank computes its sequences; 0: one a stage")
    schedule: str = option("1f1b", "of the pipeline: " + " or ".join(SCHEDULES))
    precision: str = option("float64", "float64, float32, bfloat16 or float16")
    layers: int = option(4, "blocks of the model")
    hidden: int = option(64, "channels")
    heads: int = option(4, "heads of attention")
    kv_heads: int = option(0, "heads of keys and values; 0: as many as heads")
    sequence: int = option(64, "tokens of a sequence; a token is a byte")
    tied: bool = option(False, "head and embedding are one matrix")
    steps: int = option(10, "steps in all")
    lr: float = option(1e-3, "learning rate of AdamW")
    seed: int = option(0, "of weights and batches")
    text: str = option("", "a file; by default the documentation that Python carries")
    save: str = option("", "a folder for checkpoints")
    save_every: int = option(0, "steps; 0: at the end alone")
    resume: str = option("", "a folder with checkpoints, of any layout")
    ranks: int = option(0, "simulate this many ranks by threads; 0: use the processes started")
    verify: bool = option(False, "compare every parameter with a serial run")

    def on(self, ranks: int) -> Options:
        """Return the options with 0 replaced by numbers, or raise ValueError if they do not fit."""
        if self.zero >= 2 and self.pp > 1:
            why = "every microbatch would reduce, and gather, all layers anew"
            raise ValueError(f"--zero {self.zero} with --pp {self.pp}: {why}; use --zero 1")
        if self.sp and self.sequence % self.tp:
            raise ValueError(f"--sp: {self.sequence} tokens do not divide by --tp {self.tp}")
        if self.cp > 1 and (self.tp > 1 or self.pp > 1):
            raise ValueError(f"--cp {self.cp} goes with --dp alone: leave out --tp and --pp")
        others = self.cp * self.pp * self.tp
        dp = self.dp or max(1, ranks // others)
        microbatches = self.microbatches or self.pp
        return replace(self, dp=dp, microbatches=microbatches)


class Run:
    """A model on a mesh, and all that trains it. Making one is collective, as are its methods."""

    def __init__(self, options: Options, comm: Communicator) -> None:
        self.options = options
        self.comm = comm
        dp, pp = options.dp, options.pp
        cp, tp = options.cp, options.tp
        mesh = Mesh(comm, {"dp": dp, "pp": pp, "cp": cp, "tp": tp})
        data_ranks = mesh.group("dp", "cp")  # they share out the tokens
        self.axes = {"dp": data_ranks}
        self.axes |= {axis: mesh[axis] for axis in ("cp", "pp", "tp")}
        place = mesh.coordinates
        text = read_text(options.text)
        self.batches = Batches(text, options.batch, options.sequence, options.seed)
        self.share = Share(place["dp"], dp, place["cp"], cp, options.microbatches)
        self.share.check(options.batch, options.sequence)

        # Now the model, then the strategies in their order.
        config = GPTConfig(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            key_value_heads=options.kv_heads,
            sequence=options.sequence,
            tied=options.tied,
        )
        self.dtype = getattr(torch, options.precision)
        self.device = getattr(comm.transport, "device", "cpu")
        model = GPT(config, options.seed, self.dtype).to(self.device)
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        if tp > 1:
            tensor.tensor_parallel(model, mesh["tp"], options.sp)
            columns = tensor.block_of(model.get_parameter("head.weight"))
            self.loss_of = partial(tensor.cross_entropy_sum, block=columns, comm=mesh["tp"])
        self.stage = Stage(model, mesh["pp"])
        if cp > 1:
            context_parallel(self.stage, mesh["cp"])
        blocks = list(self.stage.layers.values())
        if options.recompute:
            recompute_layers(blocks)
        if options.zero == 0:
            self.data: DDP | ZeRO = DDP(self.stage, data_ranks, op="sum")
        elif options.zero == 3:
            self.data = FSDP(self.stage, data_ranks, blocks)
        else:
            self.data = ZeRO(self.stage, data_ranks, options.zero, blocks)

        self.pipeline = Pipeline(mesh["pp"])
        # On one stage 1F1B is gradient accumulation, and GPipe would hold every microbatch.
        make = SCHEDULES[options.schedule if pp > 1 else "1f1b"]
        schedule = make(pp, options.microbatches)
        check(schedule)
        self.actions = schedule[place["pp"]]
        self.mixed = MixedPrecision(self.data.trained, options.lr, comm)
        self.steps_done = 0
        if options.resume:
            self.resume()
        self.first_step = self.steps_done
        for group in self.axes.values():
            group.traffic.bytes = 0  # from here on, those of steps

    def step(self) -> float:
        """Train on the next batch; return its loss in nats a token, on every rank."""
        batch = self.batches.batch(self.steps_done).to(self.device)
        inputs, targets = zip(*self.share.of(batch), strict=True)
        rows, length = inputs[0].shape
        first = self.share.first_position(self.options.sequence)
        total = torch.zeros(1, dtype=torch.float64)

        def forward(x: Tensor, microbatch: int) -> Tensor:
            y: Tensor = self.data(x, first, length)
            if self.stage.is_last:
                # Its part of the mean over all tokens of the batch.
                y = self.loss_of(y, targets[microbatch]) / self.batches.tokens_in_batch
                total.add_(y.detach().cpu())
                y = y * self.mixed.scale
            return y

        tokens = length // self.options.tp if self.options.sp else length
        sizes = (rows, tokens, self.options.hidden)
        like = torch.empty(sizes, dtype=self.dtype, device=self.device)
        *others, last = self.actions
        with self.data.no_sync():
            self.pipeline.run(others, forward, inputs, like)
        # Now one backward is left, during which gradients travel. But the gradients of the two
        # copies of a tied matrix have to be added first.
        tied_copies = self.options.tied and self.options.pp > 1
        with self.data.no_sync() if tied_copies else nullcontext():
            self.pipeline.run([last], forward, inputs, like)
        self.stage.sum_tied_gradients()
        self.data.finish()
        if self.mixed.step():
            self.data.publish()
        self.steps_done += 1
        all_reduce(total, self.comm)
        return total.item() / self.options.tp  # whose ranks have all counted the same loss

    def pieces(self) -> list[Piece]:
        """Return the weights and the optimizer's state that this rank holds."""
        names = {parameter: name for name, parameter in self.stage.named_parameters()}
        pieces = []
        for parameter, start, stop, trained, offset in self.data.owned():
            block = tensor.block_of(parameter)
            for kind, values in self.mixed.tensors_of[trained].items():
                own = values.view(-1)[offset : offset + stop - start]
                pieces.append(Piece(names[parameter] + kind, block, start, own))
        return pieces

    def save(self) -> Path:
        """Save a checkpoint, which any layout can read; return its folder."""
        folder = Path(self.options.save)
        state = self.mixed.counts()
        return save(folder, self.steps_done, self.pieces(), state, self.comm)

    def resume(self) -> None:
        """Go on from the newest checkpoint in `--resume`."""
        path = newest(Path(self.options.resume))
        state = load(path, self.pieces())
        self.steps_done = state["step"]
        self.mixed.restore(state)
        self.data.publish()

    def weights(self) -> dict[str, Tensor]:
        """Return every whole parameter, put together from the pieces of all ranks."""
        held = [piece for piece in self.pieces() if "/" not in piece.name]
        everyones = all_gather_object(without_copies(held, self.comm), self.comm)
        return assemble(piece for pieces in everyones for piece in pieces)

    def sent(self) -> str:
        """Say what a rank has sent along each axis in a step, in the mean, and the formula's."""
        formula = bytes_sent(self.stage.config, self.options, self.dtype.itemsize)
        steps = max(1, self.steps_done - self.first_step)
        words = []
        for axis, group in self.axes.items():
            mean = torch.tensor([group.traffic.bytes / steps], dtype=torch.float64)
            all_reduce(mean, self.comm, "mean")
            if group.size > 1:
                words.append(f"{axis} {mean.item():,.0f} (formula {formula[axis]:,.0f})")
        return ", ".join(words)


def train(options: Options, comm: Communicator, talk: bool = True) -> dict[str, Tensor]:
    """Train as the options say, and return the whole parameters; rank 0 prints the progress."""
    torch.set_num_threads(1)
    trainer = Run(options.on(comm.size), comm)
    say = print if talk and comm.rank == 0 else lambda *_, **__: None
    while trainer.steps_done < options.steps:
        started = time.perf_counter()
        loss = trainer.step()
        rate = trainer.batches.tokens_in_batch / (time.perf_counter() - started)
        say(f"step {trainer.steps_done}: loss {loss:.6f}, {rate:,.0f} tokens/s", flush=True)
        due = options.save_every and trainer.steps_done % options.save_every == 0
        if options.save and (due or trainer.steps_done == options.steps):
            say(f"saved {trainer.save()}")
    if sent := trainer.sent():
        say(f"bytes that a rank sent in a step: {sent}")
    return trainer.weights()


def verify(options: Options, weights: dict[str, Tensor]) -> str:
    """Train on one rank without any strategy; raise if a parameter is not the same."""
    alone = replace(
        options, dp=1, cp=1, pp=1, tp=1, zero=0, sp=False, microbatches=1, recompute=False, save=""
    )
    (serial,) = run(lambda comm: train(alone, comm, talk=False), ranks=1)
    assert serial.keys() == weights.keys(), "the two runs have other parameters"
    bound = BOUNDS[options.precision]
    worst = 0.0
    for name, wanted in serial.items():
        furthest = (weights[name] - wanted).abs().max()
        off = (furthest / wanted.abs().max()).item()
        assert off <= bound, f"{name} is off by {off:.1e} of its largest element, bound {bound}"
        worst = max(worst, off)
    return f"verified: every parameter equals the serial run to {worst:.1e} of its largest element"


def main() -> None:
    """Read the flags, and train on the ranks they ask for."""
    parser = argparse.ArgumentParser("minidist.train", description="Train a GPT on any mesh.")
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        add = partial(parser.add_argument, flag, default=field.default, help=field.metadata["help"])
        if isinstance(field.default, bool):
            add(action="store_true")
        else:
            add(type=type(field.default), choices=CHOICES.get(field.name), metavar="")
    options = Options(**vars(parser.parse_args()))
    if options.ranks:
        weights, *_ = run(lambda comm: train(options, comm), options.ranks)
    else:
        comm = init()
        weights = train(options, comm)
        if comm.rank:
            return
    if options.verify:
        print(verify(options, weights))


if __name__ == "__main__":
    main()
