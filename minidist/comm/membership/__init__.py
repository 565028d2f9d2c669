"""Who belongs to a job that goes on when ranks are lost: views, a quorum, and those who wait outside.

    view 1   0 1 2 3      each of these is a member; its place in the view is its rank
                  ✗       member 2 is lost: 0, 1 and 3 leave the view, and meet at the store
    view 2   0 1 4 3      member 4 was waiting there, and takes the place

Read `agreement.py`, which decides and sends nothing; `store.py`, a few texts that all members can
read; `member.py`, how a member comes into a view, and leaves it; then `simulated.py`, where members
are threads. Members that are processes are in `comm/torch_wire/`.
"""
