"""The command line: frozen, forgiving about spelling, and clear about what cannot be."""

from __future__ import annotations

import re
import shlex
import string
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import train_on

from minidist.cli.train import main
from minidist.full.data.options import DataOptions
from minidist.full.ddp.options import STRATEGIES
from minidist.full.mesh import Layout
from minidist.full.model import GPTConfig
from minidist.full.trainer.checked import layout_of, recipe_of
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.flags import HelpAsked, build_parser, read_toml, to_toml
from minidist.further import Config, Recipe, RunOptions, parse
from minidist.further.muon.options import MuonOptions

FROZEN = """
    --help --config --print-config
    --layers --hidden --heads --key-value-heads --intermediate --attention-window --dropout --tied
    --experts --top-k --shared-experts --capacity --scores --raw-weights --balance --balance-rate --z-loss
    --text --text-field --tokenizer --sequence --batch --by-length --pack --held-out --eval-text
    --optimizer --lr --base-batch --warmup --weight-decay --beta1 --beta2 --clip --lr-schedule --cooldown
    --dp --tp --cp --ep --pp --dcn --order --sp --cp-comm --cp-order --ep-comm --ep-fp8
    --schedule --chunks --microbatches --offload-stages --light-ends
    --strategy --bucket-mib --compress --zero --hsdp
    --local-steps --outer-lr --outer-momentum --fragments --outer-delay --mixing
    --compile --plan --accumulate --outer-topk --zeropp
    --recompute --offload --offload-folder
    --lora --steps --seed --init --precision --log-every --eval-every --eval-batches --verify
    --save --save-every --keep --keep-every --mtbf --resume --metrics --trace
    --profile --tensorboard --sample --peak-tflops --debug --qlora
"""


def refused(*argv: str) -> str:
    """Return the message with which a command line is refused."""
    with pytest.raises(ConfigError) as error:
        parse(argv)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


def printed(*argv: str) -> str:
    with pytest.raises(HelpAsked) as asked:
        parse([*argv, "--print-config"])
    return str(asked.value)


# ---------------------------------------------------------------- what there is


def test_the_options_are_frozen() -> None:
    """Each flag is one more thing to explain. Whoever adds one changes this list, and says why."""
    flags = [action.option_strings[0] for action in build_parser("x", Config)._actions]
    assert flags == FROZEN.split()


def test_every_option_has_a_sentence_and_every_name_is_used_once() -> None:
    names = [option.name for cls in Config.kinds().values() for option in fields(cls)]
    assert len(names) == len(set(names))
    assert all(option.metadata["help"] for cls in Config.kinds().values() for option in fields(cls))
    with pytest.raises(HelpAsked) as asked:
        parse(["--help"])
    assert all(flag in str(asked.value) for flag in FROZEN.split())
    assert "peak learning rate (default: 0.001)" in str(asked.value)


def test_help_is_printed_once_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(3, "--help") == 0
    out, err = capsys.readouterr()
    assert out.count("usage: python -m minidist train") == 1 and err == ""


# ---------------------------------------------------------------- spelling


@pytest.mark.parametrize(
    "words",
    [
        "--key-value-heads 2",
        "--key_value_heads 2",
        "--key-value_heads=2",
        "--key_value_heads=2",
        "--heads 2 --heads 4 --key-value-heads 2",
    ],
)
def test_dashes_and_underscores(words: str) -> None:
    assert parse(words.split()).model.key_value_heads == 2


def test_values_keep_their_underscores() -> None:
    config = parse(["--save=runs/my_run", "--text", "a_b", "c_d", "--metrics", "m_n"])
    assert (config.run.save, config.data.text, config.run.metrics) == (
        "runs/my_run",
        ("a_b", "c_d"),
        "m_n",
    )


def test_switches_have_a_no(tmp_path: Path) -> None:
    assert parse(["--tied"]).model.tied and not parse(["--tied", "--no-tied"]).model.tied
    (tmp_path / "x.toml").write_text("[model]\ntied = true\n[run]\nverify = true\n")
    config = parse(["--config", str(tmp_path / "x.toml"), "--no_tied"])
    assert not config.model.tied and config.run.verify


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--layer", "--layers"),
        ("--key-value-head=2", "--key-value-heads"),
        ("--batch_size", "--batch"),
        ("--warm-up", "--warmup"),
        ("--learning-rate", "--lr"),
        ("--no-tide", "--no-tied"),
        ("--lerning-rate", "--lr"),
        ("--precison", "--precision"),
        ("--xyzzy", ""),
        ("-n", ""),
    ],
)
def test_an_unknown_flag_names_the_nearest(wrong: str, right: str) -> None:
    message = refused(wrong, "2")
    assert message.startswith(f"there is no option {wrong.split('=')[0].replace('_', '-')}: ")
    assert f"did you mean {right}?" in message if right else "--help" in message


def test_words_that_belong_to_nothing() -> None:
    assert refused("runs/a") == "'runs/a' belongs to no option: see --help"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "--experts 4 --top-k 1",
            "--top-k 1 gives every output the weight 1, so .* use --raw-weights",
        ),
        ("--heads 4 --key-value-heads 3", "--heads 4 does not divide by --key-value-heads 3"),
        ("--balance aux", "--balance aux is for a model with experts"),
        ("--experts 2 --balance-rate 0.1", "--balance-rate 0.1 is for --balance aux or bias"),
    ],
)
def test_what_does_not_fit_is_told_in_flags(words: str, complaint: str) -> None:
    assert re.match(complaint, refused(*words.split()))


@pytest.mark.parametrize(
    ("told", "in_words_of_flags"),
    [
        (
            "fp8=True multiplies what qlora=True replaces",
            "--precision fp8 multiplies what --qlora replaces",
        ),
        ("hsdp=3 does not divide the 8 ranks", "--hsdp 3 does not divide the 8 ranks"),
        ("experts, which hsdp=2 does not know", "experts, which --hsdp 2 does not know"),
        ("sp=True, but tp=1: use tp=2", "--sp, but --tp 1: use --tp 2"),
        ("sequence=0 is not a whole number", "--sequence 0 is not a whole number"),
        ("raw_weights=False, recompute='every 2'.", "--no-raw-weights, --recompute every 2."),
        ("order=dp,pp,cp,tp must name them", "--order dp,pp,cp,tp must name them"),
        ("runs/lr=3/x has 4 heads, or zero layers", "runs/lr=3/x has 4 heads, or zero layers"),
        ("rope_theta=-1 is not a positive number", "rope_theta=-1 is not a positive number"),
        ("use --top-k=2, or a-batch=3", "use --top-k=2, or a-batch=3"),
    ],
)
def test_arguments_become_flags_and_other_words_stay(told: str, in_words_of_flags: str) -> None:
    assert Config.in_flags(told) == in_words_of_flags


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--layers 1.5", "--layers: '1.5' must be a whole number; see --help"),
        ("--lr fast", "--lr: 'fast' must be a number; see --help"),
        ("--lr", "--lr: expected one argument; see --help"),
        ("--text", "--text: expected at least one argument; see --help"),
        ("--lr nan", "--lr: 'nan' must be a number; see --help"),
        ("--lr inf", "--lr: 'inf' is too large; see --help"),
        ("--lr=-1e-3", "--lr -0.001 cannot be: it must be above 0"),
        ("--steps 0", "--steps 0 cannot be: it must be at least 1"),
        ("--batch -4", "--batch -4 cannot be: it must be at least 1"),
        ("--sequence 0", "--sequence 0 cannot be: it must be at least 1"),
        ("--keep 0", "--keep 0 cannot be: it must be at least 1"),
        ("--dp -1", "--dp -1 cannot be: it must be 0 or more"),
        ("--beta1 1", "--beta1 1.0 cannot be: it must be from 0 to below 1"),
        ("--held-out 1", "--held-out 1.0 cannot be: it must be from 0 to below 1"),
        ("--held-out nan", "--held-out: 'nan' must be a number; see --help"),
        ("--weight-decay -1", "--weight-decay -1.0 cannot be: it must be 0 or more"),
        ("--clip nan", "--clip: 'nan' must be a number; see --help"),
        ("--bucket-mib inf", "--bucket-mib: 'inf' is too large; see --help"),
        ("--bucket-mib 1 --strategy naive", "--bucket-mib 1.0 is for runs with --strategy ddp: add that, or "
         "leave --bucket-mib out"),
        ("--seed 9223372036854775808", "--seed: '9223372036854775808' is too large; see --help"),
        ("--strategy zero", "--strategy zero cannot be: it must be one of ddp, naive, server"),
        (
            "--precision int8",
            "--precision int8 cannot be: it must be one of float32, float64, bfloat16, float16, fp8, "
            "autocast-bfloat16, autocast-float16",
        ),
        ("--recompute half", '--recompute half cannot be: it must be one of none, full, selective, sqrt, "every K" '
         "(blocks)"),
        ("--recompute 'every 0'", '--recompute every 0 cannot be: it must be one of none, full, selective, sqrt, '
         '"every K" (blocks)'),
        ("--recompute 'every 3' --layers 2", '--recompute "every 3" makes segments of more blocks than --layers 2: use '
         'at most "every 2"'),
        ("--offload gpu", "--offload gpu cannot be: it must be one of none, memory, disk"),
        ("--offload disk", "--offload disk needs a folder: add --offload-folder FOLDER, or --save FOLDER"),
        ("--offload-folder a",
         "--offload-folder a is for runs with --offload disk: add that, or leave --offload-folder out"),
        ("--accumulate 9 --batch 8", "--accumulate 9 cuts --batch 8 into more parts than it has sequences: use at most "
         "--accumulate 8"),
        ("--experts 1000000", "--experts 1000000 cannot be: it must be from 0 to 10,000"),
        ("--sample 99999999999", "--sample 99999999999 cannot be: it must be from 0 to 1,000,000"),
        ("--resume", "--resume is for runs with --save FOLDER: add that, or leave --resume out"),
        ("--save-every 3", "--save-every 3 is for runs with --save FOLDER: add that, or leave --save-every out"),
        ("--eval-batches 3", "--eval-batches 3 is for runs with --eval-every STEPS: add that, or leave --eval-batches "
         "out"),
        ("--held-out 0.1 --eval-text a", "--held-out 0.1 and --eval-text both say what to measure on: leave one of "
         "them out"),
        ("--cooldown 3", "--cooldown 3 is for runs with --lr-schedule wsd: add that, or leave --cooldown out"),
        ("--keep 3", "--keep 3 is for runs with --save FOLDER: add that, or leave --keep out"),
        ("--keep-every 3", "--keep-every 3 is for runs with --save FOLDER: add that, or leave --keep-every out"),
        ("--verify=yes", "--verify/--no-verify: ignored explicit argument 'yes'; see --help"),
        ("--config", "--config: expected one argument; see --help"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(words: str, complaint: str) -> None:
    assert refused(*shlex.split(words)) == complaint


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--hidden 10 --heads 4", "use --hidden 12"),
        ("--heads 4 --key-value-heads 3", "use a divisor of 4"),
        ("--hidden 12 --heads 4", "use --hidden 16"),
        ("--dropout 1", "use 0 for none"),
        ("--layers 0", "at least 1"),
        ("--compress topk:0", "topk:SHARE:MOMENTUM"),
        ("--compress topk:0.1 --precision float16", "use --precision bfloat16, or --compress int8"),
        ("--compress int8 --verify", "leave out --verify"),
    ],
)
def test_what_does_not_fit_is_refused_before_there_is_a_model(words: str, fix: str) -> None:
    assert fix in refused(*words.split())


def test_limits_allow_what_lies_on_them() -> None:
    words = "--held-out 0 --beta1 0 --weight-decay 0 --clip 0 --warmup 0 --seed 9223372036854775807 --accumulate 16"
    config = parse(words.split())
    assert config.data.held_out == 0 and config.run.seed == 2**63 - 1


def test_precision_is_float32_unless_the_run_is_verified() -> None:
    precisions = [
        parse(words.split()).precision for words in ("", "--verify", "--verify --precision float32")
    ]
    assert precisions == ["float32", "float64", "float32"]


def test_the_optimizers_state_goes_to_its_folder_or_that_of_the_checkpoints() -> None:
    for words, place in (
        ("", None),
        ("--offload memory", "cpu"),
        ("--offload disk --save a", Path("a")),
        ("--offload disk --save a --offload-folder cpu", Path("cpu")),
    ):
        assert parse(words.split()).offload_to == place


def test_the_model_gets_the_vocabulary_of_the_tokenizer() -> None:
    expected = GPTConfig(
        vocabulary=300, layers=2, hidden=64, heads=2, sequence=32, dropout=0.5, tied=True
    )
    words = "--layers 2 --hidden 64 --heads 2 --sequence 32 --dropout 0.5 --tied"
    assert parse(words.split()).gpt(vocabulary=300) == expected


# ---------------------------------------------------------------- TOML


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        '[data]\nbatch = 3\ntext = ["a", "b"]\n[optimizer]\nlr = 1\nweight-decay = 0.5\n'
    )
    config = parse(["--batch", "5", "--config", str(file)])
    assert config.data == DataOptions(batch=5, text=("a", "b"))
    assert (
        config.optimizer == MuonOptions(lr=1.0, weight_decay=0.5)
        and type(config.optimizer.lr) is float
    )
    assert config.run == RunOptions()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("lr 3", "is not TOML: "),
        ("\xff\xfe", "is not text: byte 0 is 0xff"),
        ("lr = 3", "has an unknown key lr: did you mean optimizer.lr?"),
        ("[modle]\nlayers = 1", "has an unknown key modle: did you mean model?"),
        ("[model]\nlayer = 1", "has an unknown key model.layer: did you mean model.layers?"),
        ("[run]\nxyzzy = 1", "has an unknown key run.xyzzy: "),
        ("xyzzy = 1", "has an unknown key xyzzy: leave it out"),
        ("[model]\nlayers = true", "has model.layers = True, which must be a whole number"),
        ("[model]\nlayers = 1.0", "has model.layers = 1.0, which must be a whole number"),
        ("[model]\ntied = 1", "has model.tied = 1, which must be true or false"),
        ("[data]\ntext = 'a'", "has data.text = 'a', which must be a list of strings"),
        ("[data]\ntext = [1]", "has data.text = [1], which must be a list of strings"),
        ("[optimizer]\nlr = '1'", "has optimizer.lr = '1', which must be a number"),
        ("[run]\nsave = 1979-05-27", "which must be a string"),
        (
            '[run]\nsave = "a\\u0000b"',
            "has run.save = 'a\\x00b', which must be a string without null characters",
        ),
    ],
)
def test_files_that_cannot_be_used(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content.encode("latin-1"))
    message = refused("--config", str(file))
    assert message.startswith(f"--config {file}") and complaint in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused("--config", str(tmp_path)).endswith("cannot be read: Is a directory")
    assert refused("--config", str(tmp_path / "none")).endswith(
        "cannot be read: No such file or directory"
    )


ASKED: list[tuple[str, str, dict[str, object]]] = [
    ("--tp 2", "--sp", {"sp": True}),
    (
        "--cp 2",
        "--cp-comm all_gather --cp-order striped",
        {"cp_comm": "all_gather", "cp_order": "striped"},
    ),
    (
        "--ep 2 --experts 2",
        "--ep-comm hierarchical --ep-fp8",
        {"ep_comm": "hierarchical", "ep_fp8": True},
    ),
    (
        "--pp 2",
        "--schedule zb1p --chunks 3 --microbatches 4 --offload-stages 0.5 --light-ends",
        {
            "schedule": "zb1p",
            "chunks": 3,
            "microbatches": 4,
            "offload_stages": 0.5,
            "light_ends": True,
        },
    ),
    ("", "--strategy server", {"strategy": "server"}),
    ("", "--compress int8 --bucket-mib 3", {"compress": "int8", "bucket_mib": 3.0}),
    ("", "--zero 3 --hsdp 2", {"zero": 3, "hsdp": 2}),
    ("", "--zero 3 --zeropp", {"zero": 3, "zeropp": True}),
    (
        "",
        "--dcn 2 --local-steps 4 --outer-lr 0.5 --outer-momentum 0.2 --fragments 2 --outer-delay 1 "
        "--mixing 0.5 --outer-topk 0.02",
        {
            "local_steps": 4,
            "outer_lr": 0.5,
            "outer_momentum": 0.2,
            "fragments": 2,
            "outer_delay": 1,
            "mixing": 0.5,
            "outer_topk": 0.02,
        },
    ),
    ("", "--compile", {"compile": True}),
    ("", "--accumulate 3", {"microbatches": 3}),
    ("", "--recompute 'every 2'", {"recompute": "every 2"}),
    ("", "--precision fp8", {"fp8": True}),
    ("", "--precision autocast-float16", {"autocast": "float16"}),
]


def test_each_flag_of_a_strategy_reaches_the_recipe() -> None:
    """Left out on the way, most of them would be missed by no number."""
    reached: set[str] = set()
    for axes, words, expected in ASKED:
        without, config = (parse(shlex.split(f"--batch 64 {axes} {more}")) for more in ("", words))
        layout = layout_of(config, 8)
        plain, recipe = recipe_of(without, layout), recipe_of(config, layout)
        changed = {
            each.name: getattr(recipe, each.name)
            for each in fields(Recipe)
            if getattr(recipe, each.name) != getattr(plain, each.name)
        }
        assert changed == expected, words
        reached |= changed.keys()
    for run in (RunOptions(init="any", lora=4), RunOptions(init="any", qlora=True)):
        recipe = recipe_of(Config(run=run), Layout())
        assert (recipe.lora, recipe.qlora) == (run.lora or 8, run.qlora)
        reached |= {"lora", "qlora"}
    elsewhere = {"allocate", "costs", "node_ranks", "tensor_plan"}  # arguments, and no flags
    assert reached == {each.name for each in fields(Recipe)} - elsewhere


def test_print_config_is_a_file_that_config_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lr", "3e-4", "--text", 'a"b', "c\\d", "--tied", "--strategy", "naive"]
    assert main([*words, "--print-config"]) == 0
    (tmp_path / "x.toml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "x.toml")]) == parse(words)
    assert printed("--config", str(tmp_path / "x.toml"), "--batch", "3") == printed(
        *words, "--batch", "3"
    )


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@settings(max_examples=50)
@given(
    texts=st.lists(names),
    save=names,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
    tied=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
)
def test_every_run_survives_toml(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    save: str,
    lr: float,
    seed: int,
    tied: bool,
    strategy: str,
) -> None:
    """Quotes, backslashes, control characters and numbers of any size come back as they were."""
    base = Config()
    config = Config(
        model=type(base.model)(tied=tied),
        data=DataOptions(text=tuple(texts)),
        optimizer=MuonOptions(lr=lr),
        parallel=type(base.parallel)(strategy=strategy),
        run=RunOptions(save=save, seed=seed),
    )
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert (
        Config(
            **{
                name: Config.kinds()[name](**options)
                for name, options in read_toml(file, Config).items()
            }
        )
        == config
    )


def test_defaults_need_no_flag() -> None:
    assert parse([]) == Config()
    assert set(string.ascii_uppercase).isdisjoint("".join(FROZEN.split()))
