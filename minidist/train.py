"""Train a GPT on any mesh of ranks:

    python -m minidist.train --ranks 8 --dp 2 --tp 2 --pp 2 --verify          simulated ranks, threads
    mpirun -n 8 python -m minidist.train --dp 2 --tp 2 --pp 2 --verify        processes, over MPI
    torchrun --nproc-per-node 8 -m minidist.train --dp 2 --tp 2 --pp 2        gloo; NCCL on GPUs

Each strategy changes what the one before has made, and none knows the others:

    GPT ─▶ tensor_parallel ─▶ Stage ─▶ context_parallel ─▶ recompute_layers ─▶ DDP, ZeRO or FSDP
           cuts matrices      keeps     replaces `attend`   wraps `forward`     hooks gradients
                              layers

The loss of a microbatch is divided by the tokens of the whole batch, and gradients are summed.
Therefore every layout computes the serial gradient, and `--verify` can compare every parameter with
a run on one rank that uses no strategy at all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist import tensor
from minidist.budget import Layout, bytes_sent, option
from minidist.checkpoint import Piece, load, newest, put, save
from minidist.collectives import all_gather_object, all_reduce
from minidist.comm import Communicator
from minidist.context import context_parallel
from minidist.data import Batches, Share, read_text
from minidist.ddp import DDP, start_equal
from minidist.fsdp import FSDP
from minidist.mesh import Mesh
from minidist.model import GPT, GPTConfig, cross_entropy_sum
from minidist.pipeline import SCHEDULES, Pipeline, Stage
from minidist.precision import MixedPrecision
from minidist.processes import init
from minidist.recompute import recompute_layers
from minidist.threads import run
from minidist.zero import ZeRO

# The largest difference from the serial run, as a share of the largest element of a parameter.
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


@dataclass(frozen=True)
class Options(Layout):
    """Options of a run: a layout, and the rest. Each field is a flag."""

    dp: int = option(0, "data parallel ranks; 0: all that the other axes leave")
    microbatches: int = option(0, "parts in which a rank computes its sequences; 0: one a stage")
    schedule: str = option("1f1b", "of the pipeline: 1f1b or gpipe")
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
    verify: bool = option(False, "compare every parameter with a serial run")

    def on(self, ranks: int) -> Options:
        """Return the options with 0 replaced by numbers, or raise ValueError if they do not fit."""
        zero, tokens = self.zero, self.sequence // self.cp
        if zero >= 2 and self.pp > 1:
            why = "every microbatch would reduce, and gather, all layers anew"
            raise ValueError(f"--zero {zero} with --pp {self.pp}: {why}; use --zero 1")
        if self.sp and tokens % self.tp:
            raise ValueError(f"--sp: {tokens} tokens do not divide by --tp {self.tp}")
        if self.cp > 1 and (self.tp > 1 or self.pp > 1):
            raise ValueError(f"--cp {self.cp} goes with --dp alone: leave out --tp and --pp")
        dp = self.dp or max(1, ranks // (self.cp * self.pp * self.tp))
        return replace(self, dp=dp, microbatches=self.microbatches or self.pp)


class Run:
    """A model on a mesh, and all that trains it. Making one is collective, as are its methods."""

    def __init__(self, options: Options, comm: Communicator) -> None:
        self.options, self.comm = options, comm
        axes = {"dp": options.dp, "cp": options.cp, "pp": options.pp, "tp": options.tp}
        self.mesh = Mesh(comm, axes)
        self.data_ranks = self.mesh.group("dp", "cp")
        self.tp, self.pp, self.cp = self.mesh["tp"], self.mesh["pp"], self.mesh["cp"]
        text, place = read_text(options.text), self.mesh.coordinates
        self.batches = Batches(text, options.batch, options.sequence, options.seed)
        self.share = Share(place["dp"], options.dp, place["cp"], options.cp, options.microbatches)
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
        self.device = getattr(comm.transport, "device", torch.device("cpu"))
        model = GPT(config, options.seed, self.dtype).to(self.device)
        start_equal(model, comm)
        if options.tp > 1:
            tensor.tensor_parallel(model, self.tp, options.sp)
        self.stage = Stage(model, self.pp)
        if options.cp > 1:
            context_parallel(self.stage, self.cp)
        if options.recompute:
            recompute_layers(self.stage.layers.values())
        self.data = self.data_parallel()
        self.pipeline = Pipeline(self.pp)
        self.actions = SCHEDULES[options.schedule](options.pp, options.microbatches)[self.pp.rank]
        self.optimizer = MixedPrecision(
            self.data.trained, lambda weights: torch.optim.AdamW(weights, options.lr), comm
        )
        self.axes = {"dp": self.data_ranks, "cp": self.cp, "pp": self.pp, "tp": self.tp}
        self.steps_done = self.steps_here = 0
        if options.resume:
            self.resume()
        self.setup_bytes = {axis: group.traffic.bytes for axis, group in self.axes.items()}

    def data_parallel(self) -> DDP | ZeRO:
        """Wrap the stage in what its gradients need."""
        blocks, zero = list(self.stage.layers.values()), self.options.zero
        if zero == 0:
            return DDP(self.stage, self.data_ranks, op="sum")
        if zero == 3:
            return FSDP(self.stage, self.data_ranks, blocks)
        return ZeRO(self.stage, self.data_ranks, zero, blocks)

    # ---------------------------------------------------------------- a step

    def step(self) -> float:
        """Train on the next batch; return its loss in nats a token, on every rank."""
        microbatches = self.share.of(self.batches.batch(self.steps_done).to(self.device))
        total = self.pipelined(microbatches) if self.pp.size > 1 else self.in_turn(microbatches)
        self.stage.sum_tied_gradients()
        self.data.finish()
        if self.optimizer.step():
            self.data.publish()
        self.steps_done += 1
        self.steps_here += 1
        # Each loss stands on all tensor parallel ranks of a last stage: one of them counts it.
        counts = self.stage.last and self.tp.rank == 0
        losses = torch.tensor([total if counts else 0.0], dtype=torch.float64)
        all_reduce(losses, self.comm)
        return losses.item() / self.optimizer.scale

    def in_turn(self, microbatches: list[tuple[Tensor, Tensor]]) -> float:
        """Run one microbatch after the other; gradients travel during the last backward."""
        total = 0.0
        for number, (inputs, targets) in enumerate(microbatches):
            last = number + 1 == len(microbatches)
            with nullcontext() if last else self.data.no_sync():
                loss = self.loss(self.forward(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def pipelined(self, microbatches: list[tuple[Tensor, Tensor]]) -> float:
        """Run the schedule of this rank."""
        inputs, targets = zip(*microbatches, strict=True)
        rows, time = inputs[0].shape
        tokens = time // self.tp.size if self.options.sp else time

        def carried() -> Tensor:
            sizes = (rows, tokens, self.options.hidden)
            return torch.empty(sizes, dtype=self.dtype, device=self.device)

        with self.data.no_sync():
            return self.pipeline.run(
                self.actions, self.forward, inputs, targets, self.loss, carried
            )

    def forward(self, x: Tensor) -> Tensor:
        """Run this rank's layers, under its data strategy."""
        time = self.options.sequence // self.options.cp
        output: Tensor = self.data(x, self.share.first_position(self.options.sequence), time)
        return output

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this microbatch's part of the mean over all tokens of the batch, scaled."""
        if self.tp.size > 1:
            block = tensor.block_of(self.stage.get_parameter("head.weight"))
            total = tensor.cross_entropy_sum(logits, targets, block, self.tp)
        else:
            total = cross_entropy_sum(logits, targets)
        return total * (self.optimizer.scale / self.batches.tokens_in_batch)

    # ---------------------------------------------------------------- checkpoints

    def pieces(self, reading: bool = False) -> Iterator[Piece]:
        """Yield the weights and the optimizer's state that this rank writes, or reads.

        Of what several ranks hold, one writes: the first along an axis that holds copies. A tied
        head is written as the embedding that it is.
        """
        names = {parameter: name for name, parameter in self.stage.named_parameters()}
        master_of = dict(zip(self.optimizer.trained, self.optimizer.masters, strict=True))
        first_copy = self.options.zero > 0 or self.data_ranks.rank == 0
        for parameter, start, stop, trained, offset in self.data.owned():
            name, block = names[parameter], tensor.block_of(parameter)
            is_cut = block.shape[block.dim] != block.last - block.first
            tied_copy = self.options.tied and name == "head.weight"
            writes = first_copy and not tied_copy and (is_cut or self.tp.rank == 0)
            if not (writes or reading):
                continue
            name = "embedding.weight" if tied_copy else name
            master = master_of[trained]
            state = self.optimizer.optimizer.state[master]
            for key in ("exp_avg", "exp_avg_sq"):
                state.setdefault(key, torch.zeros_like(master))
                own = state[key].view(-1)[offset : offset + stop - start]
                yield Piece(f"{name}/{key}", block, start, stop, own)
            own = master.detach().view(-1)[offset : offset + stop - start]
            yield Piece(name, block, start, stop, own)

    def save(self) -> Path:
        """Save a checkpoint, which any layout can read; return its folder."""
        state = {"scale": self.optimizer.scale, "good_steps": self.optimizer.good_steps}
        pieces = list(self.pieces())
        return save(Path(self.options.save), self.steps_done, pieces, state, self.comm)

    def resume(self) -> None:
        """Go on from the newest checkpoint in `--resume`."""
        path = newest(Path(self.options.resume))
        if path is None:
            raise FileNotFoundError(f"--resume {self.options.resume}: there is no step-* in it")
        state = load(path, list(self.pieces(reading=True)))
        self.steps_done = state["step"]
        self.optimizer.scale, self.optimizer.good_steps = state["scale"], state["good_steps"]
        for master in self.optimizer.masters:
            step = torch.tensor(float(self.steps_done))
            self.optimizer.optimizer.state[master]["step"] = step
        self.optimizer.publish()
        self.data.publish()

    def weights(self) -> dict[str, Tensor]:
        """Return every whole parameter, put together from the pieces of all ranks."""
        own = [piece for piece in self.pieces() if "/" not in piece.name]
        whole: dict[str, Tensor] = {}
        for pieces in all_gather_object(own, self.comm):
            for name, block, start, _, values in pieces:
                put(values, block, start, whole.setdefault(name, values.new_zeros(block.shape)))
        return whole

    def sent(self) -> str:
        """Say what a rank has sent along each axis in a step, in the mean, and the formula's."""
        formula = bytes_sent(self.stage.config, self.options, self.dtype.itemsize)
        words = []
        for axis, group in self.axes.items():
            here = (group.traffic.bytes - self.setup_bytes[axis]) / max(1, self.steps_here)
            mean = torch.tensor([here], dtype=torch.float64)
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
        seconds = time.perf_counter() - started
        rate = trainer.batches.tokens_in_batch / seconds
        words = f"{1000 * seconds:.0f} ms, {rate:,.0f} tokens/s"
        say(f"step {trainer.steps_done}: loss {loss:.6f}, {words}", flush=True)
        due = options.save_every and trainer.steps_done % options.save_every == 0
        if options.save and (due or trainer.steps_done == options.steps):
            say(f"saved {trainer.save()}")
    if sent := trainer.sent():
        say(f"bytes that a rank sent in a step: {sent}")
    return trainer.weights()


def verify(options: Options, weights: dict[str, Tensor]) -> str:
    """Train on one rank without any strategy, and say how far the parameters are from `weights`.

    Raises
    ------
    AssertionError
        If one is further away than the precision explains.
    """
    alone = replace(
        options, dp=1, cp=1, pp=1, tp=1, zero=0, sp=False, microbatches=1, recompute=False, save=""
    )
    (serial,) = run(lambda comm: train(alone, comm, talk=False), ranks=1)
    assert serial.keys() == weights.keys(), "the two runs have other parameters"
    worst, name = 0.0, ""
    for each, wanted in serial.items():
        size = wanted.abs().max().item()
        off = (weights[each] - wanted).abs().max().item() / size
        if not off <= worst:
            worst, name = off, each
    bound = BOUNDS[options.precision]
    words = f"{name or 'all'} differs most, by {worst:.1e} of its largest element (bound {bound})"
    assert worst <= bound, words
    return f"verified: every parameter equals the serial run; {words}"


def main() -> None:
    """Read the flags; train on simulated ranks if `--ranks` is given, else on those started."""
    parser = argparse.ArgumentParser("minidist.train", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--ranks", type=int, default=0, help="number of ranks to simulate by threads"
    )
    for field in fields(Options):
        flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = type(field.default)
            parser.add_argument(flag, type=kind, default=field.default, help=text, metavar="")
    given: dict[str, Any] = vars(parser.parse_args())
    ranks = given.pop("ranks")
    options = Options(**given)
    if ranks:
        weights = run(lambda comm: train(options, comm), ranks)[0]
    else:
        comm = init()
        weights = train(options, comm)
        if comm.rank:
            return
    if options.verify:
        print(verify(options, weights))


if __name__ == "__main__":
    main()
