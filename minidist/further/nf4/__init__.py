"""NF4: frozen weights in four bits each, beside adapters.

Read `nf4.py`, which rounds and restores a tensor, then `qlora.py`: a layer that is stored so.
`strategy.py` puts it in the place of LoRA, and `options.py` has what a user can ask for.
"""
