"""Sites that a slow wire joins: each trains a replica of its own, and now and then they meet.

    a step       inside a site: everything that the other axes do, and the optimizer's step
    every H      between sites: what H steps have changed is averaged, and an outer optimizer takes it

Read `plain.py` first: local SGD and DiLoCo on a page, all of the model at once. `outer.py` does the
same in fragments, beside the training, for slices and masters.
`strategy.py` joins it to the other strategies, and `options.py` has what a user can ask for.
"""
