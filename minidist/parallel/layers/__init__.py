"""What a rank does with its own layers, without any other rank.

`adapters.py`, `float8.py` and `recomputation.py` say when `parallelize` applies what `memory/` has;
`compiled.py` compiles the forwards of blocks. `blocks.py` says what a model's blocks are, and
`options.py` has what a user can ask for.
"""
