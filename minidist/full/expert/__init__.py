"""Expert parallelism: every rank has some of the experts, and tokens travel to theirs and back.

    the book                  here
    counts                    `Route` (`dispatch.py`): the counts, and from them the order of the rows on each leg
    travel                    `Route.there`, which ends by sorting the rows by expert
    experts                   one call for all senders: `Experts` (`full/model/moe/experts.py`)
    travel, back              `Route.back`: each leg undone, the last one first
    mixture_across            `RoutedExperts`, after `parallelize_experts`

Read `minidist/expert.py` first, and `minidist/full/model/moe/`. Then `dispatch.py`: one product for
each expert, fewer messages between nodes, and rows in 8 bits. `expert_parallel.py` applies it to a
serial model from outside, and says what a checkpoint keeps of experts beside parameters
(`ExpertParallelism.state`). `options.py` has what a user can ask for.
"""
