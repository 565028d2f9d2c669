"""What a rank does with its own layers, without any other rank.

`adapters.py`, `float8.py` and `recomputation.py` say when `parallelize` applies what `memory/` has;
`autocast.py` runs forwards under torch's autocast, and `compiled.py` compiles those of blocks.
`blocks.py` says what a model's blocks are, and `options.py` has what a user can ask for.
"""
