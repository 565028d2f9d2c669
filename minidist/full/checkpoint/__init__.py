"""Sharded checkpoints: every rank writes its own pieces, and any layout of ranks reads them.

    the book                  here
    Piece                     `Piece` with an `Extent` (`pieces.py`): also of single numbers, and of no elements
    make .unfinished          `begin` (`store.py`)
    write, flush its pieces   `write_shard`: a file of safetensors, with a checksum
    rename                    `commit`: with an index, so that a rank reads no more than it needs
    load                      `read` (`restore.py`): nothing is changed if a file is damaged
    newest                    `complete` and `newest` (`store.py`)

Read `minidist/checkpoint.py` first, then `pieces.py`, `store.py` and `index.py` (what lies on the
disk: the folder, and the only code that writes or reads the format of the index), `saving.py` and
`restore.py`. `cadence.py` says how often to save, `lock.py` why no two runs share a folder. In
addition to parameters and optimizer, what the `state` of each strategy names is kept (scales of 8
bits, biases of routers); `remembered.py` has what ranks hold each for itself, such as gradients
that were not sent yet.
"""
