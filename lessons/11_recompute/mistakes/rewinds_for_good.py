# task 3: sets the generator back and leaves it there: what is drawn next has been drawn before.
from solution import *  # noqa: F403
from solution import recompute


def checkpoint_random(block, x, generator):
    before = generator.get_state()

    def rewound(x):
        generator.set_state(before)
        return block(x)

    return recompute.checkpoint(rewound, x, block.parameters())
