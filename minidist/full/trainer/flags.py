"""From a command line to a `Config`: the defaults, then `--config FILE`, then `--deepspeed FILE`,
then flags.

With `--init FOLDER`, the folder's own sizes and tokenizer take the place of the defaults.
"""

import argparse
import json
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from minidist.full.data.files import FileError, flatten, read_tree, retold
from minidist.full.launch.parser import flag, flag_of, unknown_flag
from minidist.full.options import flags_of
from minidist.full.trainer.config import Config, ConfigError, Sections
from minidist.full.trainer.foreign.names import MEGATRON, MEGATRON_BATCH
from minidist.full.trainer.foreign.options import merged, read_deepspeed, translate
from minidist.full.trainer.resume import with_folder

Kind = TypeVar("Kind", bound=Config)


class HelpAsked(Exception):
    """`--help` or `--print-config`: the message is what to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")


def parse_with_notes(
    argv: Sequence[str], kind: type[Kind], prog: str = "python -m minidist train"
) -> tuple[Kind, list[str]]:
    """Return the run that a command line asks for, and notes on options that mean nothing or
    something else here.

    `--key-value-heads` and `--key_value_heads` are the same flag. Only `--deepspeed` and
    `--megatron` give notes.

    Parameters
    ----------
    kind
        `Config`, or a subclass with more options.

    Raises
    ------
    ConfigError
        For an unknown flag (with the nearest one that exists), or a value that cannot be.
    HelpAsked
        For `--help` and `--print-config`.
    """
    parser, words = build_parser(prog, kind), [_dashes(word) for word in argv]
    _add_foreign(parser, "--megatron" in words)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(unknown_flag(unknown[0], parser))
    values = vars(given)
    if values.pop("help", False):
        raise HelpAsked(parser.format_help().rstrip())
    if "megatron" in values and values.get("optimizer") == "adam":
        values["optimizer"] = "adamw"  # Megatron's adam decays weights as AdamW does
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    flags: Sections = {}
    for section, cls in kind.kinds().items():
        names = [option.name for option in flags_of(cls)]
        flags[section] = {name: values[name] for name in names if name in values}
    sections = read_toml(Path(values["config"]), kind) if "config" in values else {}
    notes: list[str] = []
    if "deepspeed" in values:
        theirs, notes = read_deepspeed(Path(values["deepspeed"]), sections, flags)
        sections = merged(sections, theirs)
    if "megatron" in values:
        theirs, more = translate(MEGATRON, MEGATRON_BATCH, values, sections, flags)
        sections, notes = merged(sections, theirs), notes + more
    sections = with_folder(merged(sections, flags))
    kinds = kind.kinds()
    config = kind(**{name: kinds[name](**options) for name, options in sections.items()})
    if "print_config" in values:
        raise HelpAsked(to_toml(config).rstrip())
    return config, notes


def kinds_of(section: Any) -> dict[str, Any]:
    """Return as what each option of a section is read, by its name."""
    types = typing.get_type_hints(section)
    return {
        option.name: option.metadata["kind"] or types[option.name] for option in flags_of(section)
    }


# ---------------------------------------------------------------- flags


def build_parser(prog: str, kind: type[Config]) -> argparse.ArgumentParser:
    """Return the parser: one group for each dataclass, one flag for each field."""
    parser = _Parser(
        prog=prog, allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this and stop")
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file with any of these; flags win over it"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the run as TOML and stop"
    )
    for section, cls in kind.kinds().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").split("\n")[0])
        kinds = kinds_of(cls)
        for option in flags_of(cls):
            read, shown = kinds[option.name], option.metadata["help"]
            if read is not bool and option.default not in ("", ()):
                shown += f" (default: {option.default})"
            group.add_argument(flag(option.name), help=shown, **_argument(read))
    return parser


def _add_foreign(parser: argparse.ArgumentParser, megatron_too: bool) -> None:
    """Add what reads the configuration of another program."""
    group = parser.add_argument_group(
        "other programs", "What they leave out keeps our default; our flags win."
    )
    group.add_argument(
        "--deepspeed", metavar="FILE", help="a DeepSpeed JSON; it wins over --config"
    )
    group.add_argument(
        "--megatron",
        action="store_true",
        help="take flags of Megatron-LM, too; they win over files",
    )
    offered = MEGATRON if megatron_too else []
    for row in offered:
        shown = row.note or (
            flag(row.to.partition(".")[2]) if row.to else "checked, or read together with others"
        )
        group.add_argument(
            row.name, dest=row.name, help=shown, **_argument(row.kind, switch="store_true")
        )


def _argument(kind: Any, switch: Any = argparse.BooleanOptionalAction) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if kind is bool:
        return {"action": switch}
    if kind == tuple[str, ...]:
        return {"nargs": "+", "metavar": "FILE"}
    return {
        "type": flag_of(kind) if kind in (int, float) else str,
        "metavar": kind.__name__.upper(),
    }


def _dashes(word: str) -> str:
    """Turn `--key_value_heads=2` into `--key-value-heads=2`; leave values alone."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


# ---------------------------------------------------------------- TOML


def read_toml(path: Path, kind: type[Config]) -> Sections:
    """Return the sections of a TOML file; refuse unknown names and values of another type."""
    kinds = {
        f"{section}.{name}": value
        for section, cls in kind.kinds().items()
        for name, value in kinds_of(cls).items()
    }
    sections: Sections = {}
    with retold(ConfigError, FileError, before=f"--config {path} "):
        for name, value in flatten(read_tree(path, tomllib.loads, "TOML"), kinds).items():
            section, _, option = name.partition(".")
            sections.setdefault(section, {})[option] = value
    return sections


def to_toml(config: Config) -> str:
    """Write a run as a TOML file that `--config` reads back."""
    lines = []
    for section, options in config.sections().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_literal(value)}" for name, value in options.items()]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    """Write a value as TOML: as JSON does, but TOML wants the delete character escaped, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
