"""Data parallelism: every rank has a full model and a part of the batch.

Read `plain.py` first: it sums buckets of gradients after backward. `after_backward.py` applies it
to a model: naive, with a server, or in buckets. Then read `data_parallel.py`: DDP sums the buckets
while backward still runs. It *has* a `Reducer` (`reducer.py`), which says which bucket is launched
next, and this has buckets (`buckets.py`), each filling, launched or done.

`strategy.py` is what all strategies share: a model that is wrapped, and the gradients that must
come. `backward.py` has the hooks on backward, `flatten.py` lays tensors end to end, `replicas.py`
makes the ranks equal at the start, and `sampler.py` deals out the samples.

`options.py` has what a user can ask for, of `zero/` and `fsdp/` too; classes that are used without a recipe
have defaults of their own. To change which gradients share a bucket, see `partition` (`buckets.py`);
in which order they are dealt out, `Reducer.__init__`. `compress/` sends them in fewer bytes.
"""
