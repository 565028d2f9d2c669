"""Floor 6: the grader of the course. It sees how an answer works, not only that the sum is right.

    python -m minidist grade 02
        │   contract.py   what a lesson's checks.py is made of: tasks, checks, cases
        ├── runner.py ──▶ child.py      a process of its own per case (forked by warm.py's): runs the student's code
        │                    │          on every rank; witness.py notes each message, watch.py each call, and who led
        │                    │          to it
        │   ◀── record.py ───┘          data only: arrays, notes, an error; nothing that could run here
        ├── grading.py    the parent computes the right answer; compare.py says what a wrong one looks like; points
        └── report.py     table, json, junit, gradescope

`calls.py` is for lessons that cut layers: it tells which collectives an answer calls. `hang.py`
says where each rank stood when the time was up. What a lesson is, and which file is graded, stands
in `minidist/course/lesson.py`.

What a student's process hands back is data. It counts only if it is signed with the nonce of its
rank, which the child read from a file and deleted before it loaded the student's code. So printed
text, exit statuses and files that the student writes are worth nothing, and a rank that ends early
leaves no record and fails the case. Whatever that process patches (numpy, the checks, this package)
is patched in that process only.

What remains possible, because nothing within Python prevents it:

- Student code runs in the same process as the witness. An answer that walks through the
  interpreter's memory (frames, `gc`) can find the nonce and the list of notes, and invent both; a
  record that is right in every buffer and count is believed. The child compares this package with
  what it was before the student's code came, and the wire's own count of messages with the
  witness's. Both catch the careless, but not an answer that puts everything back.
- Simulated ranks share one process. Each has its own copy of the answer's module, but an answer can
  move data through an attribute of some other object, and send buffers of the right size beside it.
  The confirmation under `mpirun` prevents that, except through files, pipes or shared memory.
- Copied source looks like a student's own, and so does what another process of the student
  computes.
- The process has the rights of whoever started the grader. It can delete or overwrite that user's
  files, this package among them, and kill the grader. Where that matters, grade as root in a
  container without a network and say `--user student`: student code then runs as somebody who may
  write nothing but its temporary folder.
"""
