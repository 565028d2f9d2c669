"""Megatron's flags beside our own: what is translated, what is noted, and what is refused, in one
sentence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.flags import HelpAsked, build_parser, parse_with_notes
from minidist.full.trainer.foreign.names import MEGATRON
from minidist.further import Config, parse

SCRIPT = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 8
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 64 --dp 4
    --train-iters 500 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --min-lr 3e-5 --weight-decay 0.01
    --adam-beta1 0.8 --adam-beta2 0.99 --adam-eps 1e-8 --clip-grad 0.5 --bf16 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --seed 7 --save ckpt --load ckpt --save-interval 50 --log-interval 10 --eval-interval 100 --eval-iters 10
    --data-path a.txt b.txt --vocab-file v.json --merge-file m.txt --split 949,50,1 --distributed-backend nccl
    --attention-dropout 0 --hidden-dropout 0.1 --untie-embeddings-and-output-weights
"""


def read(words: str) -> Config:
    return parse(["--megatron", *words.split()])


def refused(words: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(words)
    message = str(error.value)
    assert "\n" not in message and len(message) < 300
    return message


def test_a_script_is_translated() -> None:
    ours = """
        --tp 2 --pp 2 --sp --layers 8 --hidden 64 --intermediate 96 --heads 4 --key-value-heads 2 --sequence 256
        --microbatches 8 --batch 64 --dp 4 --steps 500 --lr 3e-4 --warmup 20 --weight-decay 0.01 --beta1 0.8
        --beta2 0.99 --clip 0.5 --precision bfloat16 --zero 1 --seed 7 --save ckpt --save-every 50
        --text a.txt b.txt --dropout 0.1 --recompute full --log-every 10 --eval-every 100 --eval-batches 10
    """
    assert read(SCRIPT) == parse(ours.split())


def test_every_flag_without_effect_has_a_note_that_says_why() -> None:
    _, notes = parse_with_notes(["--megatron", *SCRIPT.split()], Config)
    assert not any("--log-interval" in note or "--eval-iters" in note for note in notes)
    given = {row.name for row in MEGATRON if row.note and row.name in SCRIPT.split()}
    assert {note.partition(":")[0] for note in notes} == given and len(given) == 11
    assert "--data-path: the files are read as plain text" in notes


def test_rows_name_options_that_exist_and_flags_that_are_not_ours() -> None:
    names = [row.name for row in MEGATRON]
    assert len(names) == len(set(names))
    options = {
        f"{section}.{name}" for section, values in Config().sections().items() for name in values
    }
    assert {row.to for row in MEGATRON} - {""} <= options
    assert not set(names) & {
        string for action in build_parser("x", Config)._actions for string in action.option_strings
    }


def test_help_shows_the_flags_only_if_they_are_asked_for() -> None:
    for words, shown in (["--help"], False), (["--megatron", "--help"], True):
        with pytest.raises(HelpAsked) as asked:
            parse(words)
        assert ("--num-layers" in str(asked.value)) is shown
        assert "--megatron" in str(asked.value) and "--deepspeed FILE" in str(asked.value)


def test_without_megatron_its_flags_are_unknown() -> None:
    with pytest.raises(ConfigError, match="there is no option --num-layers: did you mean --layers"):
        parse(["--num-layers", "2"])


def test_our_flags_win_and_files_lose(tmp_path: Path) -> None:
    toml, json = tmp_path / "x.toml", tmp_path / "x.json"
    toml.write_text(
        "[model]\nlayers = 3\nheads = 2\n[parallel]\npp = 2\n[memory]\nrecompute = 'sqrt'\n"
    )
    json.write_text('{"gradient_clipping": 0.25, "optimizer": {"params": {"lr": 0.25}}}')
    words = (
        "--num-layers 5 --layers 6 --pipeline-model-parallel-size 1 --clip-grad 0.5 --config "
        f"{toml} "
    )
    words += f"--deepspeed {json} --checkpoint-activations"
    config = read(words)
    assert (config.model.layers, config.model.heads, config.parallel.pp) == (6, 2, 1)
    assert (config.optimizer.clip, config.optimizer.lr, config.memory.recompute) == (
        0.5,
        0.25,
        "full",
    )


@pytest.mark.parametrize(
    ("words", "batch", "accumulate"),
    [
        ("--global-batch-size 24", 24, 1),
        ("--global-batch-size 24 --micro-batch-size 4 --dp 2", 24, 3),
        ("--micro-batch-size 4 --dp 2", 8, 1),
    ],
)
def test_the_batch_is_solved_for_what_is_missing(words: str, batch: int, accumulate: int) -> None:
    config = read(words)
    assert (config.data.batch, config.parallel.accumulate) == (batch, accumulate)


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("--checkpoint-activations", "full"),
        ("--recompute-activations", "selective"),
        ("--recompute-granularity selective", "selective"),
        ("--recompute-granularity full", "full"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
    ],
)
def test_recomputation(words: str, policy: str) -> None:
    assert read(words).memory.recompute == policy


@pytest.mark.parametrize(
    ("words", "stage"), [("--use-distributed-optimizer", 1), ("--zero-stage 2", 2)]
)
def test_sharding(words: str, stage: int) -> None:
    assert read(words).parallel.zero == stage


def test_switches_and_spelling() -> None:
    assert read("--tied --untie_embeddings_and_output_weights").model.tied
    assert not read("--untie-embeddings-and-output-weights").model.tied
    assert read("--num_layers=3 --fp16").model.layers == 3 and read("--fp16").precision == "float16"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--num-layer 2", "there is no option --num-layer: did you mean --num-layers?"),
        ("--hiden-size 2", "there is no option --hiden-size: did you mean --hidden-size?"),
        ("--num-layers x", "--num-layers: 'x' must be a whole number; see --help"),
        ("--num-layers", "--num-layers: expected one argument; see --help"),
        ("--num-layers 0", "--layers 0 is not a whole number of at least 1: give one."),
        ("--global-batch-size 64 --micro-batch-size 3 --dp 2",
         "--global-batch-size 64 is not --micro-batch-size 3 * N microbatches * --dp 2: change " "one of them"),
        ("--global-batch-size 64 --micro-batch-size 4",
         "--micro-batch-size 4 needs the number of ranks of the data axis: add --dp RANKS"),
        ("--micro-batch-size 0 --dp 2", "--micro-batch-size 0 cannot be: it must be at least 1"),
        ("--bf16 --fp16", "--fp16 and --bf16 make --precision both float16 and bfloat16: leave one out"),
        ("--zero-stage 2 --use-distributed-optimizer",
         "--zero-stage and --use-distributed-optimizer make --zero both 2 and 1: leave one out"),
        ("--recompute-granularity full --recompute-num-layers 2",
         "--recompute-num-layers 2 cannot be: it must be one of 1"),
        ("--recompute-granularity full --recompute-method block",
         "--recompute-method block cannot be: it must be one of uniform"),
        ("--recompute-granularity half", "--recompute-granularity half cannot be: it must be one of full, selective"),
        ("--num-layer 2", "there is no option --num-layer: did you mean --num-layers?"),
        ("--optimizer sgd", "--optimizer sgd cannot be: it must be one of adamw, muon"),
    ],
)  # fmt: skip
def test_words_that_cannot_be(words: str, complaint: str) -> None:
    assert refused(words) == complaint
