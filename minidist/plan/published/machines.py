"""The machine that a row of published measurements names: its device, and the network between nodes."""

import re

from minidist.plan.device import Device
from minidist.plan.published.fields import LeftOut, PublishedRow

GPUS = {  # how rows call a device of `devices.toml`, without its case and form
    "v100 32gb": "v100",
    "a100": "a100-80",
    "a100 80gb": "a100-80",
    "a100 40gb": "a100-40",
    "h100": "h100",
    "h100 80gb": "h100",
    "h100 96gb hbm2e 500w": "h100-500w",
    "h200": "h200",
    "h200 141gb": "h200",
    "h800": "h800",
    "b200": "b200",
    "b200 power limited": "b200-750w",
    "b300": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "mi300x": "mi300x",
    "mi325x": "mi325x",
    "mi355x": "mi355x",
    "tpu v4": "tpu-v4",
    "tpu v5e": "tpu-v5e",
    "tpu v5p": "tpu-v5p",
    "tpu v6e": "tpu-v6e",
    "trainium 2": "trainium2",
    "trainium2": "trainium2",
}
# words that change nothing: a DGX-2, a board
FORMS = ("nvidia", "dgx", "2", "sxm", "sxm4", "sxm5", "cluster")
CARDS = {  # GB/s of the network for each device, where a row does not say it
    "v100": 12.5,
    "a100-40": 25,
    "a100-80": 25,
    "h100": 50,
    "h100-500w": 50,
    "h200": 50,
    "h800": 50,
    "b200": 50,
    "b200-750w": 50,
    "b300": 100,
    "gb200": 50,
    "gb300": 100,
    "mi300x": 50,
    "mi325x": 50,
    "mi355x": 50,
    "tpu-v4": 6.25,
    "tpu-v5e": 3.125,
    "tpu-v5p": 6.25,
    "tpu-v6e": 12.5,
    "trainium2": 25,
}


def text(config: PublishedRow, *names: str) -> str:
    """Return what a configuration says under these names, in small letters."""
    return " ".join(str(config.get(name) or "") for name in names).lower()


def device_name(config: PublishedRow) -> str:
    """Return which of `devices.toml` the row names.

    Raise LeftOut for any other: none stands in for it.
    """
    said = re.sub(r"\(paper.*\)", "", text(config, "gpu"))  # what follows is a citation
    words = [word for word in re.findall(r"[a-z0-9]+", said) if word not in FORMS]
    if (name := " ".join(words)) not in GPUS:
        raise LeftOut(f"the GPU {config.get('gpu')!r} is not in the table of devices")
    return GPUS[name]


def network(config: PublishedRow, device: Device) -> float:
    """Return the bytes/s of a node's network cards."""
    if config.get("inter_node_Gbps_per_node"):
        return float(config["inter_node_Gbps_per_node"]) / 8 * 1e9
    if "omni-path" in text(config, "interconnect"):
        return 4 * 12.5e9
    node = config.get("node_size") or 8
    if said := config.get("inter_node_GBps") or CARDS.get(device.name):
        return float(said) * node * 1e9
    if config["gpus"] > node:
        raise LeftOut(f"it does not say how fast the network between nodes of {device.name} is")
    return 50e9 * node  # inside one node nothing crosses it
