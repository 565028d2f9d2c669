"""The option of adapters beside weights in four bits."""

from dataclasses import dataclass

from minidist.full.layers.options import FOLDER, AdapterOptions
from minidist.full.options import option


@dataclass(frozen=True)
class QLoRAOptions(AdapterOptions):
    """Adapters, and in which form the matrices beside them are stored.

    Attributes
    ----------
    qlora : bool
        With `lora`: store the matrices beside the adapters in NF4; see `add_qlora`.
    """

    qlora: bool = option(
        False,
        "with --init: adapters (of --lora, or rank 8) beside matrices stored in 4 bits",
        needs=FOLDER,
    )

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0: none."""
        return self.lora or 8 * self.qlora


def in_four_bits(options: AdapterOptions) -> bool:
    """Tell whether options ask for matrices in four bits."""
    return isinstance(options, QLoRAOptions) and options.qlora
