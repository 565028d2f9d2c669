"""Who belongs to a job that goes on when ranks are lost: views, a quorum, and those who wait outside.

    view 1   0 1 2 3      each of these is a member; its place in the view is its rank
                  ✗       member 2 is lost: 0, 1 and 3 leave the view, and meet at the store
    view 2   0 1 4 3      member 4 was waiting there, and takes the place

Read `agreement.py`, which decides and sends nothing; `store.py`, a few texts that all members can
read; `member.py`, how a member comes into a view, and leaves it; then `simulated.py`, where members
are threads. Members that are processes are in `full/comm/torch_wire/`.

A program of one's own, in which all ranks hold the same:

    def program(member):
        done, weights = 0, np.zeros(4)
        while (comm := member.enter(done)) is not None:  # None: the others have finished the job
            try:
                held = comm.all_gather_object((done, weights.copy()))
                done, weights = max(held, key=lambda pair: pair[0])  # of whoever is furthest
                while done < 100:
                    gradient = np.ones(4)
                    all_reduce(gradient, comm, op="mean")
                    weights, done = weights + gradient, done + 1
                member.finish()
                return weights
            except RankFailed as error:
                member.lost(str(error))

    run_members(program, ranks=3, spares=1)     # threads
    program(this_member())                      # a process of `launch --replace`: see `torch_member.py`
"""
