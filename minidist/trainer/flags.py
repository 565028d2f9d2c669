"""From a command line to a `Config`: the defaults, then `--config FILE`, then flags."""

from __future__ import annotations

import argparse
import difflib
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from minidist.trainer.config import Config, ConfigError


class HelpAsked(Exception):
    """`--help` or `--print-config`: the message is what to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str], prog: str = "python -m minidist train") -> Config:
    """Return the run that a command line asks for.

    `--key-value-heads` and `--key_value_heads` are the same flag.

    Raises
    ------
    ConfigError
        For an unknown flag (with the nearest one that exists), or a value that cannot be.
    HelpAsked
        For `--help` and `--print-config`.
    """
    parser = build_parser(prog)
    given, unknown = parser.parse_known_args([_dashes(word) for word in argv])
    if unknown:
        raise ConfigError(_nearest(unknown[0], parser))
    values = vars(given)
    if values.pop("help", False):
        raise HelpAsked(parser.format_help())
    printing, file = values.pop("print_config", False), values.pop("config", None)
    sections: dict[str, dict[str, Any]] = read_toml(Path(file)) if file else {}
    for name, value in values.items():
        sections.setdefault(_section_of(name), {})[name] = tuple(value) if isinstance(value, list) else value
    config = Config(**{name: _classes()[name](**options) for name, options in sections.items()})
    if printing:
        raise HelpAsked(to_toml(config))
    return config


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser: one group for each dataclass, one flag for each field."""
    parser = _Parser(prog=prog, allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--help", "-h", action="store_true", help="show this and stop")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these; flags win over it")
    parser.add_argument("--print-config", action="store_true", help="print the run as TOML and stop")
    for section, cls in _classes().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").split("\n")[0])
        types = typing.get_type_hints(cls)
        for option in fields(cls):
            group.add_argument(f"--{option.name.replace('_', '-')}", **_argument(option, types[option.name]))
    return parser


def _argument(option: Field[Any], kind: Any) -> dict[str, Any]:
    shown = f"{option.metadata['help']} (default: {option.default if option.default not in ('', ()) else 'none'})"
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": option.metadata["help"]}
    if kind is tuple[str, ...]:
        return {"nargs": "+", "metavar": "FILE", "help": shown}
    return {"type": kind, "metavar": kind.__name__.upper(), "help": shown}


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a TOML file, unknown ones and wrong types refused."""
    try:
        sections = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    for section, options in sections.items():
        if section not in _classes() or not isinstance(options, dict):
            raise ConfigError(f"--config {path}: [{section}] is not one of {', '.join(f'[{s}]' for s in _classes())}")
        types = typing.get_type_hints(_classes()[section])
        for name, value in options.items():
            if name not in types:
                near = difflib.get_close_matches(name, types, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(types)}"
                raise ConfigError(f"--config {path}: [{section}] has no {name}: {hint}")
            options[name] = _converted(path, section, name, value, types[name])
    return sections


def _converted(path: Path, section: str, name: str, value: Any, kind: Any) -> Any:
    if kind is tuple[str, ...] and isinstance(value, list):
        return tuple(map(str, value))
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple[str, ...] or type(value) is not kind:
        wanted = "a list of strings" if kind is tuple[str, ...] else kind.__name__
        raise ConfigError(f"--config {path}: {name} = {value!r} in [{section}] must be {wanted}")
    return value


def to_toml(config: Config) -> str:
    """Write a run as a TOML file that `--config` reads back."""
    lines = []
    for section, options in config.sections().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_literal(value)}" for name, value in options.items()]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _classes() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _section_of(name: str) -> str:
    return next(section for section, cls in _classes().items() if name in {option.name for option in fields(cls)})


def _dashes(word: str) -> str:
    """Turn `--key_value_heads=2` into `--key-value-heads=2`; leave values alone."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _nearest(word: str, parser: argparse.ArgumentParser) -> str:
    flag = word.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    if not flag.startswith("-"):
        return f"{word!r} belongs to no option: see --help"
    return f"there is no option {flag}: " + (f"did you mean {near[0]}?" if near else "see --help")
