"""From files to tokens, piece by piece: a text may be larger than memory.

    the book              here
    read_text             `read_corpus` (`text.py`): files of several kinds, in pieces
    tokens                `TokenFile` (`token_file.py`)
    Batches               `Samples` (`text.py`), which `full/trainer/` deals out
    Share                 `share` (`full/ddp/sampler.py`)

    files, folders ──sources.py──▶ pieces of text ──text.py──▶ tokens ──token_file.py──▶ one long array

Read `minidist/data.py` first, then `text.py`. `sources.py` reads plain text, `.jsonl` and
`.parquet`; `tokenizers.py` turns text into tokens and back; `token_file.py` keeps tokens in memory,
or many in a file; `packed.py` packs documents into rows. `options.py` has what a user can ask for,
and `files.py` reads and checks any file from elsewhere. What is held at a time is a piece of text
with its tokens, and at most `IN_MEMORY` bytes of tokens more.
"""
