"""Sites that train apart: what they become when they meet, and what that costs."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import RUN, TINY, same_bits, short_text, tensors, train_on

import minidist
from minidist.cli.train import train
from minidist.full.checkpoint.store import complete
from minidist.full.comm import Communicator
from minidist.full.data.text import read_corpus
from minidist.full.ddp.sampler import share
from minidist.full.memory.account import Account
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig
from minidist.full.precision.masters import MasterWeights
from minidist.full.recipe import RecipeError
from minidist.full.slow_wires.outer import Meetings, Outer
from minidist.full.strategy import Parallel
from minidist.full.trainer.checked import check_run, layout_of
from minidist.full.trainer.foreign import save_llama
from minidist.full.trainer.loop import Measured, Trainer
from minidist.full.trainer.start import start_of
from minidist.further import Recipe, parallelize, parse
from minidist.further.sparse_step.sparse_step import CHUNK, DECAY, SparseStep
from minidist.slow_wires import DiLoCo

SITES, ROWS, LR = 3, 7, 0.1


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 2)
    return nn.Sequential(*layers).double()


MODEL = network()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return (
        torch.randn(ROWS, 6, generator=draws, dtype=torch.float64),
        torch.randn(ROWS, 2, generator=draws, dtype=torch.float64),
    )


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / ROWS


def gradients_at(model: nn.Module, step: int, rows: slice = slice(None)) -> list[Tensor]:
    inputs, targets = batch_of(step)
    loss = squared(model(inputs[rows]), targets[rows])
    return list(torch.autograd.grad(loss, list(model.parameters())))


def trained(
    comm: Communicator, recipe: Recipe, steps: int, kind: Callable[..., torch.optim.Optimizer]
) -> Parallel:
    """Train on sites that have different numbers of rows; count what they sent to each other."""
    mesh = Mesh(comm, Layout(dcn=comm.size))
    model = copy.deepcopy(MODEL)
    if comm.rank:
        with torch.no_grad():
            model[0].weight.add_(comm.rank)  # all get what rank 0 has
    parallel = parallelize(model, mesh, recipe, lambda out, y: squared(out, y) * comm.size)
    optimizer = parallel.optimizer(kind, model.parameters(), lr=LR)
    for step in range(steps):
        rows = share(ROWS, comm.size, comm.rank)
        inputs, targets = batch_of(step)
        parallel.zero_grad()
        parallel.step([inputs[rows]], [targets[rows]])
        optimizer.step()
    return parallel


def largest(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


# ---------------------------------------------------------------- what it equals


def test_plain_steps_that_meet_each_time_are_data_parallelism() -> None:
    """Each site divides by its fair share of the rows, not by its own: 3, 2 and 2 of 7."""
    serial = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(serial.parameters(), lr=LR)
    for step in range(6):
        for parameter, gradient in zip(
            serial.parameters(), gradients_at(serial, step), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    recipe = Recipe(local_steps=1, outer_lr=1.0, outer_momentum=0.0)
    for parallel in minidist.run(lambda comm: trained(comm, recipe, 6, torch.optim.SGD), SITES):
        assert largest(parallel.model, serial) < 1e-12


def test_meeting_each_time_with_momentum_is_nesterov_of_the_mean_gradient() -> None:
    """The sign of what sites send is that of a gradient: the other one would climb."""
    serial = copy.deepcopy(MODEL)
    outer = torch.optim.SGD(serial.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(6):
        for parameter, gradient in zip(
            serial.parameters(), gradients_at(serial, step), strict=True
        ):
            parameter.grad = LR * gradient
        outer.step()
    recipe = Recipe(local_steps=1)
    for parallel in minidist.run(lambda comm: trained(comm, recipe, 6, torch.optim.SGD), SITES):
        assert largest(parallel.model, serial) < 1e-12


def test_one_site_looks_ahead() -> None:
    """Zhang et al. 2019: k fast steps, and then the slow weights go a part of the way."""
    fast, slow = copy.deepcopy(MODEL), [each.detach().clone() for each in MODEL.parameters()]
    optimizer = torch.optim.AdamW(fast.parameters(), lr=LR)
    for step in range(8):
        for parameter, gradient in zip(fast.parameters(), gradients_at(fast, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step % 4 == 3:
            with torch.no_grad():
                for parameter, behind in zip(fast.parameters(), slow, strict=True):
                    behind.lerp_(parameter, 0.5)
                    parameter.copy_(behind)
    recipe = Recipe(local_steps=4, outer_lr=0.5, outer_momentum=0.0)
    (parallel,) = minidist.run(lambda comm: trained(comm, recipe, 8, torch.optim.AdamW), 1)
    assert largest(parallel.model, fast) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_plain_page_is_the_same(momentum: float) -> None:
    def plainly(comm: Communicator) -> nn.Module:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        outer = DiLoCo(model.parameters(), comm, 3, 0.7, momentum)
        for step in range(7):
            found = gradients_at(model, step, share(ROWS, comm.size, comm.rank))
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient * comm.size
            optimizer.step()
            outer.stepped()
        return model

    recipe = Recipe(local_steps=3, outer_momentum=momentum)
    plain = minidist.run(plainly, SITES)
    ours = minidist.run(lambda comm: trained(comm, recipe, 7, torch.optim.AdamW), SITES)
    for parallel, model in zip(ours, plain, strict=True):
        assert largest(parallel.model, model) < 1e-12
    assert largest(plain[0], plain[1]) > 1e-6  # one step after they met they differ


# ---------------------------------------------------------------- fragments that travel meanwhile


def test_fragments_travel_while_sites_train() -> None:
    """Streaming DiLoCo, told once more for two sites in one process, parameter by parameter."""
    every, delay, mixing, rate, momentum = 4, 2, 0.5, 0.6, 0.8
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 3, 3, 1)]
    steps = torch.randn(2, 14, 10, generator=generator, dtype=torch.float64)
    fragments = [0, 0, 1, 1]  # sizes that do not fill a half

    def program(comm: Communicator) -> list[Tensor]:
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        numbers = dict(zip(parameters, fragments, strict=True))
        outer = Outer(optimizer, numbers, comm, Meetings(every, rate, momentum, 2, delay, mixing))
        for step in range(14):
            for parameter, part in zip(
                parameters, steps[comm.rank, step].split([3, 3, 3, 1]), strict=True
            ):
                parameter.grad = part.clone()
            optimizer.step()
            outer.stepped()
        return parameters

    for place, size in enumerate((3, 3, 3, 1)):
        first = sum((3, 3, 3, 1)[:place])
        sites = [start[place].clone(), start[place].clone()]
        shared, velocity = start[place].clone(), torch.zeros(size, dtype=torch.float64)
        change = torch.zeros(size, dtype=torch.float64)
        due = (2, 4)[fragments[place]]
        for step in range(1, 15):
            for site in (0, 1):
                sites[site] = sites[site] - steps[site, step - 1, first : first + size]
            if step >= due and (step - due) % every == 0:
                change = shared - (sites[0] + sites[1]) / 2
            if step >= due and (step - due) % every == delay:
                velocity = momentum * velocity + change
                shared = shared - rate * (change + momentum * velocity)
                sites = [mixing * site + (1 - mixing) * shared for site in sites]
        for site, parameters in enumerate(minidist.run(program, 2)):
            assert torch.allclose(parameters[place], sites[site], rtol=1e-12, atol=1e-14)


def test_a_wire_that_is_slow_hides_behind_the_steps() -> None:
    """On the virtual clock: with a delay, meeting costs nothing while the steps take longer."""
    size, seconds = 1_000_000, 0.05  # 4 MB at 0.1 GB/s and 2 sites: 0.04 s
    cluster = minidist.Cluster.uniform(latency=0, bandwidth=1e8)

    def program(comm: Communicator, delay: int) -> float:
        parameter = nn.Parameter(torch.zeros(size))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        outer = Outer(optimizer, {parameter: 0}, comm, Meetings(4, delay=delay))
        for _ in range(9):
            comm.advance(seconds)
            optimizer.step()
            outer.stepped()
        return comm.clock()

    def last(delay: int) -> float:
        clocks = minidist.run(lambda comm: program(comm, delay), 2, cluster=cluster)
        return float(max(clocks))

    assert last(1) == pytest.approx(9 * seconds, rel=1e-9)
    assert last(0) == pytest.approx(9 * seconds + 2 * 4e6 / 1e8, rel=1e-9)


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("fragments", [1, 3])
def test_bytes_are_those_of_data_parallelism_divided_by_h(fragments: int) -> None:
    every, steps = 4, 12
    bytes = sum(parameter.nbytes for parameter in MODEL.parameters())

    def program(comm: Communicator) -> tuple[int, float, int]:
        recipe = Recipe(local_steps=every, fragments=fragments)
        parallel = trained(comm, recipe, steps, torch.optim.SGD)
        (outer,) = parallel.companions
        account = Account()
        account.watch(optimizer=outer)
        held = account.sample()
        assert held["optimizer"] == 2 * bytes and held["communication"] == bytes
        return (
            parallel.mesh.dcn.traffic.bytes,
            outer.volume(0, steps),
            outer.volume(0, 5) + outer.volume(5, steps),
        )

    each_step = 2 * (2 - 1) / 2 * bytes
    for sent, formula, in_two_parts in minidist.run(program, 2):
        assert sent == formula == in_two_parts == each_step * steps / every


def test_a_sparse_step_sends_136_times_less() -> None:
    size, every = 3 * CHUNK, 2

    def program(comm: Communicator) -> tuple[int, float]:
        parameter = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(1)))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        meetings = Meetings(
            every, momentum=0.0, travels=partial(SparseStep, share=1 / 64), chooses=True
        )
        outer = Outer(optimizer, {parameter: 0}, comm, meetings)
        for _ in range(4):
            outer.stepped()
        return comm.traffic.bytes, outer.volume(0, 4)

    for sent, formula in minidist.run(program, 2):
        assert sent == formula == 2 * 3 * (96 + 16 + 8)
        assert 2 * 4 * size / formula == pytest.approx(136.5, rel=1e-3)


def test_a_sparse_step_loses_nothing_for_good() -> None:
    """What was sent and what is kept is all that ever came, if what is kept forgets as it says."""
    size, rounds = CHUNK + 5, 4  # the last chunk has 5 elements

    def changes(rank: int) -> Tensor:
        draws = torch.Generator().manual_seed(rank)
        return torch.randn(rounds, size, generator=draws, dtype=torch.float64)

    def program(comm: Communicator) -> tuple[list[Tensor], Tensor]:
        sparse = SparseStep(torch.zeros(size, dtype=torch.float64), 0.25)
        means = []
        for change in changes(comm.rank):
            sparse.reduce(change, comm)
            means.append(change)
        return means, sparse.error

    outcomes = minidist.run(program, 2)
    (means, _), (others, _) = outcomes
    assert all(torch.equal(one, other) for one, other in zip(means, others, strict=True))
    sent = torch.zeros(size, dtype=torch.float64)
    came = torch.zeros(size, dtype=torch.float64)
    for at, mean in enumerate(means):
        weight = DECAY ** (rounds - 1 - at)
        sent += weight * 2 * mean
        came += weight * (changes(0)[at] + changes(1)[at])
    kept = outcomes[0][1] + outcomes[1][1]
    assert torch.allclose(sent + kept, came, rtol=1e-12, atol=1e-12)
    chosen = (means[0] != 0).double().mean()
    assert 0.25 < chosen < 0.5  # two sites choose for themselves
    # of what is sent, 2 bits tell the sign and one of two sizes
    error = SparseStep(torch.zeros(size, dtype=torch.float64), 0.25)
    whole = changes(0)[0].clone()
    minidist.run(lambda comm: error.reduce(whole, comm), 1)
    assert len(whole.abs().unique()) <= 1 + 2 * 2


# ---------------------------------------------------------------- inside a site, and in 16 bits


def test_the_outer_step_is_taken_on_masters() -> None:
    """Changes of a thousandth of a weight are lost in bfloat16, and not in the masters."""

    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = MasterWeights([parameter], torch.optim.SGD, lr=1.0)
        outer = Outer(optimizer, {parameter: 0}, comm, Meetings(2, 1.0, 0.0))
        for step in range(6):
            parameter.grad = torch.full_like(parameter, 0.001 * (1 + comm.rank + step % 2))
            optimizer.step()
            outer.stepped()
        return parameter.detach(), optimizer.master_of(parameter)

    each_round = 0.001 * (1.5 + 2.5)
    for parameter, master in minidist.run(program, 2):
        assert torch.allclose(master, torch.full_like(master, 1 - 3 * each_round), atol=1e-4)
        assert torch.equal(parameter, master.to(torch.bfloat16))


SITE = (
    f"{RUN} --layers 4 --heads 4 --keep 9 --steps 6 --dcn 2 --local-steps 2 --lr-schedule constant"
)
STREAMING = "--fragments 2 --outer-delay 1 --mixing 0.5"
SPARSE = "--outer-momentum 0 --outer-lr 1 --outer-topk 0.1"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_text(tmp_path_factory.mktemp("text"), 700)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("sites") / "run"
    assert train_on(2, SITE, STREAMING, f"--text {text} --save {folder}") == 0
    return folder


@pytest.mark.parametrize(
    "inside",
    [
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in ("--zero 1", "--zero 2", "--cp 2")
        ),
        "--zero 3",
        "--tp 2 --sp",
        "--pp 2",
    ],
)
def test_a_site_is_spread_as_any_model(
    inside: str, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    """Parameters, moments, and what sites share: the same as with one rank a site."""
    assert train_on(4, SITE, STREAMING, inside, f"--text {text} --save {tmp_path}") == 0
    last = "step-00000006"
    ours, theirs = tensors(tmp_path / last), tensors(two_ranks / last)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("site-1/") for name in ours)
    assert any("beside/outer change" in name for name in ours)
    for name, whole in theirs.items():
        size = whole.double().abs().max().clamp(min=1e-9)
        assert float((ours[name].double() - whole).abs().max() / size) <= 1e-9, name


def test_stages_with_other_fragments_meet_at_the_same_steps(text: Path, tmp_path: Path) -> None:
    """All ranks ask together whether they meet next, also those that have nothing to send."""
    apart = "--pp 2 --no-tied --local-steps 3 --fragments 2 --outer-delay 0"
    assert train_on(4, SITE, apart, f"--text {text} --save {tmp_path}") == 0


def test_sites_report_their_share_of_the_serial_loss(text: Path) -> None:
    """Rows of unequal length: a site divides by half of all tokens, not by its own."""
    asked = f"--dp 1 --by-length --text {text} --batch 7 --steps 1 --precision float64"

    def first_losses(sites: int, words: str) -> list[float]:
        config = parse([*TINY, *asked.split(), *words.split()])
        tokenizer, samples, *_ = read_corpus(config.data)

        def program(comm: Communicator) -> float:
            mesh = Mesh(comm, layout_of(config, sites))
            run = check_run(config, mesh, tokenizer.vocabulary)
            return Trainer(run, start_of(run, samples)).run().history[0].loss

        return minidist.run(program, sites)

    (serial,) = first_losses(1, "")
    first, second = first_losses(2, "--dcn 2 --local-steps 1")
    assert (first + second) / 2 == pytest.approx(serial, rel=1e-12)
    assert abs(first - second) > 1e-3


@pytest.mark.parametrize(
    ("how", "stop"),
    [
        (STREAMING, 3),
        pytest.param(STREAMING, 4, marks=pytest.mark.soak),
        pytest.param(SPARSE, 3, marks=pytest.mark.soak),
        (SPARSE, 4),
    ],
)
def test_a_run_of_sites_goes_on_as_if_it_had_not_stopped(
    how: str, stop: int, text: Path, tmp_path: Path
) -> None:
    """While a fragment travels, too; with the error that each site keeps for itself."""
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    words = f"{SITE} {how} --text {text}"
    assert train_on(2, words, f"--save {calm}") == 0
    assert train_on(2, words, f"--save {stopped} --steps {stop}") == 0
    assert train_on(2, words, f"--save {stopped} --resume") == 0
    assert same_bits(calm / "step-00000006", stopped / "step-00000006")


def test_sites_stop_together_before_they_save_or_send_what_is_no_number(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One site alone has such gradients, in its third step. A checkpoint is due after the fourth."""
    plain = Trainer._measure

    def measure(self: Trainer, rate: float) -> Measured:
        measured = plain(self, rate)
        spoiled = self.mesh.dcn.rank == 1 and self.done == 2
        return measured._replace(norm=measured.norm * float("nan")) if spoiled else measured

    monkeypatch.setattr(Trainer, "_measure", measure)
    words = f"{RUN} --dcn 2 --local-steps 5 --steps 6 --save-every 2 --text {text}"
    assert train_on(4, words, f"--tp 2 --save {tmp_path}") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the norm of the gradients is nan" in said
    assert [path.name for path in complete(tmp_path)] == ["step-00000002"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(GPT(GPTConfig(layers=2, hidden=16, heads=2, sequence=16)), folder)
    return folder


def adapters_on(ranks: int, llama: Path, words: str) -> int:
    argv = f"--init {llama} --lora 4 --sequence 16 --precision float64 --dcn 2 {words}".split()
    return max(minidist.run(lambda comm: train(argv, comm), ranks))


def test_sites_of_one_rank_meet_with_their_adapters(
    llama: Path, text: Path, tmp_path: Path
) -> None:
    words = f"--local-steps 2 --steps 2 --text {text} --save {tmp_path}"
    assert adapters_on(2, llama, words) == 0
    saved = tensors(tmp_path / "step-00000002")
    parts = [name for name in saved if name.endswith((".A", ".B")) and "site" not in name]
    assert parts
    for name in parts:
        assert torch.equal(saved[name], saved[f"site-1/{name}"])


def test_a_stage_that_trains_nothing_goes_on_with_the_others(
    llama: Path, text: Path, tmp_path: Path
) -> None:
    """Its ranks count steps, too: otherwise some would wait for a meeting that others do not know
    of.
    """
    ends = "--pp 4 --light-ends --microbatches 2 --local-steps 3 --save-every 1 --keep 9"
    words = f"{ends} --steps 6 --text {text}"
    assert adapters_on(8, llama, f"{words} --save {tmp_path / 'calm'}") == 0
    shutil.copytree(tmp_path / "calm", tmp_path / "stopped")
    for step in (5, 6):
        shutil.rmtree(tmp_path / "stopped" / f"step-0000000{step}")
    assert adapters_on(8, llama, f"{words} --save {tmp_path / 'stopped'} --resume") == 0
    assert same_bits(tmp_path / "calm" / "step-00000006", tmp_path / "stopped" / "step-00000006")


@pytest.mark.parametrize("axis", ["--tp 2", "--pp 2", "--experts 2 --ep 2"])
def test_ranks_that_have_copies_send_the_same_elements_of_them(
    axis: str, text: Path, tmp_path: Path
) -> None:
    """Norms beside blocks that are cut, a tied embedding, what is no expert: the run itself ends
    with status 1 where they differ.
    """
    assert train_on(4, f"{SITE} {SPARSE} {axis} --lr 0.01 --text {text} --save {tmp_path}") == 0


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("layout", "recipe", "words"),
    [
        (Layout(dcn=2), Recipe(), "dcn=2 sites train apart and must know when to meet"),
        (Layout(dcn=2), Recipe(local_steps=2, fragments=3), "at most fragments=2"),
        (Layout(dcn=2), Recipe(local_steps=2, outer_delay=2), "at most outer_delay=1"),
        (Layout(dcn=2), Recipe(local_steps=2, outer_topk=0.1), "use outer_momentum=0"),
        (Layout(dcn=2), Recipe(local_steps=2, fp8=True), "leave one of them out"),
        (
            Layout(tp=2),
            Recipe(local_steps=2, outer_topk=0.1, outer_momentum=0.0, zero=1),
            "with tp=2 ranks that have copies .* use zero=0",
        ),
    ],
)
def test_what_does_not_fit_is_said(layout: Layout, recipe: Recipe, words: str) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(RecipeError, match=words):
            parallelize(copy.deepcopy(MODEL), Mesh(comm, layout), recipe, squared)

    minidist.run(program, 2)


def test_sites_are_as_many_as_the_checkpoint_has(
    two_ranks: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"{SITE} {STREAMING} --dcn 3 --text {text} --save {two_ranks} --resume"
    assert train_on(3, asked) == 2
    assert "which have trained apart, not of 3: use --dcn 2" in capsys.readouterr().err


def test_biases_of_routers_are_not_learned_apart(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the message says to do in their place works."""
    asked = f"{SITE} --experts 4 --ep 2 --no-tied --steps 2 --text {text} --save {tmp_path}"
    assert train_on(4, asked, "--balance bias") == 2
    said = capsys.readouterr().err
    assert "which the --dcn 2 sites would move apart: use --balance aux" in said
    assert train_on(4, asked, "--balance aux") == 0
