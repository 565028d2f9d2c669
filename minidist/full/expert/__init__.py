"""Expert parallelism: every rank has some of the experts, and tokens travel to theirs and back.

Read `plain.py`, one page, with `minidist/full/model/moe/`. Then `dispatch.py`: one product for each
expert, fewer messages between nodes, and rows in 8 bits. `expert_parallel.py` applies it to a
serial model from outside, and says what a checkpoint keeps of experts beside parameters
(`ExpertParallelism.state`). `options.py` has what a user can ask for.
"""
