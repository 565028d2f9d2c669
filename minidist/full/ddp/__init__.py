"""Data parallelism: every rank has a full model and a part of the batch.

    the book                  here
    reduce_gradients          `reduce_gradients` (`after_backward.py`); of experts only copies are summed
    partition                 `Reducer.__init__`; buckets are flat tensors in registered memory (`FlatBucket`)
    take_gradients            `_gradient_arrived`: from then on the gradient is a view into its bucket
    mark_ready                `Bucket.mark_ready`; `launch_ready` calls `DDP.launch` for each full bucket
    finish                    `_backward_ended`: launches what is left, and waits for all

Read `minidist/ddp.py` first: buckets of gradients are summed after backward, or while it runs.
`after_backward.py` applies the first to a model: naive, with a server, or in buckets. Then read
`data_parallel.py`, the second. DDP *has* a `Reducer` (`reducer.py`), which says which bucket is
launched next, and this has buckets (`buckets.py`), each filling, launched or done.

`strategy.py` is what all strategies share: a model that is wrapped, and the gradients that must
come. `backward.py` has the hooks on backward, `flatten.py` lays tensors end to end, `replicas.py`
makes the ranks equal at the start, and `sampler.py` deals out the samples.

`options.py` has what a user can ask for, of `zero/` and `fsdp/` too; classes that are used without a recipe
have defaults of their own. To change which gradients share a bucket, see `partition` (`buckets.py`);
in which order they are dealt out, `Reducer.__init__`. `compress/` sends them in fewer bytes.
"""
