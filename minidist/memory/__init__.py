"""Floor 4: where the memory goes, and what breaks the wall: recomputing, lower precision, offloading, adapters."""
