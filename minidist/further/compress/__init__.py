"""More ways to compress gradients than top-k: each an algorithm of its own, for the buckets of
`CompressedDDP`.

    powersgd:4     two factors of 4 columns in place of each matrix                 `power_sgd.py`
    int8           every element, in 8 bits                                         `int8.py`
    1bit           every element's sign                                             `one_bit.py`

`options.py` makes of what a user asks for what compresses.
"""
