"""What a run is computed on: constants with their sources, devices, and machines of them.

    Constants.table()                       constants.toml
    machine("h100:64")                      clusters.toml: 64 H100 in nodes of eight
    machine("mine.toml")                    a device and a machine of one's own
    machine("h100:32+a100:32@12.5e9")       two sites, and the thin link between them in bytes/s

All values are in SI units: FLOP/s, bytes, bytes/s, seconds, watts. Bandwidths count one direction.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

from minidist.full.data.files import FileError, at, flatten, read_tree, retold, typed
from minidist.full.launch.parser import nearest
from minidist.full.options import Limit, one_of, read_number, shown

Ranges: TypeAlias = Mapping[str, tuple[Any, Limit | None]]
"""By name: the type of a value, and what a value of it may be."""


UNSAID = ("name", "reached8", "peak4", "reached4", "flash3")  # what a device need not say


class PlanError(ValueError):
    """What was asked cannot be planned; the message says why, and what can."""


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table in `name`.toml beside this file."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


@cache
def ranges(section: str) -> Ranges:
    """Return what each value of a section of `ranges.toml` may be."""
    kinds = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "any": object}
    return {
        name: (kinds[said["kind"]], _limit(said)) for name, said in table("ranges")[section].items()
    }


def _limit(said: Mapping[str, Any]) -> Limit | None:
    if "choices" in said:
        return one_of(*said["choices"])
    if "range" not in said:
        return None
    low, high = said["range"]
    zero = "0, or " if said.get("or_zero") else ""
    least, most = (f"{each:,}" if isinstance(each, int) else f"{each:g}" for each in (low, high))
    words = f"{zero}from {least} to {most} {said.get('unit', '')}".rstrip()
    return Limit(words, lambda value: low <= value <= high or (bool(zero) and value == 0))


def checked(values: Mapping[str, Any], section: str, unneeded: tuple[str, ...]) -> dict[str, Any]:
    """Return values by their names, each of its type and inside its range in `ranges.toml`.

    Raises
    ------
    FileError
        For an unknown name, a wrong value, or a missing one, unless it is among the `unneeded`.
    """
    known = ranges(section)
    flat = flatten(dict(values), {name: kind for name, (kind, _) in known.items()})
    if missing := sorted(set(known) - set(flat) - set(unneeded)):
        raise FileError(f"does not say {', '.join(missing)}: a {section} has {', '.join(known)}")
    for key, value in values.items():
        name = key.replace("-", "_")
        with retold(FileError, ValueError, before=f"has {name} = {shown(value)}, which "):
            typed(value, *known[name])
    return flat


@dataclass(frozen=True, eq=False)
class Constants:
    """The numbers behind every prediction; `constants.toml` explains each and names its source."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def but(self, **values: float) -> "Constants":
        """Return the same with some values changed; PlanError if there is no such constant."""
        if unknown := sorted(values.keys() - self.values.keys()):
            raise PlanError(f"there is no constant {unknown[0]!r}: constants.toml has all")
        return Constants({**self.values, **values})

    @staticmethod
    @cache
    def table() -> "Constants":
        """Return those of the table."""
        return Constants({name: entry["value"] for name, entry in table("constants").items()})


@dataclass(frozen=True)
class Device:
    """One accelerator; `devices.toml` explains each number and names its source."""

    name: str
    peak: float
    peak8: float
    reached: float
    memory: float
    bandwidth: float
    units: int
    link: float
    flash: float
    watts: float
    generation: str
    reached8: float = 0.0
    peak4: float = 0.0
    reached4: float = 0.0
    flash3: float = 0.0

    @staticmethod
    def named(name: str) -> "Device":
        """Return a device of the table."""
        return Device(name=name, **entry("devices", name))


@dataclass(frozen=True)
class Machine:
    """`gpus` devices in nodes of `node`, which send `across` bytes/s each to other nodes.

    `price` in $ an hour and GPU. `host`: devices of a computer, of which a node may have several
    (0: as many as `node`).

    `slower` is a second site with other devices, reached over a link of `thin` bytes/s.
    """

    name: str
    device: Device
    gpus: int
    node: int
    across: float
    price: float
    host: int = 0
    slower: "Machine | None" = None
    thin: float = 0.0

    @cached_property
    def hosted(self) -> int:
        """GPUs that share a host: its memory, and its way to the file system."""
        return self.host or self.node

    @cached_property
    def sites(self) -> tuple["Machine", ...]:
        """This site, and the slower one if there is one."""
        return (self, self.slower) if self.slower else (self,)

    @cached_property
    def total(self) -> int:
        """All GPUs, of both sites."""
        return sum(site.gpus for site in self.sites)


def machine(text: str) -> Machine:
    """Return the machine that `NAME:GPUS`, `NAME:GPUS+NAME:GPUS@BYTES/S` or a TOML file says.

    A file has the keys of an entry of `clusters.toml`, and `gpus`; its `device` is a name, or a
    table as in `devices.toml`.

    Raises
    ------
    PlanError
        If the machine is unknown, a value is outside its range, or the last node would be partly
        filled.
    """
    if text.endswith(".toml"):
        with retold(PlanError, FileError, before=f"{text} "):
            return site_of(Path(text).stem, read_tree(Path(text), tomllib.loads, "TOML"))
    sites, at_link, thin = text.partition("@")
    found = []
    for site in sites.split("+"):
        name, _, count = site.partition(":")
        if not count:
            raise PlanError(f"{site!r} does not say how many GPUs: write {name}:64")
        with retold(
            PlanError, FileError, ValueError, before=f"{shown(site)} says a number of GPUs that "
        ):
            gpus = read_number(count, *ranges("machine")["gpus"])
        found.append(site_of(name, {"gpus": gpus} | entry("clusters", name)))
    if len(found) == 1 and not at_link:
        return found[0]
    if len(found) != 2:
        raise PlanError(
            f"{text!r}: two sites and the bytes/s between them are said as h100:32+a100:32@12.5e9"
        )
    with retold(
        PlanError,
        ValueError,
        before=f"{text!r} says bytes/s between two sites, as h100:32+a100:32@12e9, and ",
    ):
        between = read_number(thin, *ranges("command")["thin"])
    fast, slow = sorted(found, key=lambda site: -site.device.peak * site.device.reached)
    return replace(fast, name=text, slower=slow, thin=between)


def site_of(name: str, said: Mapping[str, Any]) -> Machine:
    """Return a machine of a table or file.

    Raise FileError, or PlanError if the last node would be partly filled.
    """
    sizes = {key: value for key, value in said.items() if key != "device"}
    values = checked(sizes, "machine", unneeded=("name", "inside", "host"))
    own = said.get("device")
    if isinstance(own, dict):
        with retold(FileError, FileError, before="has a device that "):
            device = Device(**{"name": name} | checked(own, "device", UNSAID))
    else:
        device = Device.named(at(said, "device", kind=str))
    device = replace(device, link=values.pop("inside", device.link))
    found = Machine(**{"name": name} | values, device=device)
    if found.gpus > found.node and found.gpus % found.node:
        near = found.gpus // found.node * found.node
        raise PlanError(
            f"{found.gpus} GPUs fill no whole nodes of {found.node}: say {near} or "
            f"{near + found.node}"
        )
    return found


def entry(file: str, name: str) -> dict[str, Any]:
    """Return an entry of a table."""
    if name not in table(file):
        meant = nearest(name, table(file))
        choose = f"{meant} Or choose" if meant else "choose"
        raise PlanError(
            f"{name!r} is not in {file}.toml: {choose} one of {', '.join(table(file))}, or give a "
            "file"
        )
    return table(file)[name]
