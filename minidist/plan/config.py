"""The sizes of a model as a file says them: a Hugging Face config.json, or a TOML of ours.

`names.toml` has what each size is called, and which kinds of models are planned. What a size alone
does not say is here: heads of Falcon, windows of some layers, heads of latent attention.
"""

from collections.abc import Callable
from typing import Any

from minidist.full.data.files import FileError, at
from minidist.full.launch.parser import nearest
from minidist.full.options import FRACTION, shown
from minidist.plan.device import ranges, table

Tree = dict[str, Any]

NEEDED = ("heads", "hidden", "layers", "vocabulary")
DERIVED = ("kv", "ffn", "head_dim")  # in a TOML of ours a 0 says that others decide it
SAID = ("model_type", "layer_types")  # beside sizes, of which every file may say more


def sizes_of(tree: Tree) -> Tree:
    """Return the fields of `Model` that a file says, whatever it calls them.

    Raises
    ------
    FileError
        If a size is missing or impossible, or there is no plan for this kind of layer.
    """
    names = table("names")
    family = at(tree, "model_type", kind=str, default="")
    check_family(tree, family)  # first: other advice would not help one that is not planned
    sizes = said_of(tree)
    if sizes.get("latent") and tree.get("v_head_dim"):  # head_dim may be that of rotary channels
        sizes["head_dim"] = size(tree, "v_head_dim", "head_dim")
    if sizes.get("dense_layers") and "dense_ffn" not in sizes:
        sizes["dense_ffn"] = size(tree, "intermediate_size", "ffn")
    check_layers(tree, sizes)
    unsaid: Tree = names["unsaid"].get(family, {})
    sizes = unsaid | sizes
    if family in PARTICULAR:
        sizes |= PARTICULAR[family](tree, sizes)
    if missing := [name for name in NEEDED if name not in sizes]:
        raise FileError(f"does not say {', '.join(missing)}: give a model's config.json or TOML")
    usual: Tree = {}
    if family in names["ungated"]["names"]:
        usual = {"gated": False, "tied": True}
    return usual | sizes | windows(tree, sizes)


def check_known(tree: Tree) -> None:
    """Raise FileError for a key that no model has, and that would be left unread in silence: a
    TOML of ours is written by hand.
    """
    names = table("names")
    known = {*ranges("model"), *SAID, *names["unplanned"]["names"]}
    for ours in ranges("model"):
        known.update(names.get(ours, {"names": []})["names"])
    for key in tree:
        if key not in known:
            meant = nearest(key, sorted(known)) or "leave it out"
            raise FileError(f"has an unknown key {key}: {meant}")


def said_of(tree: Tree) -> Tree:
    """Return the sizes that have one of their names in a file."""
    names = table("names")
    sizes: Tree = {}
    for ours, (kind, limit) in ranges("model").items():
        said = [
            name
            for name in (ours, *names.get(ours, {"names": []})["names"])
            if tree.get(name) is not None
        ]
        if said and ours == "dropout":  # files say how much
            sizes[ours] = at(tree, said[0], kind=float, limit=FRACTION) > 0
        elif said:
            sizes[ours] = at(tree, said[0], kind=kind, limit=limit)
            if ours in DERIVED and sizes[ours] == 0 and "model_type" in tree:
                raise FileError(f"has {said[0]} = 0, which must be at least 1")
    return sizes


def size(tree: Tree, name: str, ours: str) -> Any:
    """Return the value of a name that has the range of one of our sizes."""
    kind, limit = ranges("model")[ours]
    return at(tree, name, kind=kind, limit=limit)


def check_layers(tree: Tree, sizes: Tree) -> None:
    """Raise FileError if some layers are of a kind that is not modelled."""
    unknown = [name for name in table("names")["refused"]["names"] if tree.get(name)]
    others = set(at(tree, "layer_types", kind=list, default=[]))
    if others - {"full_attention", "sliding_attention"}:
        unknown.append("layer_types")
    alone = {
        "moe_layer_freq": 1,  # else there are layers without experts among others
        "decoder_sparse_step": 1,
        "qk_nope_head_dim": sizes.get("head_dim"),  # else values are as wide as no key
        "word_embed_proj_dim": sizes.get(
            "hidden"
        ),  # else the embedding is narrower than the layers
    }
    unknown += [name for name, value in alone.items() if tree.get(name) not in (None, value)]
    if unknown:
        raise FileError(
            f"has {', '.join(unknown)}, which no plan is made for: leave that out for an estimate"
        )


def check_family(tree: Tree, family: str) -> None:
    """Raise FileError if there is no plan for this kind of model."""
    known = (*table("names")["gated"]["names"], *table("names")["ungated"]["names"])
    if family in ("", *known):
        return
    alone, part = "", tree.get("text_config")
    if isinstance(part, dict) and part.get("model_type") in known:
        alone = "; of several parts, the text_config may be one if it is in a file of its own"
    raise FileError(
        f"has model_type = {shown(family)}, which no plan is made for: there are plans for "
        f"{', '.join(known)}{alone}"
    )


def windows(tree: Tree, sizes: Tree) -> Tree:
    """Return how many layers have no window, and that there is none where that is all of them."""
    kinds = at(tree, "layer_types", kind=list, default=[])
    if kinds and len(kinds) != sizes["layers"]:
        raise FileError(
            f"has {len(kinds)} layer_types for {sizes['layers']} layers: give one for each"
        )
    sliding = at(tree, "use_sliding_window", kind=bool, default=True)
    if not sliding or (kinds and not sizes.get("window")):
        return {"window": 0, "unwindowed": 0}
    if kinds:
        whole = kinds.count("full_attention")
    elif sizes.get("window") and "max_window_layers" in tree:  # Qwen's first layers have none
        whole = size(tree, "max_window_layers", "unwindowed")
    else:
        return {}
    return {"unwindowed": whole} if whole < sizes["layers"] else {"window": 0, "unwindowed": 0}


# ---------------------------------------------------------------- models with words of their own


def falcon(tree: Tree, sizes: Tree) -> Tree:
    """Return what only Falcon says: in the first of its architectures all heads share one key."""
    if at(tree, "new_decoder_architecture", kind=bool, default=False):
        return {"parallel": True}
    return {"kv": 1 if at(tree, "multi_query", kind=bool, default=True) else 0}


def mpt(tree: Tree, sizes: Tree) -> Tree:
    """Return what only MPT says: channels as a multiple of `d_model`, and keys in a section."""
    wide = size(tree, "expansion_ratio", "ffn") if "expansion_ratio" in tree else 4
    found = {"ffn": wide * sizes.get("hidden", 0)}
    attention = at(tree, "attn_config", kind=dict, default={})
    if at(attention, "attn_type", kind=str, default="") == "multiquery_attention":
        return found | {"kv": 1}
    return found | {"kv": at(attention, "kv_n_heads", kind=int, default=0)}


PARTICULAR: dict[str, Callable[[Tree, Tree], Tree]] = {"falcon": falcon, "mpt": mpt}
