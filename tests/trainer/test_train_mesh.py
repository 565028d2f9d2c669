"""`train` with tensor, sequence and pipeline parallelism: the serial run's numbers, and a sentence
for each mistake.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ranks import mpirun, torchrun
from training import PROGRAM, TINY, count_calls, losses, short_text, train_on

import minidist
from minidist.cli.train import train
from minidist.full.data_axis import DataAxis
from minidist.full.pipeline import plan, stage
from minidist.full.tensor import plan as tensor_plan
from minidist.full.trainer import loop

MESH = "--layers 4 --heads 4 --lr 0.01"

# Three stages on two ranks: rank 0 has the first and the last, rank 1 the one between
OWN_PLAN = "# mine\n0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n\n1F0 1F1 1B0 1B1\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-four samples of 16 tokens: with a batch of 8, the fifth of an epoch has 2, fewer than
    microbatches.
    """
    return short_text(tmp_path_factory.mktemp("text"), 580)


# ---------------------------------------------------------------- parity


REPEATED = [  # in soak: each option stands in another mesh as well
    (4, "--pp 2 --zero 2 --schedule gpipe"),
    (4, "--pp 2 --zero 3 --microbatches 3"),
    (4, "--pp 4 --layers 8 --schedule zb-v --microbatches 8 --steps 3"),
    (2, "--pp 2 --schedule interleaved --tied"),
    (2, "--pp 2 --schedule zb-h1 --recompute selective --dropout 0.1"),
    (4, "--pp 2 --offload memory --zero 1"),
    (4, "--tp 2 --offload disk --zero 3 --offload-folder {folder}"),
    (4, "--tp 2 --sp --by-length --sequence 40 --batch 7 --accumulate 2 --text {uneven}"),
    (2, "--tp 2 --pp 1 --debug"),
    (4, "--cp 4 --cp-comm ulysses --zero 2 --recompute full --dropout 0.1"),
    (6, "--cp 3 --pp 2 --sequence 24 --cp-order contiguous --zero 3 --hsdp 3"),
]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(4, "--tp 2 --dropout 0.1", marks=pytest.mark.soak),
        (4, "--tp 2 --zero 3 --accumulate 2"),
        (4, "--pp 2 --tp 2 --sp --dropout 0.1 --tied"),
        pytest.param(4, "--pp 2 --zero 1 --schedule zb-h1", marks=pytest.mark.soak),
        pytest.param(4, "--pp 2 --zero 3 --hsdp 1", marks=pytest.mark.soak),
        pytest.param(
            4, "--pp 2 --strategy server --batch 9", marks=pytest.mark.soak
        ),  # 5 and 4 rows
        pytest.param(3, "--pp 3 --tied --dropout 0.1", marks=pytest.mark.soak),
        (4, "--pp 2 --schedule zb-v --tied --dropout 0.1 --zero 1"),
        (4, "--pp 2 --layers 7 --schedule interleaved --chunks 3 --microbatches 2 --zero 1"),
        pytest.param(
            4,
            "--pp 2 --layers 7 --schedule zb1p --chunks 3 --microbatches 3 --tied --dropout 0.1",
            marks=pytest.mark.soak,
        ),
        (
            4,
            "--pp 2 --layers 6 --schedule zb1p --chunks 3 --offload-stages 0.5 --tied --dropout 0.1",
        ),
        (8, "--pp 2 --tp 2 --sp --schedule dualpipe-v --zero 1 --tied --dropout 0.1 --steps 4"),
        (4, "--pp 2 --plan {plan} --dropout 0.1 --tied"),
        pytest.param(
            4, "--pp 2 --tp 2 --sp --recompute 'every 2' --dropout 0.1", marks=pytest.mark.soak
        ),
        (4, "--pp 2 --offload disk --zero 3 --offload-folder {folder}"),
        (4, "--pp 2 --tp 2 --sp --by-length --sequence 40 --batch 7 --dropout 0.1 --text {uneven}"),
        # channels 3, 2, 2
        (3, "--tp 3 --hidden 12 --heads 3 --key-value-heads 1 --intermediate 7"),
        pytest.param(4, "--tp 2 --pp 2 --debug", marks=pytest.mark.soak),
        pytest.param(4, "--cp 2 --zero 3 --dropout 0.1", marks=pytest.mark.soak),
        (
            4,
            "--cp 2 --tp 2 --sp --cp-order striped --cp-comm all_gather --by-length --sequence 40 "
            "--text {uneven}",
        ),
        (
            4,
            "--cp 2 --pp 2 --schedule zb-h1 --recompute selective --zero 1 --dropout 0.1 --tied "
            "--debug",
        ),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in REPEATED),
    ],
)
def test_every_mesh_trains_the_parameters_of_the_serial_run(
    ranks: int, words: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the end of an epoch, in float64, compared by `--verify`."""
    (tmp_path / "plan").write_text(OWN_PLAN)
    (tmp_path / "uneven").write_text(
        "\n\n".join(("paragraph " * 4)[:length] for length in range(4, 40))
    )
    words = words.format(plan=tmp_path / "plan", folder=tmp_path, uneven=tmp_path / "uneven")
    assert train_on(ranks, MESH, f"--steps 6 --text {text} --verify", words) == 0
    said = capsys.readouterr()
    difference = re.search(
        r"same parameters as the serial run +yes: largest relative difference (\S+)", said.out
    )
    assert difference and 0 < float(difference[1]) < 1e-9
    assert re.search(r"same bits on every rank +yes", said.out) and said.err == ""


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=pytest.mark.soak),
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.soak),
    ],
)
def test_lower_precisions_on_a_mesh(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # steps of 8 rows all: how far roundings lead astray depends on the text
    text = short_text(tmp_path, 900)
    words = f"--pp 2 --tp 2 --sp --zero 1 --steps 6 --precision {precision} --text {text} --verify"
    assert train_on(8, MESH, words) == 0
    said = capsys.readouterr()
    assert re.search(r"same parameters as the serial run +yes", said.out) and said.err == ""
    assert f"at most twice that of the serial {precision} run" in said.out
    assert ("the loss scale is" in said.out) == (precision == "float16")


def test_verify_finds_a_stage_that_forgets_its_gradients(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One microbatch's, on one of four ranks."""
    measure = loop.Trainer._measure

    def broken(self: loop.Trainer, rate: float) -> loop.Measured:
        if self.comm.rank == 2:
            for parameter in self.parallel.replica.trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.9)
        return measure(self, rate)

    monkeypatch.setattr(loop.Trainer, "_measure", broken)
    assert train_on(4, MESH, f"--pp 2 --tp 2 --steps 3 --text {text} --verify") == 1
    assert re.search(r"same parameters as the serial run +NO", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("start", "ranks", "words", "spread"),
    [
        (mpirun, 4, "--pp 2 --tp 2 --sp", "pp=2 (1f1b, 4 microbatches) tp=2 (with"),
        pytest.param(torchrun, 2, "--pp 2 --schedule zb-h1", "pp=2 (zb-h1", marks=pytest.mark.soak),
        pytest.param(
            torchrun, 4, "--dp 2 --pp 2 --zero 1", "dp=2 (ZeRO-1) pp=2", marks=pytest.mark.soak
        ),
    ],
)
def test_every_launcher_trains_a_mesh_alike(
    start: Callable[..., Any], ranks: int, words: str, spread: str, tmp_path: Path, text: Path
) -> None:
    """The command as a user types it; the losses are those of the run on threads."""
    options = [
        *TINY,
        *MESH.split(),
        "--steps",
        "3",
        "--dropout",
        "0.1",
        "--verify",
        "--text",
        str(text),
    ]
    ours, serial = tmp_path / "ours.jsonl", tmp_path / "serial"
    assert train_on(1, *options, f"--metrics {serial}") == 0
    done = start(
        ranks, PROGRAM, "train", *options, *words.split(), "--metrics", str(ours), timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert spread in done.stdout.splitlines()[0], done.stdout
    for (step, loss), (same, theirs) in zip(losses(ours), losses(serial), strict=True):
        assert step == same and loss == pytest.approx(theirs, rel=1e-12)
    assert start is torchrun or done.stderr == ""


def test_each_rank_checks_a_run_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe, the plan of its pipeline, and how its matrices are cut."""
    calls: Counter[str] = Counter()
    count_calls(calls, DataAxis, "faults", monkeypatch)
    count_calls(calls, stage, "plan_of", monkeypatch)
    # what `check_plan` begins with, whoever calls it
    count_calls(calls, tensor_plan, "_matched", monkeypatch)
    assert train_on(8, MESH, f"--dp 2 --tp 2 --pp 2 --steps 1 --text {text}") == 0
    assert calls == {"faults": 8, "plan_of": 8, "_matched": 8}


# ---------------------------------------------------------------- mistakes

PLANS = {
    "fitting": "0F0 0B0\n1F0 1B0\n",
    "cycle": "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n",
    "backward first": "0F0 0B0\n1B0 1F0\n",
    "no backward": "0F0 0B0 0F1\n1F0 1B0 1F1 1B1\n",
    "three ranks": "0F0 0B0\n1F0 1B0\n2F0 2B0\n",
    "nonsense": "hello world\n",
    "empty": "# nothing\n",
    "with sends": "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n",
    "reducing": "0F0 0B0 0R\n1F0 1B0 1R\n",
    "gap": "0F0 0B0\n2F0 2B0\n",
    "huge": "0F0 0F999999999 0B0\n1F0 1B0\n",
    "too many": plan("1f1b", 2, 9).text(),
}

# Ranks, options, and how the sentence begins or what it says
MISTAKES = [
    (
        4,
        "--pp 4 --layers 2",
        "4 stages need at least as many layers, but the model has 2: use fewer ranks in the",
    ),
    (
        4,
        "--pp 4 --schedule zb-v --microbatches 8",
        "8 stages need at least as many layers, but the model has 4",
    ),
    (
        2,
        "--pp 2 --schedule interleaved --chunks 3",
        "6 stages need at least as many layers, but the model has 4",
    ),
    (
        4,
        "--tp 4 --heads 2",
        "--tp 4: layers.0.attention.query: 2 heads cannot be dealt out to 4 ranks: choose a",
    ),
    (
        4,
        "--pp 2 --microbatches 5",
        "5 microbatches cut the 4 sequences .* dp=2.*: use --microbatches 4 or fewer, or",
    ),
    (
        4,
        "--pp 2 --batch 1",
        "4 microbatches cut the 0 sequences .* parts than there are: use --batch 8 or more",
    ),
    (2, "--pp 2 --microbatches 100000000", "100000000 microbatches cut the 8 sequences"),
    (
        4,
        "--pp 4 --layers 8 --schedule interleaved --microbatches 6",
        "interleaved takes microbatches in groups of 4, one for each",
    ),
    (
        4,
        "--pp 2 --schedule interleaved --offload-stages 1 --zero 1",
        "--offload-stages 1 does not go with ZeRO 1, which keeps weights of several stages in one",
    ),
    (
        2,
        "--pp 2 --offload-stages 1",
        "--offload-stages 1 is for ranks with several stages, of which all but one wait: use the",
    ),
    (2, "--offload-stages 1", "--offload-stages 1.0 is for runs with --pp RANKS: add that, or"),
    (
        2,
        "--pp 2 --layers 4 --schedule zb1p --microbatches 5",
        "zb1p takes microbatches in 2 equal groups of at least 2, one for each rank, but there are",
    ),
    (
        2,
        "--pp 2 --plan {cycle}",
        "--plan .*: deadlock, a cycle of 2 ranks: rank 0 waits at 0B0 for 1B0, rank 1",
    ),
    (
        2,
        "--pp 2 --plan {backward first}",
        "--plan .*: rank 1, word 1: 1B0 stands before 1F0, which it needs",
    ),
    (
        2,
        "--pp 2 --plan {no backward}",
        "--plan .*: stage 0, microbatch 1: the plan has 0F1, but this needs 0F1, and either 0B1",
    ),
    (
        2,
        "--pp 2 --plan {three ranks}",
        "--plan .*: the plan is for 3 ranks, but --pp 2: use --pp 3",
    ),
    (
        2,
        "--pp 2 --plan {nonsense}",
        "--plan .*: rank 0, word 1: 'hello' is no action: write stage, kind and micro",
    ),
    (
        2,
        "--pp 2 --plan {empty}",
        "--plan .*: the text holds no action: write one line for each rank",
    ),
    (
        2,
        "--pp 2 --plan {with sends}",
        "--plan .* names sends and receives, which are added to a plan before it runs",
    ),
    (
        2,
        "--pp 2 --plan {reducing}",
        "--plan .* names reductions, which are added to a plan before it runs",
    ),
    (2, "--pp 2 --plan {gap}", "--plan .*: no rank holds stage 1, but stage 2 is there"),
    (2, "--pp 2 --plan {huge}", "1000000000 microbatches cut the 8 sequences"),
    (
        2,
        "--pp 2 --plan {too many}",
        "9 microbatches cut the 8 sequences .* than there are: use --batch 9 or more",
    ),
    (2, "--pp 2 --plan {binary}", "--plan .* is not text: byte 0 is 0xff"),
    (2, "--pp 2 --plan {folder}/none", "--plan .*none cannot be read: No such file or directory"),
    (2, "--pp 2 --plan {folder}", "--plan .* cannot be read: Is a directory"),
    (
        2,
        "--pp 2 --plan {fitting} --schedule gpipe",
        "--plan .* takes the place of --schedule gpipe: leave one of them",
    ),
    (
        2,
        "--pp 2 --plan {fitting} --microbatches 2",
        "--plan .* has its own number of microbatches: leave --micro",
    ),
    (
        4,
        "--pp 2 --plan {fitting} --zero 3",
        "--plan .*: ZeRO 3 does not go with a plan of one's own: use ZeRO 0 or 1",
    ),
    (2, "--plan {fitting}", "--plan .* is for runs with --pp RANKS: add that, or leave --plan out"),
    (2, "--sp", "--sp is for runs with --tp RANKS: add that, or leave --sp out"),
    (
        2,
        "--microbatches 4",
        "--microbatches 4 is for runs with --pp RANKS: add that, or leave --microbatches out",
    ),
    (2, "--schedule zb-v", "--schedule zb-v is for runs with --pp RANKS: add that"),
    (
        2,
        "--pp 2 --schedule zbv",
        "--schedule zbv cannot be: it must be one of naive, gpipe, 1f1b, zb-h1, zb-v",
    ),
    (
        2,
        "--pp 2 --chunks 2",
        "--chunks 2 is for runs with --schedule interleaved or zb1p: add that, or leave",
    ),
    (
        2,
        "--pp 2 --accumulate 2",
        "--accumulate 2 is for runs without a pipeline: with --pp 2 say --microbatches 2",
    ),
    (
        4,
        "--pp 2 --zero 2 --schedule zb-h1",
        "ZeRO 2 does not go with zb-h1: use ZeRO 0 or 1, or the schedule gpipe",
    ),
    (4, "--tp 3 --heads 3 --hidden 12", "tp = 3, but 4 ranks were started: use mpirun -n 3"),
    (4, "--tp 2 --pp 4", "pp[*]tp = 8, but 4 ranks were started: use mpirun -n 8, or --pp 2"),
    (5, "--tp 2 --pp 2", "pp[*]tp = 4, but 5 ranks were started: use mpirun -n 4"),
    (2, "--tp 0", "--tp 0 cannot be: it must be at least 1"),
    (2, "--tp 1000000000000", "tp = 1000000000000, but 2 ranks were started"),
    (
        2,
        "--cp 2 --sequence 10",
        "--cp: the 10 tokens of a sequence are not shared out evenly: use .* 4 divides, such as 8",
    ),
    (
        2,
        "--cp 2 --cp-comm ulysses --heads 1 --key-value-heads 1",
        "--cp 2: Ulysses shares 1 heads, and 1 of keys and",
    ),
    (
        2,
        "--tp 2 --sp --sequence 15",
        "--sp: the 15 tokens of a sequence are not shared out evenly: use a --sequence that 2 "
        "divides, such as 14",
    ),
    (4, "--tp 2 --hsdp 2", "--hsdp 2 is for runs with --zero 3: add that, or leave --hsdp out"),
    (
        4,
        "--tp 2 --zero 3 --hsdp 4",
        "--hsdp 4 must divide the 2 ranks of the data axis into groups of one size",
    ),
    (
        4,
        "--tp 4 --tokenizer {tokenizer} --text {grr}",
        "--tp 4: embedding has 3 rows or columns to cut, too few for 4 ranks: use at",
    ),
]

TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "BPE", "vocab": {"G": 0, "r": 1, "e": 2}, "merges": []}}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files that `MISTAKES` name."""
    folder = tmp_path_factory.mktemp("plans")
    for name, written in [*PLANS.items(), ("tokenizer", TOKENIZER), ("grr", "Grre" * 200)]:
        (folder / name.replace(" ", "-")).write_text(written)
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x01")
    names = [*PLANS, "tokenizer", "grr", "binary"]
    return {"folder": folder} | {name: folder / name.replace(" ", "-") for name in names}


@pytest.mark.parametrize(
    ("ranks", "words", "complaint"), MISTAKES, ids=[words for _, words, _ in MISTAKES]
)
def test_a_mistake_is_one_sentence_on_rank_0_and_status_2_on_all(
    ranks: int,
    words: str,
    complaint: str,
    files: dict[str, Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any work: nothing was printed, and no folder made. A fault in a plan is followed by a
    picture of it.
    """
    save = tmp_path / "run"
    asked = f"{MESH} --text {text} --save {save} {words}".format(**files)
    argv = [*TINY, *shlex.split(asked)]
    assert minidist.run(lambda comm: train(argv, comm), ranks) == [2] * ranks
    out, err = capsys.readouterr()
    sentence, _, picture = err.partition("\n")
    assert out == "" and not save.exists()
    assert re.match(f"minidist train: {complaint}", sentence), err
    assert picture == "" or picture.splitlines()[2].startswith("rank 0 "), err


def test_mistakes_under_launchers(files: dict[str, Path]) -> None:
    """Rank 0 alone says it, and the job's status is 2."""
    program = ["train", *TINY, *MESH.split(), "--pp", "2"]
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(mpirun, 2, PROGRAM, *program, "--plan", str(files["three ranks"]))
        theirs = pool.submit(torchrun, 2, PROGRAM, *program, "--zero", "2", "--schedule", "zb-h1")
        by_mpi, by_torch = ours.result(), theirs.result()
    assert (
        by_mpi.returncode == 2
        and by_mpi.stdout == ""
        and by_torch.returncode != 0
        and by_torch.stdout == ""
    )
    assert (
        by_mpi.stderr
        == f"minidist train: --plan {files['three ranks']}: the plan is for 3 ranks, but --pp 2: "
        "use --pp 3\n"
    )
    assert by_torch.stderr.count("minidist train: ZeRO 2 does not go with zb-h1") == 1
