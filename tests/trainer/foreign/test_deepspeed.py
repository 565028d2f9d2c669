"""A DeepSpeed JSON as a configuration: what is translated, what is noted, and what is refused, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.foreign.names import DEEPSPEED, Row
from minidist.full.trainer.foreign.options import read_deepspeed
from minidist.further import Config, parse

Write = Callable[[Any], Path]

ALL = """{
  // of the batch, a rank has 4 * 2
  "train_batch_size": 32,  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5, "steps_per_print": 10, "wall_clock_breakdown": false, "prescale_gradients": true,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1},
  "bf16": {"enabled": false},
  "zero_optimization": {
    "stage": 3, /* all of it,
    sharded */ "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8, "reduce_scatter": true, "allgather_partitions": true,
    "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true,
    "offload_optimizer": {"device": "nvme", "nvme_path": "http://a/*b*/", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true}
  },
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": 0}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7, "total_num_steps": 70}}
}"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(content: Any) -> Path:
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return to_file


def refused(file: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(["--deepspeed", str(file), *words])
    message = str(error.value)
    assert message.startswith(f"--deepspeed {file}: ") and "\n" not in message
    return message.removeprefix(f"--deepspeed {file}: ")


# ---------------------------------------------------------------- what is translated


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")],
)
def test_the_rate_goes_on_as_the_scheduler_says(kind: str, shape: str, write: Write) -> None:
    sections, _ = read_deepspeed(write({"scheduler": {"type": kind, "params": {}}}), {}, {})
    assert sections["optimizer"] == {"lr_schedule": shape}


def test_what_has_a_counterpart_is_translated(write: Write) -> None:
    sections, _ = read_deepspeed(write(ALL), {}, {})
    assert sections == {
        "data": {"batch": 32},
        "optimizer": {
            "clip": 0.5,
            "lr": 3e-4,
            "beta1": 0.8,
            "beta2": 0.99,
            "weight_decay": 0.0,
            "warmup": 7,
            "lr_schedule": "cosine",
        },
        "parallel": {"zero": 3, "accumulate": 2, "dp": 4, "bucket_mib": 5e8 * 2 / 2**20},
        "memory": {"offload": "disk", "offload_folder": "http://a/*b*/"},
        "run": {"precision": "float16", "steps": 70, "log_every": 10},
    }
    config = parse(["--deepspeed", str(write(ALL))])
    assert config.data.batch == 32 and type(config.optimizer.weight_decay) is float


def test_every_key_without_effect_has_a_note_that_says_why(write: Write) -> None:
    _, notes = read_deepspeed(write(ALL), {}, {})
    assert "optimizer.params.eps: no effect here, epsilon is always 1e-8" in notes
    assert len(notes) == 23


SAMPLES = {
    int: 1,
    float: 0.5,
    str: "x",
    bool: True,
    dict: {"any": ["thing"]},
    object: {"any": ["thing"]},
}


@pytest.mark.parametrize(
    "row", [row for row in DEEPSPEED if row.note and not row.to], ids=lambda row: row.name
)
def test_a_key_without_effect_changes_nothing_and_has_a_note_or_is_refused(
    row: Row, write: Write
) -> None:
    content = SAMPLES[row.kind]
    for key in reversed(row.name.split(".")):
        content = {key: content}
    try:
        sections, notes = read_deepspeed(write(content), {}, {})
    except ConfigError as error:
        assert row.note in str(error) or row.name == "scheduler.type"  # "x" is none
    else:
        assert not any(sections.values()) and notes == [f"{row.name}: no effect here, {row.note}"]


def test_rows_name_options_that_exist_once() -> None:
    names = [row.name for row in DEEPSPEED]
    assert len(names) == len(set(names))
    options = {
        f"{section}.{name}" for section, values in Config().sections().items() for name in values
    }
    assert {row.to for row in DEEPSPEED} - {""} <= options and set(Config.kinds()) == set(
        Config().sections()
    )


@pytest.mark.parametrize(
    ("content", "words", "batch", "accumulate", "dp"),
    [
        ({"train_batch_size": 24}, "", 24, 1, 0),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, "", 24, 3, 0),
        ({"gradient_accumulation_steps": 3}, "", 16, 3, 0),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, "--dp 2", 24, 3, 2),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "--dp 2",
            24,
            3,
            2,
        ),
        ({"train_micro_batch_size_per_gpu": 4}, "--dp 2", 8, 1, 2),
        (
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
            },
            "",
            24,
            3,
            2,
        ),
    ],
)
def test_the_batch_is_solved_for_what_is_missing(
    content: dict[str, int], words: str, batch: int, accumulate: int, dp: int, write: Write
) -> None:
    config = parse(["--deepspeed", str(write(content)), *words.split()])
    assert (config.data.batch, config.parallel.accumulate, config.parallel.dp) == (
        batch,
        accumulate,
        dp,
    )


def test_a_pipeline_counts_its_microbatches(write: Write) -> None:
    content = {"train_batch_size": 24, "gradient_accumulation_steps": 6}
    sections, _ = read_deepspeed(write(content), {}, {"parallel": {"pp": 2}})
    assert sections["parallel"] == {"microbatches": 6}


@pytest.mark.parametrize(
    ("precision", "bytes"), [("fp16", 2), ("bf16", 2), ("bfloat16", 2), ("", 4)]
)
def test_buckets_are_counted_in_elements_there_and_bytes_here(
    precision: str, bytes: int, write: Write
) -> None:
    content: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 2**20}}
    content |= {precision: {"enabled": True}} if precision else {}
    assert parse(["--deepspeed", str(write(content))]).parallel.bucket_mib == bytes


def test_a_path_without_nvme_is_refused(write: Write) -> None:
    offload = {"device": "cpu", "nvme_path": "/x"}
    with pytest.raises(
        ConfigError, match="--offload-folder /x is for runs with --offload disk: add that"
    ):
        parse(["--deepspeed", str(write({"zero_optimization": {"offload_optimizer": offload}}))])


def test_flags_win_over_deepspeed_and_deepspeed_over_toml(tmp_path: Path, write: Write) -> None:
    toml, file = (
        tmp_path / "x.toml",
        write({"train_batch_size": 4, "optimizer": {"params": {"lr": 0.25}}}),
    )
    toml.write_text("[data]\nbatch = 3\nsequence = 32\n[optimizer]\nlr = 0.5\n")
    config = parse(["--lr", "0.125", "--deepspeed", str(file), "--config", str(toml)])
    assert (config.data.batch, config.data.sequence, config.optimizer.lr) == (4, 32, 0.125)


def test_the_ranks_may_be_in_the_toml(tmp_path: Path, write: Write) -> None:
    (tmp_path / "x.toml").write_text("[parallel]\ndp = 4\n")
    file = write({"train_micro_batch_size_per_gpu": 2})
    assert parse(["--deepspeed", str(file), "--config", str(tmp_path / "x.toml")]).data.batch == 8


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("content", "words", "complaint"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "--dp 2",
         "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 * 3 microbatches * --dp 2: change one of them"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, "--dp 2",
         "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 * 2 microbatches * --dp 2: change one of them"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "",
         "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 * 3 microbatches * --dp N: change one of them"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3}, "--dp 2",
         "train_batch_size 32 is not train_micro_batch_size_per_gpu 3 * N microbatches * --dp 2: change one of them"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, "",
         "train_micro_batch_size_per_gpu 4 needs the number of ranks of the data axis: add --dp RANKS"),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "",
         "train_micro_batch_size_per_gpu 4 needs the number of ranks of the data axis: add --dp RANKS"),
        ({"train_micro_batch_size_per_gpu": 0}, "",
         "train_micro_batch_size_per_gpu 0 cannot be: it must be at least 1"),
        ({"train_batch_size": "auto"}, "", "it has train_batch_size = 'auto', which must be a whole number"),
        ({"zero_optimization": "auto"}, "", "it has zero_optimization = 'auto', which must be a section {...}"),
        ({"train_batchsize": 4}, "", "it has an unknown key train_batchsize: did you mean train_batch_size?"),
        ({"zero_optimisation": {"stage": 1}}, "",
         "it has an unknown key zero_optimisation: did you mean zero_optimization?"),
        ({"zero_optimization": {"stge": 1}}, "",
         "it has an unknown key zero_optimization.stge: did you mean zero_optimization.stage?"),
        ({"optimizer": {"lr": 1}}, "", "it has an unknown key optimizer.lr: did you mean optimizer.params.lr?"),
        ({"stage": 1}, "", "it has an unknown key stage: did you mean zero_optimization.stage?"),
        ({"overlap_com": True}, "", "it has an unknown key overlap_com: did you mean zero_optimization.overlap_comm?"),
        ({"xyzzy": 1}, "", "it has an unknown key xyzzy: leave it out"),
        ({"amp": {"enabled": True}}, "", "it has an unknown key amp: leave it out"),
        ({"train_batch_size": 4.5}, "", "it has train_batch_size = 4.5, which must be a whole number"),
        ('{"train_batch_size": Infinity}', "", "it has train_batch_size = inf, which is too large"),
        ('{"train_batch_size": NaN}', "", "it has train_batch_size = nan, which must be a number"),
        ({"train_batch_size": True}, "", "it has train_batch_size = True, which must be a whole number"),
        ({"gradient_clipping": "x"}, "", "it has gradient_clipping = 'x', which must be a number"),
        ({"fp16": {"enabled": 1}}, "", "it has fp16.enabled = 1, which must be true or false"),
        ({"fp16": True}, "", "it has fp16 = True, which must be a section {...}"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "",
         "it has optimizer.params.betas = [0.9], which must be a list of two numbers"),
        ({"optimizer": {"params": {"betas": [0.9, "a"]}}}, "",
         'it has optimizer.params.betas = [0.9, \'a\'], which must be a list of two numbers'),
        ({"optimizer": {"type": "Lamb"}}, "", "optimizer.type Lamb cannot be: it must be one of adam, adamw"),
        ({"scheduler": {"type": "OneCycle"}}, "",
         "scheduler.type OneCycle cannot be: it must be one of warmuplr, warmupdecaylr, warmupcosinelr"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "",
         "zero_optimization.offload_optimizer.device gpu cannot be: it must be one of none, cpu, nvme"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "",
         "fp16.enabled and bf16.enabled make --precision both float16 and bfloat16: leave one out"),
        ("[]", "", "it must be a section {...}"),
        ('{\n "a": /* b */ }', "", "it is not JSON: Expecting value: line 2 column 15 (char 16)"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(content: Any, words: str, complaint: str, write: Write) -> None:
    assert refused(write(content), *words.split()) == complaint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == "it cannot be read: No such file or directory"
    (tmp_path / "latin").write_bytes(b"\xff")
    assert refused(tmp_path / "latin").startswith("it is not text: ")


def test_values_are_checked_as_those_of_flags_are(write: Write) -> None:
    with pytest.raises(ConfigError, match="--zero 5 cannot be"):
        parse(["--deepspeed", str(write({"zero_optimization": {"stage": 5}}))])
