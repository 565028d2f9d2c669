"""From a checkpoint of any layout to a Hugging Face Llama, and from there into a new run of any
layout.
"""

from __future__ import annotations

import errno
import json
import resource
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from training import losses, short_text, tensors, train_on

from minidist.__main__ import main
from minidist.full.checkpoint import store
from minidist.full.data.text import load_text
from minidist.full.model import GPT, GPTConfig
from minidist.full.trainer.foreign import load_llama, save_llama

RUN = (
    "--dropout 0.1 --precision float64 --lr 0.01 --layers 2 --key-value-heads 2 --save-every 1 "
    "--keep 9"
)
SMALL = GPTConfig(
    layers=1, hidden=16, heads=2, sequence=64, rope_theta=500_000.0, norm_epsilon=1e-3
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps on 2 ranks that share every matrix."""
    folder = tmp_path_factory.mktemp("run") / "a"
    assert train_on(2, RUN, f"--tp 2 --steps 3 --save {folder}") == 0
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a model whose rotation and norms are not the usual ones, and whose weights are
    no fresh ones.
    """
    return save(SMALL, tmp_path / "llama")


def save(config: GPTConfig, folder: Path) -> Path:
    model = GPT(config, torch.Generator().manual_seed(5))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.2, generator=torch.Generator().manual_seed(6))
    save_llama(model, folder)
    return folder


def export(words: str) -> int:
    return main(["export", *shlex.split(words)])


def sentence(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """Return the one line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith(f"minidist {command}: ") and error.count("\n") == 1, error
    return error.removeprefix(f"minidist {command}: ").rstrip()


def assert_holds_parameters_of(checkpoint: Path, folder: Path) -> GPT:
    model = load_llama(folder)
    stored = {name: tensor for name, tensor in tensors(checkpoint).items() if "/" not in name}
    ours = dict(model.named_parameters())
    assert ours.keys() == stored.keys()
    for name, tensor in stored.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    return model


# ---------------------------------------------------------------- export


def test_of_sites_that_have_trained_apart_the_mean_is_exported(tmp_path: Path) -> None:
    """As their run ends: `unwrap` gives all sites that."""
    sites = f"--dcn 2 --zero 1 --local-steps 2 --steps 3 --save {tmp_path / 'a'}"
    assert train_on(4, RUN, sites) == 0
    assert export(f"{tmp_path / 'a'} --to {tmp_path / 'b'}") == 0
    saved = tensors(tmp_path / "a" / "step-00000003")
    for name, parameter in load_llama(tmp_path / "b").named_parameters():
        first, second = saved[name], saved[f"site-1/{name}"]
        assert not torch.equal(first, second)
        assert torch.equal(parameter, (first + second) / 2), name


def test_the_newest_checkpoint_is_exported_and_it_is_said_how_to_load_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(f"{run} --to {tmp_path / 'new' / 'folder'}") == 0
    model = assert_holds_parameters_of(run / "step-00000003", tmp_path / "new" / "folder")
    state = json.loads((run / "step-00000003" / "state.json").read_text())
    assert model.config == replace(GPTConfig(**state["model"]), dropout=0.0)
    out = capsys.readouterr().out
    assert out.startswith(
        f"{model.config.parameter_count:,} parameters of {run / 'step-00000003'} in float64, "
        "written to "
    )
    assert (
        f'AutoModelForCausalLM.from_pretrained("{tmp_path / "new" / "folder"}", dtype="float64")'
        in out
    )
    assert "there is no tokenizer: a token is one byte" in out and out.count("\n") == 3


@pytest.mark.parametrize("tied", ["--tied", pytest.param("--no-tied", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, ""), (3, "--zero 3"), (4, "--tp 2 --zero 1"), (2, "--pp 2"), (2, "--precision bfloat16")],
)
def test_whatever_layout_wrote_it(ranks: int, layout: str, tied: str, tmp_path: Path) -> None:
    assert train_on(ranks, RUN, f"{layout} {tied} --steps 2 --save {tmp_path / 'a'}") == 0
    (tmp_path / "b").mkdir()  # an empty folder is as good as a new one
    assert export(f"{tmp_path / 'a' / 'step-00000001'} --to {tmp_path / 'b'}") == 0
    model = assert_holds_parameters_of(tmp_path / "a" / "step-00000001", tmp_path / "b")
    assert model.config.tied == (tied == "--tied")
    files = sorted((tmp_path / "b").iterdir())
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert files[0].stat().st_mode == files[1].stat().st_mode


def test_transformers_loads_it_as_it_is_told_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    assert export(f"{run} --to {tmp_path / 'b'}") == 0
    call = capsys.readouterr().out.partition("load them with ")[2].partition(", or go on")[0]
    theirs = eval(call, {"transformers": transformers})
    tokens = torch.tensor([list(b"of the class")])
    ours = load_llama(tmp_path / "b")
    # their rotation: float32
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_of_the_run_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    text, file = short_text(tmp_path), tmp_path / "t.json"
    tokenizer.train(
        [str(text)], tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["?"])
    )
    tokenizer.save(str(file))
    assert train_on(1, f"--steps 1 --text {text} --tokenizer {file} --save {tmp_path / 'a'}") == 0
    capsys.readouterr()
    assert export(f"{tmp_path / 'a'} --to {tmp_path / 'b'}") == 0
    assert f"its tokenizer is {file}, copied there as tokenizer.json" in capsys.readouterr().out
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == file.read_bytes()
    # A published model may have more rows than its tokenizer has tokens, but bytes would mean
    # nothing to it
    words = f"--steps 1 --text {text} --init {tmp_path / 'padded'} --sample 20"
    save(replace(load_llama(tmp_path / "b").config, vocabulary=320), tmp_path / "padded")
    assert train_on(2, words, f"--tokenizer {file} --tp 2 --verify") == 0
    capsys.readouterr()
    assert train_on(2, words) == 2
    assert sentence(capsys, "train").endswith(
        "has 320 tokens, and the tokenizer here (one token a byte) has 256: give the model's "
        "own, --tokenizer FILE"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("{run} --to {full}", "--to {full} is there already and is not overwritten: give a new folder"),
        ("{run} --to {full}/x", "--to {full}/x is there already and is not overwritten: give a new folder"),
        ("{run} --to {full}/x/y", "--to {full}/x/y cannot be written (Not a directory): give another folder"),
        ("{run}/step-00000007 --to {new}", "{run}/step-00000007 has no checkpoint: give the folder that was given to "
         "train --save"),
        ("{full} --to {new}", "{full} has no checkpoint: give the folder that was given to train --save"),
        ("{full}/none --to {new}", "{full}/none has no checkpoint: give the folder that was given to train --save"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported(
    words: str, complaint: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, new = tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "x").write_text("mine")
    assert export(words.format(run=run, full=full, new=new)) == 2
    assert sentence(capsys, "export") == complaint.format(run=run, full=full, new=new)
    assert (
        not new.exists()
        and [path.name for path in full.iterdir()] == ["x"]
        and (full / "x").read_text() == "mine"
    )


@pytest.mark.parametrize(
    "name", ["rank-0001.safetensors", "index.json", "state.json", "SHA256SUMS"]
)
def test_a_damaged_checkpoint_is_not_exported(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "a")
    file = tmp_path / "a" / "step-00000003" / name
    content = bytearray(file.read_bytes())
    # a weight, and not its name
    content[-9 if name.endswith("safetensors") else len(content) // 2] ^= 1
    file.write_bytes(content)
    assert export(f"{tmp_path / 'a'} --to {tmp_path / 'b'}") == 2
    message = sentence(capsys, "export")
    assert "step-00000003" in message and "damaged" in message and not (tmp_path / "b").exists()
    assert export(f"{tmp_path / 'a' / 'step-00000002'} --to {tmp_path / 'b'}") == 0


def test_values_that_are_no_numbers_are_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "a")
    newest = tmp_path / "a" / "step-00000003"
    file, sums = newest / "rank-0001.safetensors", newest / "SHA256SUMS"
    before, weights = store.digest(file), load_file(file)
    name = next(name for name in weights if name.endswith("up.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, file)
    sums.write_text(sums.read_text().replace(before, store.digest(file)))
    assert export(f"{tmp_path / 'a'} --to {tmp_path / 'b'}") == 2
    assert "up.weight has values that are infinite or no numbers" in sentence(capsys, "export")


def test_another_programs_checkpoint_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minidist.full.checkpoint.restore.read_state", lambda path: {"step": 3})
    assert export(f"{run} --to {tmp_path / 'b'}") == 2
    assert sentence(capsys, "export").endswith(
        "does not say of which GPT it is: export those of train"
    )


@pytest.mark.parametrize("made", [False, True])
def test_a_full_disk_leaves_nothing_behind(
    made: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if made:
        (tmp_path / "b").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert export(f"{run} --to {tmp_path / 'b'}") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = sentence(capsys, "export")
    assert "cannot be written (" in message and "File too large" in message
    assert list(tmp_path.rglob("*")) == ([tmp_path / "b"] if made else [])


@pytest.mark.parametrize("writable", [0, 1])
def test_a_disk_that_fails_between_two_files_leaves_nothing_behind(
    writable: int,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renamed: list[Path] = []

    def rename(old: Path, new: Path) -> None:
        if len(renamed) == writable:
            raise OSError(errno.EIO, "Input/output error")
        renamed.append(old.rename(new))

    monkeypatch.setattr("minidist.full.trainer.foreign.llama.os.replace", rename)
    assert export(f"{run} --to {tmp_path / 'b'}") == 2
    complaint = f"--to {tmp_path / 'b'} cannot be written (Input/output error): give another folder"
    assert sentence(capsys, "export") == complaint
    assert not (tmp_path / "b").exists() and len(renamed) == writable


# ---------------------------------------------------------------- train --init


@pytest.mark.parametrize("tied", ["--tied", "--no-tied"])
def test_a_run_begins_where_the_exported_one_ended(tied: str, tmp_path: Path) -> None:
    """The text is one batch long: each step sees all of it, so losses tell models apart, and
    nothing else.
    """
    text = short_text(tmp_path, 8 * 16 + 1)
    words = f"{RUN} --dropout 0 --held-out 0 --text {text} {tied}"
    assert train_on(2, words, f"--tp 2 --steps 3 --save {tmp_path / 'a'}") == 0
    assert export(f"{tmp_path / 'a'} --to {tmp_path / 'b'}") == 0
    assert train_on(1, words, f"--steps 4 --save {tmp_path / 'a'} --resume") == 0
    assert (
        train_on(2, words, f"--pp 2 --steps 1 --save {tmp_path / 'c'} --init {tmp_path / 'b'}") == 0
    )
    last, first = (
        losses(tmp_path / "a" / "metrics.jsonl")[-1],
        losses(tmp_path / "c" / "metrics.jsonl")[0],
    )
    assert (last[0], first[0]) == (4, 1) and abs(first[1] - last[1]) < 1e-12
    # not that of random weights
    assert abs(first[1] - losses(tmp_path / "a" / "metrics.jsonl")[0][1]) > 0.01


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "--tp 2"), (4, "--tp 2 --sp --zero 1"), (2, "--pp 2"), (3, "--zero 3"), (1, "")],
)
def test_init_under_every_layout(
    ranks: int, layout: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(replace(SMALL, layers=2, tied=tied), tmp_path / "llama")
    words = (
        f"--layers 2 {'--tied' if tied else ''} --init {folder} --dropout 0.1 --steps 2 --save "
        f"{tmp_path / 'a'}"
    )
    assert train_on(ranks, words, layout, "--verify --lr 1e-9 --weight-decay 0") == 0
    assert "yes: largest relative difference" in capsys.readouterr().out
    # The serial run could be wrong in the same way: with such a rate, the weights are still those
    # of the folder
    stored = tensors(tmp_path / "a" / "step-00000002")
    for name, weight in load_llama(folder).named_parameters():
        assert (stored[name] - weight).abs().max() < 1e-8, name
    model = json.loads((tmp_path / "a" / "step-00000002" / "state.json").read_text())["model"]
    assert (model["rope_theta"], model["norm_epsilon"]) == (500_000.0, 1e-3)
    assert (model["sequence"], model["dropout"]) == (16, 0.1)  # these are options


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_init_rounds_to_the_precision_of_the_run(
    precision: str, llama: Path, tmp_path: Path
) -> None:
    assert (
        train_on(
            2, f"--init {llama} --precision {precision} --steps 1 --lr 1e-9 --save {tmp_path / 'a'}"
        )
        == 0
    )
    stored = tensors(tmp_path / "a" / "step-00000001")
    for name, weight in load_llama(llama).named_parameters():
        assert (stored[name] - weight.to(stored[name].dtype)).abs().max() < 1e-8, name


FLAGS = "--layers 1 --hidden 16 --heads 2 --key-value-heads 2 --intermediate 48 --no-tied"


@pytest.mark.parametrize(
    "words",
    [
        "--layers 3",
        "--hidden 32",
        "--heads 4",
        "--key-value-heads 1",
        "--intermediate 64",
        "--tied",
    ],
)
def test_init_of_another_model(words: str, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(2, f"--steps 1 --init {llama} {words}") == 2
    other = f"--init {llama} is another model than {words}: leave sizes out, or use {FLAGS}"
    assert sentence(capsys, "train") == other
    assert train_on(2, f"--steps 1 --init {llama} {words} {FLAGS}") == 0


@pytest.fixture
def odd_llama(tmp_path: Path) -> Path:
    """A folder as `transformers` saves it: no value is a default, neither of theirs nor of ours."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "odd"
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    marks = ["<unk>", "<begin>", "<end>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=301, special_tokens=marks)
    plain.train_from_iterator([load_text()[:20_000].decode()], trainer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        bos_token="<begin>",
        eos_token="<end>",
        model_max_length=77,
    )
    theirs.save_pretrained(folder)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    sizes |= {"intermediate_size": 52, "vocab_size": 305, "max_position_embeddings": 77}
    others = {
        "rms_norm_eps": 3e-4,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
    }
    rotary = {"rope_type": "default", "rope_theta": 123_456.0}
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **sizes, **others, rope_parameters=rotary, initializer_range=0.3, pad_token_id=9
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_init_takes_everything_from_the_folder_and_export_gives_it_back(
    odd_llama: Path, tmp_path: Path
) -> None:
    """No size and no tokenizer is said; what comes back is the same model to `transformers`, one
    tiny step later.
    """
    import transformers

    run, back, text = tmp_path / "a", tmp_path / "b", short_text(tmp_path)
    words = [
        "train",
        "--init",
        str(odd_llama),
        "--text",
        str(text),
        "--sequence",
        "16",
        "--batch",
        "4",
        "--steps",
        "1",
    ]
    assert main([*words, "--lr", "1e-12", "--weight-decay", "0", "--save", str(run)]) == 0
    assert export(f"{run} --to {back}") == 0
    first, second = (
        json.loads((folder / "config.json").read_text()) for folder in (odd_llama, back)
    )
    assert second == first and first["eos_token_id"] == [2, 7]
    for file in odd_llama.iterdir():
        if file.suffix != ".safetensors":
            assert json.loads((back / file.name).read_text()) == json.loads(file.read_text()), (
                file.name
            )
    tokens = torch.tensor([[1, 50, 300, 7, 2]])
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (odd_llama, back)
    )
    torch.testing.assert_close(after(tokens).logits, before(tokens).logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        load_llama(back)(tokens), before(tokens).logits, rtol=1e-5, atol=1e-5
    )
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == "<end>"


def test_init_refuses_what_contradicts_the_folder(
    odd_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"--heads 4 --no-tied": "--heads 4 --no-tied", "--experts 2 --layers 3": "--experts 2"}
    for words, named in said.items():
        assert main(["train", "--init", str(odd_llama), *words.split(), "--steps", "1"]) == 2
        assert f"is another model than {named}: leave sizes out, or use --layers 3 " in sentence(
            capsys, "train"
        )
    tree = json.loads((odd_llama / "tokenizer.json").read_text())
    tree["model"]["vocab"]["<end>"], tree["model"]["vocab"]["<begin>"] = 1, 2
    (tmp_path / "t.json").write_text(json.dumps(tree))
    assert (
        main(
            [
                "train",
                "--init",
                str(odd_llama),
                "--tokenizer",
                str(tmp_path / "t.json"),
                "--steps",
                "1",
            ]
        )
        == 2
    )
    assert "numbers tokens in another way" in sentence(capsys, "train")


def test_init_of_a_folder_that_is_none(
    llama: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> str:
        assert train_on(2, f"--steps 1 --init {folder}") == 2
        return sentence(capsys, "train")

    assert refused(tmp_path / "none").startswith(
        f"--init {tmp_path / 'none'}: {tmp_path / 'none' / 'config.json'} can"
    )
    assert refused(run) == (
        f"--init {run} has checkpoints: run python -m minidist export {run} --to FOLDER first"
    )
    other = save(replace(SMALL, vocabulary=255), tmp_path / "other")
    assert "has 255 tokens, and the tokenizer here (one token a byte) has 256" in refused(other)
    shutil.copy(llama / "config.json", other)
    assert "holds other weights than the configuration describes" in refused(other)
    (llama / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors cannot be read (" in refused(llama)
    (llama / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refused(llama)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    assert "says attention_bias=True, but this GPT can only do False" in refused(llama)


def test_a_resumed_run_has_the_checkpoints_weights_and_the_folders_rotation(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--precision float64 --lr 0.01 --save-every 1 --steps 3 --save {tmp_path / 'a'}"
    assert train_on(2, words, f"--tp 2 --init {llama}") == 0
    before = tensors(tmp_path / "a" / "step-00000003")
    shutil.rmtree(tmp_path / "a" / "step-00000003")
    capsys.readouterr()
    assert train_on(2, words, "--resume") == 2
    assert sentence(capsys, "train") == (
        f"{tmp_path / 'a' / 'step-00000002'} began from the weights in {llama}: add --init "
        f"{llama}, or where it is now"
    )
    llama.rename(tmp_path / "moved")
    assert train_on(2, words, f"--resume --verify --init {tmp_path / 'moved'}") == 0
    out = capsys.readouterr().out
    assert "resumed after step 2" in out and "yes: largest relative difference" in out
    after = tensors(tmp_path / "a" / "step-00000003")
    assert all((after[name] - before[name]).abs().max() < 1e-9 for name in before)
    (tmp_path / "moved" / "model.safetensors").unlink()  # only the serial run needs them
    assert train_on(2, words, f"--resume --steps 4 --init {tmp_path / 'moved'}") == 0


def test_a_run_that_began_at_random_is_not_resumed_with_init(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(1, f"--steps 1 --save {tmp_path / 'a'}") == 0
    capsys.readouterr()
    assert train_on(1, f"--steps 2 --save {tmp_path / 'a'} --resume --init {llama}") == 2
    assert sentence(capsys, "train") == (
        f"{tmp_path / 'a' / 'step-00000001'} began from random weights, not from --init "
        f"{llama}: leave --init out"
    )


# ---------------------------------------------------------------- what checkpoints cost


def test_the_summary_says_what_checkpoints_cost_and_how_often_to_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(words: str) -> dict[str, str]:
        assert train_on(2, words) == 0
        lines = [
            line.partition("   ")
            for line in capsys.readouterr().out.splitlines()
            if "   " in line.strip()
        ]
        return {name.strip(): value.strip() for name, _, value in lines}

    found = rows(f"--steps 4 --save-every 2 --save {tmp_path / 'a'}")
    count, stalled, written = found["checkpoints"].split(", ")
    assert (
        count == "2"
        and stalled.startswith("training stood still ")
        and written.startswith("written in ")
    )
    assert all(0 < float(words.split()[-2]) < 60 for words in (stalled, written))
    assert "how often to save" not in " ".join(found)
    assert "checkpoints" not in rows("--steps 2")
    # the serial run, which saves nothing, says nothing
    saved = f"--steps 4 --save {tmp_path / 'b'} --verify"
    lines = "\n".join(f"{name} {value}" for name, value in rows(f"{saved} --mtbf 24").items())
    assert "how often to save" in lines and "with a failure every 24 h on average" in lines
    # nothing is left to train, nothing was measured
    assert "checkpoints" not in rows(f"{saved} --mtbf 24 --resume")


def test_advice_needs_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(2, "--steps 1 --mtbf 24") == 2
    assert (
        sentence(capsys, "train")
        == "--mtbf 24.0 is for runs with --save FOLDER: add that, or leave --mtbf out"
    )
    assert train_on(1, "--mtbf=-1") == 2
    assert sentence(capsys, "train") == "--mtbf -1.0 cannot be: it must be from 0 to 1e9"
