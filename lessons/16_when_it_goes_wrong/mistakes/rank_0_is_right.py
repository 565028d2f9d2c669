# task 1: compares with rank 0, so if rank 0 is the odd one, all others are blamed.
from solution import *  # noqa: F403
from solution import digest, from_all


def odd_ranks(words, comm):
    answers = from_all([digest(words.encode())], comm)[:, 0].tolist()
    return [rank for rank, answer in enumerate(answers) if answer != answers[0]]
