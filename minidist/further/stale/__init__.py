"""Weights of different age: nobody waits, and gradients are those of older weights.

    BSP   bulk-synchronous        all wait for each other in every step: gradients are those of the weights
    SSP   stale-synchronous       nobody is more than s steps ahead: gradients are at most s steps old
    ASP   asynchronous            nobody waits: gradients have any age (s without a limit)

Read `train_delayed` of `minidist/slow_wires.py` first: what all of these compute, on one rank.
`server.py` is a parameter server that may be stale, `plans.py` has the plans of pipelines that are
never flushed, with the version of the weights that each forward uses, and `pipeline.py` carries
them out. (Valiant 1990; Ho et al. 2013, SSP; Narayanan et al. 2019, PipeDream.)

The plan of a pipeline says all that happens, so these pipelines are run as they are told, over a
whole list of batches; they are not options of the trainer, whose steps begin and end together.
"""
