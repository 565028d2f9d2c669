"""What a row may say: the fields that are read, with their ranges, and those that change no
prediction.

    READ      decides what is predicted: sizes, layout, software
    BESIDE    changes nothing. Some of these fields may have only the values that are listed: others are not modelled

A row is left out if it has a field that is in neither table, or a value outside its range. So whoever
adds a field to the published rows has to say here whether predictions read it. Otherwise a mixture
would be predicted as a dense model.
"""

from collections.abc import Iterable
from typing import Any

from minidist.full.data.files import FileError, check_values, retold, typed
from minidist.full.options import shown
from minidist.plan.device import Ranges, ranges

PublishedRow = dict[str, Any]
"""One published measurement as JSON has it: id, source, kind, config and measured."""


class LeftOut(ValueError):
    """A row that cannot be predicted; the message says why."""


ROW: Ranges = {
    "id": (str, None),
    "source": (str, None),
    "kind": (str, None),
    "config": (dict, None),
    "measured": (dict, None),
    "derived": (dict, None),
}
ROW_BESIDE = ("note", "is_formula", "group", "file", "peer", "reserved_gib", "mb_tflops")

MODEL, NUMBERS = ranges("model"), ranges("row")
COUNTED = ("gpus", "tp", "pp", "dp", "cp", "ep", "node_size", "model_parallel", "shard", "slices")
BATCHES = ("micro_batch", "global_batch", "local_batch", "num_microbatches")
WORDS = (
    "arch",
    "gpu",
    "precision",
    "recompute",
    "schedule",
    "framework",
    "interconnect",
    "sharding",
    "scope",
    "fused",
    "cp_comm",
)
READ: Ranges = {
    "hidden": MODEL["hidden"],
    "layers": MODEL["layers"],
    "heads": MODEL["heads"],
    "kv_heads": MODEL["kv"],
    "ffn": MODEL["ffn"],
    "head_dim": MODEL["head_dim"],
    "vocab": MODEL["vocabulary"],
    "experts": MODEL["experts"],
    "top_k": MODEL["top_k"],
    "shared": MODEL["shared"],
    "dense_layers": MODEL["dense_layers"],
    "dense_ffn": MODEL["dense_ffn"],
    "params_b": NUMBERS["billions"],
    "seq": NUMBERS["size"],
    **dict.fromkeys((*COUNTED, *BATCHES), NUMBERS["size"]),
    "pp": NUMBERS["stages"],
    **dict.fromkeys(("inter_node_GBps", "inter_node_Gbps_per_node"), NUMBERS["network"]),
    **dict.fromkeys(WORDS, (str, None)),
    **dict.fromkeys(("order", "offload", "overlap", "distributed_optimizer"), (str, None)),
    **dict.fromkeys(
        ("mla", "sequence_parallel", "async_tp", "compile", "overlap_grad_reduce"), (bool, None)
    ),
}
EITHER = {"zero": (0, 1, 2, 3), "virtual_pp": range(1, 1001)}  # a number of these, or words
BESIDE: dict[str, tuple[Any, ...]] = {  # empty: whatever it says
    "model": (),  # a name
    "system": (),
    "from_config": (),
    "inferred": (),  # says whether memory can be compared: room.py
    "params": (),  # follow from sizes
    "first_last_stage": (),
    "batch_per_dp": (),  # follow from batches
    "tokens_per_batch": (),
    "grad_accum": (),
    "peak_tflops": (),  # follow from the device
    "hbm_gb": (),
    "nvlink_GBps_uni": (),
    "link": (),
    "dp_impl": (),  # follows from the generation of the software
    "mp_mode": (),  # changes states, of which such rows measure nothing
    "attention": ("FA2",),
    "fsdp": (0,),
    "task": ("pretrain",),
}


def check_row(row: Any) -> None:
    """Raise LeftOut unless a row has the fields of a row, each of its kind."""
    if not isinstance(row, dict):
        raise LeftOut(f"{shown(row)} is not a row with id, source, kind, config and measured")
    with retold(LeftOut, FileError, before="it "):
        check_values(row)
    for name in ("id", "measured"):
        if row.get(name) is None:
            raise LeftOut(f"it has no {name}")
    for name, value in row.items():
        if name in ROW and value is not None:
            _check(name, value, ROW)
        elif name not in ROW and name not in ROW_BESIDE:
            raise LeftOut(f"it has {name}, a field that no prediction reads")


def read_config(config: PublishedRow) -> PublishedRow:
    """Return a configuration with every number of its kind.

    Raise LeftOut for what predictions do not know.
    """
    found: PublishedRow = {}
    for name, value in config.items():
        if name not in READ and name not in EITHER and name not in BESIDE:
            raise LeftOut(f"it has {name}, a field that no prediction reads")
        if value is None or name not in READ:
            found[name] = value
        else:
            found[name] = _check(name, value, READ)
        if value is not None and name in EITHER and not _either(value, EITHER[name]):
            raise LeftOut(f"it has {name} = {shown(value)}, which no prediction knows")
        if value is not None and BESIDE.get(name) and not _either(value, BESIDE[name], words=False):
            raise LeftOut(f"it has {name} = {shown(value)}, which no prediction models")
    return found


def _either(value: Any, known: Iterable[Any], words: bool = True) -> bool:
    """Tell whether a value is among the known ones, or in words if words will do. True is not 1."""
    if words and type(value) is str:
        return True
    return any(type(each) is type(value) and each == value for each in known)


def _check(name: str, value: Any, ranges: Ranges) -> Any:
    """Return a value of its kind; 1.0, which JSON may have for a whole number, as 1."""
    kind, limit = ranges[name]
    integral = kind is int and type(value) is float and value.is_integer()
    with retold(LeftOut, ValueError, before=f"it has {name} = {shown(value)}, which "):
        return typed(int(value) if integral else value, kind, limit)
