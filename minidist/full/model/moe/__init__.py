"""A mixture of experts in place of an MLP: a router sends each token to the k best of E experts.

    the book                  here
    route                     `router_logits`, `choose` and `weights_of` (`router.py`)
    mixture                   `RoutedExperts` (`routed.py`), which sorts tokens by expert (`combine`)
    expert(x)                 `Experts`: E matrices are one parameter, and one product computes them all
    balance_loss              `balance_loss` (`losses.py`), which `Attach` hangs on the weights
    rebalance                 `rebalance` (`balance.py`), by the load of all ranks

Read `minidist/moe.py` first: a loop over experts. `routed.py` is the layer that trains, which
calls the rest in this order: `router.py` scores, chooses and weighs; `capacity.py` says which
choices find room; `losses.py` hangs the router's losses on the weights; `combine.py` sorts tokens
by expert and adds up what `experts.py` makes of them. After a step, `balance.py` moves the biases.

Letters at the end of a name are the tensor's dimensions, as in `scores_BTE`: B sequences, T tokens
of each, k choices of a token (K), E experts, D channels; N = B T tokens, M rows that are sent.
"""
