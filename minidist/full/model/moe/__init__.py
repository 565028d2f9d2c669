"""A mixture of experts in place of an MLP: a router sends each token to the k best of E experts.

Read `plain.py` first: one page, a loop over experts. `routed.py` is the layer that trains, which
calls the rest in this order: `router.py` scores, chooses and weighs; `capacity.py` says which
choices find room; `losses.py` hangs the router's losses on the weights; `combine.py` sorts tokens
by expert and adds up what `experts.py` makes of them. After a step, `balance.py` moves the biases.

Letters at the end of a name are the tensor's dimensions, as in `scores_BTE`: B sequences, T tokens
of each, k choices of a token (K), E experts, D channels; N = B T tokens, M rows that are sent.
"""
