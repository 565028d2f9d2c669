"""`--optimizer muon`: the numbers of the serial run under every strategy, which state it has, and
runs that stop and go on elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import mpirun
from torch import nn
from training import PROGRAM, RUN, TINY, short_text, tensors, train_on

import minidist
from minidist.full.comm import Communicator
from minidist.full.data.text import read_corpus
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT
from minidist.full.trainer.checked import check_run
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.loop import Trainer
from minidist.full.trainer.optimizer import decay_groups
from minidist.full.trainer.start import start_of
from minidist.full.trainer.verify import largest_difference
from minidist.further import parse
from minidist.further.muon.muon_with_adamw import MuonWithAdamW, muon_groups

MUON = "--optimizer muon"
STEPS = 5


@pytest.mark.parametrize(
    "zero", (*(pytest.param(zero, marks=pytest.mark.soak) for zero in (0, 1, 2)), 3)
)
def test_under_mpirun_it_is_the_serial_run(zero: int) -> None:
    words = f"--steps 4 {MUON} --verify --zero {zero}".split()
    job = mpirun(2, PROGRAM, "train", *TINY, *words, timeout=100)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "same parameters as the serial run" in job.stdout


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, "--tp 2 --zero 1 --heads 4 --key-value-heads 1"),
        (3, "--tp 3 --heads 3 --hidden 24 --zero 3"),
        (4, "--pp 2 --zero 1 --layers 3"),
        (4, "--zero 3 --hsdp 2"),
        (2, "--cp 2 --zero 2"),
    ],
)
def test_on_other_axes_too(ranks: int, words: str) -> None:
    assert train_on(ranks, words, MUON, "--steps 3 --verify") == 0


def test_matrices_of_layers_are_muons_and_the_rest_is_not() -> None:
    model = GPT(parse([*TINY, "--layers", "2"]).gpt(19))
    names = {parameter: name for name, parameter in model.named_parameters()}
    ours, rest, norms = muon_groups(model, decay_groups(model, 0.1))
    assert ours["muon"] and {names[each].split(".")[0] for each in ours["params"]} == {"layers"}
    assert len(ours["params"]) == 2 * 7 and all(each.dim() == 2 for each in ours["params"])
    assert [names[each] for each in rest["params"]] == ["embedding.weight", "head.weight"]
    assert all(each.dim() == 1 for each in norms["params"])
    assert "muon" not in rest | norms


def test_the_serial_run_is_torchs_muon_beside_torchs_adamw() -> None:
    """With its rate of every step, its decay, and gradients that are clipped."""
    words = [*TINY, "--steps", "4", "--precision", "float64", "--lr", "0.01", *MUON.split()]
    config = parse(words)
    corpus = read_corpus(config.data)

    def program(comm: Communicator) -> tuple[GPT, GPT]:
        checked = check_run(config, Mesh(comm, Layout()), corpus.tokenizer.vocabulary)
        ours = Trainer(checked, start_of(checked, corpus.samples))
        torchs = Trainer(checked, start_of(checked, corpus.samples))
        torchs.spread()
        layers = [p for n, p in torchs.model.named_parameters() if n.startswith("layers.")]
        matrices = [each for each in layers if each.dim() == 2]
        norms = [each for each in torchs.model.parameters() if each.dim() == 1]
        tables = [torchs.model.embedding.weight, torchs.model.head.weight]
        muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))

        def step(factor: float) -> None:
            for optimizer in (muon, adamw):
                for group in optimizer.param_groups:
                    group["lr"] = torchs.optimizer.param_groups[0]["lr"]
                    for parameter in group["params"]:
                        parameter.grad.mul_(factor)
                optimizer.step()

        torchs.optimizer.step = step  # type: ignore[assignment, method-assign]
        torchs.spread = lambda: torchs.parallel  # type: ignore[method-assign]
        return ours.run().model, torchs.run().model

    [(ours, theirs)] = minidist.run(program, 1)
    assert largest_difference(ours, theirs) <= 1e-9


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_summary_counts_what_its_updates_send(
    zero: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the gradients, whose formula does not know them; without ZeRO they send nothing."""
    assert train_on(3, MUON, f"--steps 3 --zero {zero}") == 0
    said = capsys.readouterr().out
    pattern = r"Muon's updates sent by rank 0 +([\d,]+)\n +by formula, in all steps +([\d,]+)\n"
    [(counted, formula)] = re.findall(pattern, said)
    assert counted == formula and (counted == "0") == (zero == 0)
    assert train_on(3, f"--steps 3 --zero {zero}") == 0
    assert "Muon" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--offload memory", "--offload memory updates chunk by chunk, and"),
        ("--experts 4 --top-k 2", "--experts 4 are stacks, and"),
    ],
)
def test_what_it_does_not_go_with(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{why} --optimizer muon .*: leave one of them out$"):
        parse(f"{MUON} {words}".split())


def test_a_run_goes_on_on_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Momenta are in the checkpoint, whole, under the names of their matrices."""
    text = short_text(tmp_path, 700)
    # the rate does not depend on the number of steps
    base = f"{RUN} {MUON} --lr-schedule constant --warmup 0 --text {text}"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train_on(1, base, f"--steps {STEPS} --save {whole}") == 0
    for steps, ranks, words in (
        (1, 3, "--zero 3"),
        (2, 2, "--zero 0 --resume"),
        (3, 4, "--tp 2 --zero 1 --resume"),
        (4, 2, "--tp 2 --resume"),
        (STEPS, 2, "--zero 2 --resume"),
    ):
        assert train_on(ranks, base, words, f"--steps {steps} --save {stopped}") == 0
    words = f"--steps {STEPS + 1} --save {stopped} --resume --optimizer adamw"
    assert train_on(2, base, words) == 2
    assert "use --optimizer muon" in capsys.readouterr().err
    last = f"step-{STEPS:08d}"
    ours, theirs = tensors(stopped / last), tensors(whole / last)
    assert ours.keys() == theirs.keys()
    down, table = "layers.0.mlp.down.weight", "embedding.weight"
    assert {name for name in ours if name.startswith(down)} == {down, f"{down}/momentum_buffer"}
    assert {name for name in ours if name.startswith(table)} == {
        table,
        *(f"{table}/{moment}" for moment in ("exp_avg", "exp_avg_sq", "step")),
    }
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= 1e-9 * float(tensor.abs().max()), name
    assert float(theirs[f"{down}/momentum_buffer"].abs().max()) > 0


def test_masters_are_updated_in_32_bits(tmp_path: Path) -> None:
    words = f"--steps 3 --precision bfloat16 --zero 2 --save {tmp_path / 'run'}"
    assert train_on(2, MUON, words) == 0
    held = tensors(tmp_path / "run" / "step-00000003")
    name = "layers.0.attention.query.weight"
    assert held[name].dtype is torch.bfloat16
    master = held[f"{name}/master"]
    assert master.dtype is held[f"{name}/momentum_buffer"].dtype is torch.float32
    assert torch.equal(master.bfloat16(), held[name])
    assert not torch.equal(master, held[name].float())


def test_what_it_needs_of_a_parameter() -> None:
    with pytest.raises(ValueError, match=r"Muon is for matrices, and a parameter has the shape"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.zeros(3))], "muon": True}])
