"""Offloading: the same bits, two chunks in memory, and a full disk that is found before anything is
lost.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import shutil
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks import clean_environment, warm_python
from torch import Tensor, nn

import minidist
from minidist.full import ZeRO1
from minidist.full.comm import Communicator
from minidist.full.memory.offload import OffloadedOptimizer, mapped
from minidist.full.precision.adamw import FusedAdamW
from minidist.full.precision.masters import MasterWeights

Place = Callable[[Path], Any]
PLACES = pytest.mark.parametrize(
    "place", (lambda path: "cpu", lambda path: path), ids=("cpu", "folder")
)
SHAPES = ((8, 6), (6,), (), (0,), (40, 3), (5, 5))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in SHAPES]


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:3], "weight_decay": 0.1}, {"params": of[3:]}]


def give_gradients(to: list[nn.Parameter], step: int) -> None:
    """One parameter stays without, another one at each step."""
    draws = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(to):
        gradient = torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
        parameter.grad = None if step % len(to) == number else gradient


def train(
    optimizer: torch.optim.Optimizer, of: list[nn.Parameter], first: int = 0, steps: int = 4
) -> None:
    for step in range(first, first + steps):
        give_gradients(of, step)
        optimizer.step()


def same_bits(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def adamw(of: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of, foreach=False, **options)


def momentum(of: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(of, momentum=0.9, nesterov=True, **options)


def adagrad(of: Any, **options: Any) -> torch.optim.Optimizer:
    """Makes its state when it is made."""
    return torch.optim.Adagrad(of, initial_accumulator_value=0.3, **options)


def plain(of: Any, **options: Any) -> torch.optim.Optimizer:
    """Has no state at all."""
    return torch.optim.SGD(of, **options)


@PLACES
@pytest.mark.parametrize(
    "make", (adamw, momentum, adagrad, plain, torch.optim.RMSprop, torch.optim.NAdam, FusedAdamW)
)
@pytest.mark.parametrize("chunk_bytes", (1, 300, 1 << 20))
def test_the_bits_are_those_of_the_optimizer_alone(
    place: Place, make: Any, chunk_bytes: int, tmp_path: Path
) -> None:
    ours, theirs = parameters(), parameters()
    offloaded = OffloadedOptimizer(
        groups(ours), make, place(tmp_path), chunk_bytes=chunk_bytes, lr=0.05
    )
    alone = make(groups(theirs), lr=0.05)
    for optimizer, of in ((offloaded, ours), (alone, theirs)):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        for step in range(7):
            train(optimizer, of, step, 1)
            schedule.step()
    assert same_bits(ours, theirs)
    states = offloaded.state_dict()["state"], alone.state_dict()["state"]
    assert states[0].keys() <= states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        assert same_bits([*state.values()], [*states[1][number].values()])


@PLACES
def test_low_precision_is_updated_in_float32(place: Place, tmp_path: Path) -> None:
    ours, masters = (
        parameters(torch.bfloat16),
        [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)],
    )
    offloaded, alone = (
        OffloadedOptimizer(ours, adamw, place(tmp_path), lr=1e-3),
        adamw(masters, lr=1e-3),
    )
    for step in range(6):
        train(offloaded, ours, step, 1)
        for master, parameter in zip(masters, ours, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        alone.step()
    assert same_bits(ours, [master.bfloat16() for master in masters])
    assert same_bits([offloaded.state[p]["master"] for p in ours], masters)
    again = OffloadedOptimizer(ours, adamw, place(tmp_path), lr=1e-3)
    again.load_state_dict(offloaded.state_dict())
    assert same_bits([again.state[p]["master"] for p in ours], masters)
    train(again, ours, 6, 1)
    train(alone, masters, 6, 0)
    with torch.no_grad():
        for parameter in ours:
            parameter.fill_(2.0)  # as loading a checkpoint would
    train(again, ours, 7, 1)
    assert all(((parameter - 2).abs() < 0.1).all() for parameter in ours), (
        "the old masters are forgotten"
    )
    again.load_state_dict(offloaded.state_dict())  # but not the parameters that belong to it
    train(again, ours, 8, 1)
    assert all(((parameter - 2).abs() < 0.1).all() for parameter in ours), (
        "nor do loaded masters overrule parameters"
    )


@PLACES
@pytest.mark.parametrize("hand_back", (False, True))
def test_the_state_can_be_handed_over(place: Place, hand_back: bool, tmp_path: Path) -> None:
    ours, theirs = parameters(), parameters()
    alone = adamw(theirs, lr=0.05)
    train(alone, theirs, steps=5)
    first: Any = (
        adamw(ours, lr=0.05)
        if not hand_back
        else OffloadedOptimizer(ours, adamw, place(tmp_path), lr=0.05)
    )
    train(first, ours, steps=2)
    second: Any = (
        OffloadedOptimizer(ours, adamw, place(tmp_path), lr=7.0)
        if not hand_back
        else adamw(ours, lr=7.0)
    )
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, ours, 2, 3)
    assert same_bits(ours, theirs)


@PLACES
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("ranks", (1, 2))
def test_state_of_shards_goes_elsewhere_and_is_whole_in_a_checkpoint(
    place: Place, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    """Cut by ZeRO's hooks when it is loaded, gathered when it is saved: the bits of masters that
    stay.
    """

    def program(
        comm: Communicator, given: Any, to: Any
    ) -> tuple[dict[int, dict[str, Tensor]], int]:
        layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
        draws = torch.Generator().manual_seed(0)
        for weight in layers.parameters():
            nn.init.normal_(weight, generator=draws)
        model = ZeRO1(layers, comm, op="sum")
        kind = {"kind": MasterWeights} if to is None else {"kind": OffloadedOptimizer, "to": to}
        optimizer: Any = model.optimizer(**kind, lr=0.05)
        if given:
            optimizer.load_state_dict(
                {"state": given, "param_groups": optimizer.state_dict()["param_groups"]}
            )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
            optimizer.step(factor=0.5)
        held = sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()
        )
        return copy.deepcopy(optimizer.state_dict()["state"]), held

    before = minidist.run(lambda comm: program(comm, None, None), 3)[0][0]
    stayed = minidist.run(lambda comm: program(comm, before, None), ranks)
    went = minidist.run(lambda comm: program(comm, before, place(tmp_path)), ranks)
    for ours, theirs in zip(went, stayed, strict=True):
        assert ours[0].keys() == theirs[0].keys() == {0, 1, 2, 3}
        for number, state in ours[0].items():
            assert state.keys() == theirs[0][number].keys()
            assert same_bits([*state.values()], [*theirs[0][number].values()])
    total = 66 * (8 if dtype == torch.float32 else 12)
    assert (
        sum(held for _, held in went) == total
        and max(held for _, held in went) <= total / ranks + 12 * 4
    )


# ---------------------------------------------------------------- memory


class Weighing(torch.optim.AdamW):
    """Weighs, when it is called, the state that lies in memory: tensors of one shape that are not
    of a file.
    """

    heaviest: ClassVar[list[int]] = []
    elsewhere: ClassVar[set[int]] = set()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        held = {
            tensor.untyped_storage().data_ptr(): tensor.nbytes
            for tensor in gc.get_objects()
            if type(tensor) in (Tensor, nn.Parameter) and tensor.shape == (1000, 10)
        }
        self.heaviest.append(
            sum(size for address, size in held.items() if address not in self.elsewhere)
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_memory_holds_the_state_of_two_parameters(dtype: torch.dtype, tmp_path: Path) -> None:
    gc.collect()
    many = [nn.Parameter(torch.ones(1000, 10, dtype=dtype)) for _ in range(6)]
    optimizer = OffloadedOptimizer(many, Weighing, tmp_path, chunk_bytes=1)
    for parameter in many:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Weighing.heaviest.clear()
    tensors = [t for p in many for t in (p, p.grad, *optimizer.files[p].values()) if t is not None]
    Weighing.elsewhere = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    optimizer.step()
    moments = 2 * 40_000
    one = moments if dtype == torch.float32 else moments + 2 * 40_000  # a master and its gradient
    assert len(Weighing.heaviest) == 6
    assert one <= max(Weighing.heaviest) <= 2 * one, "all would be 6"


class Meeting(OffloadedOptimizer):
    """Whose worker fetches a chunk, and keeps one, only once another is being updated; and an
    update ends only once the next chunk is being fetched.
    """

    met: list[bool]
    ahead: list[bool]

    def _update(self, chunks: list[Any]) -> None:
        self.met, self.ahead, self.fetched, self.kept = [], [], 0, 0
        self.begun = [threading.Event() for _ in chunks]
        self.asked = [threading.Event() for _ in chunks]
        self.advanced = iter(self.begun)
        super()._update(chunks)

    def _fetch(self, *chunk: Any) -> Any:
        self.asked[self.fetched].set()
        if self.fetched > 0:
            self.met.append(self.begun[self.fetched - 1].wait(20))
        self.fetched += 1
        return super()._fetch(*chunk)

    def _advance(self, visit: Any) -> None:
        next(self.advanced).set()
        if len(self.ahead) + 1 < len(self.asked):
            self.ahead.append(self.asked[len(self.ahead) + 1].wait(20))
        super()._advance(visit)

    def _keep(self, visit: Any) -> None:
        self.kept += 1
        if self.kept < len(self.begun):
            self.met.append(self.begun[self.kept].wait(20))
        super()._keep(visit)


def test_chunks_come_and_go_while_another_is_updated() -> None:
    many = [nn.Parameter(torch.ones(8)) for _ in range(4)]
    optimizer = Meeting(many, adamw, chunk_bytes=1, lr=0.1)
    for parameter in many:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.met == [True] * 6, "a worker that is waited for would never meet an update"
    assert optimizer.ahead == [True] * 3, "a chunk that is asked for late is not fetched meanwhile"


# ---------------------------------------------------------------- files


def test_a_mapped_tensor_is_a_file_without_a_name(tmp_path: Path) -> None:
    tensor = mapped((100, 30), torch.bfloat16, tmp_path, "shard")
    assert tensor.shape == (100, 30) and tensor.dtype == torch.bfloat16 and not tensor.any()
    tensor += 1
    maps = Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/shard." in maps, "its memory is the file's"
    assert not list(tmp_path.iterdir())
    part = tensor[3:]
    del tensor
    assert (part == 1).all()
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert mapped((0, 3), torch.float32, tmp_path).shape == (0, 3)
    assert mapped((), torch.float32, tmp_path).shape == ()
    with pytest.raises(OSError, match="nowhere"):
        mapped((3,), torch.float32, tmp_path / "nowhere")


def test_a_system_that_claims_no_space_is_asked_how_much_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS, which has no `posix_fallocate`."""
    monkeypatch.delattr(os, "posix_fallocate")
    tensor = mapped((100, 30), torch.float32, tmp_path)
    assert tensor.shape == (100, 30) and not tensor.any() and not list(tmp_path.iterdir())
    full = shutil.disk_usage(tmp_path)._replace(free=11_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match=r"tensor needs 12,000 bytes in .*, where 11,999 are free"):
        mapped((100, 30), torch.float32, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_is_dropped_gives_its_files_back(tmp_path: Path) -> None:
    ours = parameters()
    optimizer = OffloadedOptimizer(ours, adamw, tmp_path)
    train(optimizer, ours)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del optimizer
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("end", ("", "1 / 0", "os.kill(os.getpid(), 9)"))
def test_no_file_outlives_its_process(end: str, tmp_path: Path) -> None:
    program = """
    import os, sys, torch
    from pathlib import Path
    from minidist.full.memory.offload import OffloadedOptimizer
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = OffloadedOptimizer([weight], torch.optim.AdamW, Path(sys.argv[1]))
    weight.grad = torch.ones(1000)
    optimizer.step()
    print("stepped", flush=True)
    """
    file, files = tmp_path / "program.py", tmp_path / "files"
    file.write_text(textwrap.dedent(program) + end)
    files.mkdir()
    command = [*warm_python(), str(file), str(files)]
    outcome = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert outcome.stdout == "stepped\n" and (outcome.returncode != 0) == bool(end), outcome.stderr
    assert not list(files.iterdir())


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 1 MiB; where none may be mounted, an allocation that stops at as much."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        left = [1 << 20]

        def allocate(descriptor: int, start: int, size: int) -> None:
            left[0] -= size
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.truncate(descriptor, size)

        monkeypatch.setattr(os, "posix_fallocate", allocate)
        yield tmp_path
        return
    try:
        yield tmp_path
    finally:
        gc.collect()
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_found_before_training(small_disk: Path) -> None:
    weights = [nn.Parameter(torch.ones(1 << 16)) for _ in range(3)]  # 3 · 512 KiB of moments
    with pytest.raises(
        OSError, match=r"the optimizer's state needs 1,572,864 bytes in .*, where [0-9,]+ are free"
    ) as error:
        OffloadedOptimizer(weights, adamw, small_disk)
    assert error.value.errno == errno.ENOSPC and str(small_disk) in str(error.value)
    assert not list(small_disk.iterdir())
    if small_disk.is_mount():
        assert shutil.disk_usage(small_disk).used == 0, "the files that found room are given back"


def test_a_disk_that_is_full_later_loses_nothing(small_disk: Path) -> None:
    weights = [nn.Parameter(torch.ones(1 << 16)) for _ in range(2)]
    weights[1].requires_grad_(False)
    optimizer = OffloadedOptimizer(weights, adamw, small_disk)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), [weight.detach().clone() for weight in weights]
    waste = mapped((1 << 18,), torch.uint8, small_disk)
    weights[1].grad = torch.ones_like(weights[1])
    with pytest.raises(OSError, match="needs 524,288 bytes"):
        optimizer.step()
    assert same_bits(weights, before[1])
    after = optimizer.state_dict()["state"]
    assert after.keys() == before[0]["state"].keys() == {0}
    assert same_bits([*after[0].values()], [*before[0]["state"][0].values()])
    if not small_disk.is_mount():
        return
    del waste
    optimizer.step()
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [2, 1]
    assert optimizer.files[weights[1]].keys() == {"exp_avg", "exp_avg_sq"}


def test_an_optimizer_that_raises_leaves_the_rest_usable(tmp_path: Path) -> None:
    class Moody(torch.optim.AdamW):
        calls: ClassVar[list[int]] = []

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls.append(1)
            if len(self.calls) == len(SHAPES) + 2:  # all trials went well, and the first chunk
                raise ZeroDivisionError
            super().step(closure)

    ours = parameters()
    optimizer = OffloadedOptimizer(ours, Moody, tmp_path, chunk_bytes=1)
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert list(optimizer.state) == [ours[0]]
    optimizer.step()
    assert [float(optimizer.state[parameter]["step"]) for parameter in ours] == [
        2.0,
        *[1.0] * (len(ours) - 1),
    ]
