"""What a run is computed on: constants with their sources, devices, and machines of them.

    Constants.table()                       constants.toml, each inside its range
    machine("h100:64")                      clusters.toml: 64 H100 in nodes of eight
    machine("mine.toml")                    a device and a machine of one's own
    machine("h100:32+a100:32@12.5e9")       two sites, and the thin link between them in bytes/s

All values are in SI units: FLOP/s, bytes, bytes/s, seconds, watts. Bandwidths count one direction.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from minidist.launch.parser import nearest


class PlanError(ValueError):
    """What was asked cannot be planned; the message says why, and what can."""


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table in `name`.toml beside this file."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class Constants:
    """The numbers behind every prediction; `constants.toml` says of each what it is and where it comes from."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def but(self, **values: float) -> "Constants":
        """Return the same with some values changed."""
        return Constants({**self.values, **values})

    @staticmethod
    @cache
    def table() -> "Constants":
        """Return those of the table, if each is inside its range."""
        for name, entry in table("constants").items():
            low, high = entry["range"]
            if not low <= entry["value"] <= high:
                raise PlanError(f"{name}={entry['value']} is outside {low} to {high}: mend constants.toml")
        return Constants({name: entry["value"] for name, entry in table("constants").items()})


@dataclass(frozen=True)
class Device:
    """One accelerator: `devices.toml` says what each number is, and where it comes from."""

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

    @staticmethod
    def named(name: str) -> "Device":
        """Return a device of the table."""
        return Device(name=name, **entry("devices", name))


@dataclass(frozen=True)
class Machine:
    """`gpus` devices in nodes of `node`, which send `across` bytes/s each to other nodes; `price` in $ an hour and GPU.

    `slower` is a second site with other devices, reached over a link of `thin` bytes/s.
    """

    name: str
    device: Device
    gpus: int
    node: int
    across: float
    price: float
    slower: "Machine | None" = None
    thin: float = 0.0

    @property
    def sites(self) -> tuple["Machine", ...]:
        """This site, and the slower one if there is one."""
        return (self, self.slower) if self.slower else (self,)

    @property
    def total(self) -> int:
        """All GPUs, of both sites."""
        return sum(site.gpus for site in self.sites)


def machine(text: str) -> Machine:
    """Return the machine that `NAME:GPUS`, `NAME:GPUS+NAME:GPUS@BYTES/S` or a TOML file says.

    A file has the keys of an entry of `clusters.toml`, and `gpus`; its `device` is a name, or a table as in
    `devices.toml`.

    Raises
    ------
    PlanError
        If there is no such machine, or the number of GPUs fills no whole nodes.
    """
    if text.endswith(".toml"):
        return _site(Path(text).stem, {"name": Path(text).stem} | read_tree(text, tomllib.loads))
    sites, _, thin = text.partition("@")
    found = []
    for site in sites.split("+"):
        name, _, count = site.partition(":")
        if not count.isdigit() or int(count) < 1:
            raise PlanError(f"{site!r} does not say how many GPUs: write {name}:64")
        found.append(_site(name, {"name": name, "gpus": int(count)} | entry("clusters", name)))
    if len(found) == 1:
        return found[0]
    if len(found) > 2 or not thin.replace("e", "").replace(".", "").isdigit():
        raise PlanError(f"{text!r}: two sites and the bytes/s between them are said as h100:32+a100:32@12.5e9")
    fast, slow = sorted(found, key=lambda site: -site.device.peak * site.device.reached)
    return replace(fast, name=text, slower=slow, thin=float(thin))


def _site(name: str, said: dict[str, Any]) -> Machine:
    device: Any = said.pop("device", None)
    if isinstance(device, dict):
        device.setdefault("name", name)
    keys = {each.name for each in fields(Machine)} - {"device", "slower", "thin"}
    try:
        chosen = Device(**device) if isinstance(device, dict) else Device.named(str(device))
        found = Machine(device=replace(chosen, link=said.pop("inside", chosen.link)), **said)
    except TypeError as error:
        raise PlanError(f"{name}: {error}; give {', '.join(sorted(keys))}, and a device") from None
    if found.gpus > found.node and found.gpus % found.node:
        near = found.gpus // found.node * found.node
        raise PlanError(f"{found.gpus} GPUs fill no whole nodes of {found.node}: say {near} or {near + found.node}")
    return found


def read_tree(path: str, parse: Any) -> dict[str, Any]:
    """Return what a file of TOML or JSON holds."""
    try:
        tree: dict[str, Any] = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None
    return tree


def entry(file: str, name: str) -> dict[str, Any]:
    """Return an entry of a table."""
    if name not in table(file):
        meant = nearest(name, table(file))
        choose = f"{meant} Or choose" if meant else "choose"
        raise PlanError(f"{name!r} is not in {file}.toml: {choose} one of {', '.join(table(file))}, or give a file")
    return table(file)[name]
