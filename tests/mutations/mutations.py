"""Slips that nobody may make unseen: what to break in the package, and the tests that must then
turn red.

Each is one that a good programmer makes on a tired evening: off by one, a wait left out, a sum for
a mean, the wrong rank, a view for a copy, a check skipped, a rule ignored. `run.py` makes them, one
at a time; `make mutants` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A slip: in `file`, `new` stands in place of `old`; at least one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def broken(self, whole: str) -> str:
        """Return the file with the slip in it. Raises ValueError unless `old` stands there exactly
        once.
        """
        if (count := whole.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: {self.file} must have this once, but has it {count} "
                f"times:\n{self.old}"
            )
        return whole.replace(self.old, self.new)


# ---------------------------------------------------------------- floor 0: trace

TRACE = [
    Mutation(
        "a moment that two events cover counts twice",
        "minidist/draw/table.py",
        old="total += end - max(start, reached)",
        new="total += end - start",
        tests=("tests/trace/test_trace.py::test_covered_counts_each_moment_once",),
    ),
    Mutation(
        "a message posted ahead counts as waited for all along",
        "minidist/draw/table.py",
        old="return event.start if event.waited_from is None else event.waited_from",
        new="return event.start",
        tests=(
            "tests/trace/test_trace.py::test_a_message_posted_ahead_is_overlapped_until_it_is_waited_for",
        ),
    ),
    Mutation(
        "the arrow of a receive that was posted early runs back in time",
        "minidist/draw/perfetto.py",
        old="arriving = max(start, _nanoseconds(sent - begin))",
        new="arriving = start",
        tests=(
            "tests/trace/test_trace.py::test_a_receive_posted_early_shows_when_its_message_was_sent",
        ),
    ),
    Mutation(
        "slices of one row may cross",
        "minidist/draw/perfetto.py",
        old="if not ends or (may_nest and event.end <= ends[-1]):",
        new="if not ends or may_nest:",
        tests=("tests/trace/test_trace.py::test_spans_that_cross_lie_in_two_rows",),
    ),
    Mutation(
        "every rank gathers the events of all that share its trace",
        "minidist/draw/gather_trace.py",
        old="[event for event in comm.trace.events if event.rank == me]",
        new="list(comm.trace.events)",
        tests=("tests/trace/test_trace.py::test_gathering_a_shared_trace_doubles_nothing",),
    ),
]

# ---------------------------------------------------------------- floor 1: ranks and messages

COMM = [
    Mutation(
        "an incoming port takes two messages at once",
        "minidist/full/comm/threads_wire/lanes.py",
        old=(
            "starts = max(\n                        self.met, 0.0 if self.eager else self.posted, "
            "self.lane.incoming_free\n                    )"
        ),
        new="starts = max(self.met, 0.0 if self.eager else self.posted)",
        tests=(
            "tests/comm/test_clock.py::test_an_incoming_port_takes_one_message_after_the_other",
        ),
    ),
    Mutation(
        "an outgoing port is free while it sends",
        "minidist/full/comm/threads_wire/world.py",
        old="lane.outgoing_free = operation.departs + link.seconds(bytes)",
        new="lane.outgoing_free = operation.departs",
        tests=(
            "tests/comm/test_clock.py::"
            "test_an_outgoing_port_sends_one_message_after_the_other_and_both_directions_go_at_once",
        ),
    ),
    Mutation(
        "a message arrives without latency",
        "minidist/full/comm/threads_wire/lanes.py",
        old="self.completed = starts + seconds + link.latency",
        new="self.completed = starts + seconds",
        tests=("tests/comm/test_clock.py::test_a_message_takes_latency_plus_bytes_over_bandwidth",),
    ),
    Mutation(
        "a message takes the link of another pair of ranks",
        "minidist/full/comm/threads_wire/cluster.py",
        old="return self.inside if self.node_of(sender) == self.node_of(receiver) else self.across",
        new="return self.inside if abs(sender - receiver) < (self.ranks_per_node or sender + 1) "
        "else self.across",
        tests=("tests/comm/test_clock.py::test_clusters_have_the_bandwidths_they_promise",),
    ),
    Mutation(
        "an eager message is a view of the sender's buffer",
        "minidist/full/comm/threads_wire/world.py",
        old="operation.array = _snapshot(array)",
        new="operation.array = array",
        tests=(
            "tests/comm/test_threads.py::test_sends_wait_for_their_receive_however_small_unless_they_are_eager",
        ),
    ),
    Mutation(
        "a rank that runs counts as stuck",
        "minidist/full/comm/threads_wire/carriers/threads.py",
        old="            if thread.is_alive():\n                return True",
        new="            if False:\n                return True",
        tests=("tests/comm/test_deadlock.py::test_random_legal_programs_pass",),
    ),
    Mutation(
        "a stream without work counts as stuck",
        "minidist/full/comm/threads_wire/world.py",
        old="waiting = [lane for lane in lanes if lane.awaits is not None and not lane.idle]",
        new="waiting = [lane for lane in lanes if lane.awaits is not None]",
        tests=(
            "tests/comm/test_streams.py::test_a_stream_that_outlives_its_run_without_work_is_no_deadlock",
        ),
    ),
    Mutation(
        "the cycle of a deadlock has ranks in it that only wait for the cycle",
        "minidist/full/comm/threads_wire/standstill.py",
        old="chain = [*chain[chain.index(peer) :], peer]",
        new="chain = [*chain, peer]",
        tests=("tests/comm/test_deadlock.py::test_a_cycle_that_not_all_ranks_are_in",),
    ),
    Mutation(
        "a report names the line of the package instead of its caller's",
        "minidist/full/comm/report.py",
        old="while frame is not None and not of_a_user(frame.f_code.co_filename):",
        new='while frame is not None and _folder(frame) == "":',
        tests=("tests/comm/test_deadlock.py::test_the_line_named_is_the_callers_own",),
    ),
    Mutation(
        "a rank that waits for its own stream's work is accused",
        "minidist/full/comm/threads_wire/world.py",
        old="return lane.awaits is not None and not lane.idle and waits_for(lane)[1] != lane.rank",
        new="return lane.awaits is not None and not lane.idle",
        tests=("tests/comm/test_limit.py::test_computing_longer_than_the_limit_is_no_fault",),
    ),
    Mutation(
        "whoever is woken goes on next, whatever the seed",
        "minidist/full/comm/threads_wire/carriers/cooperative.py",
        old="place = int(self.draw() * len(ready))",
        new="place = len(ready) - 1",
        tests=(
            "tests/comm/test_cooperative.py::"
            "test_every_engine_on_which_ranks_take_turns_gives_the_same"
            "[a_seed_makes_an_interleaving]",
        ),
    ),
    Mutation(
        "a job that is killed leaves MPI's segment",
        "minidist/full/comm/mpi_wire/mpi_wire.py",
        old="        take_names_away()",
        new="        pass",
        tests=(
            "tests/comm/test_segment.py::test_a_job_under_a_bare_mpirun_leaves_no_segment_however_it_ends",
        ),
    ),
    Mutation(
        "a segment that a process has open, and maps no more, is taken for a dead job's",
        "minidist/full/comm/mpi_wire/segment.py",
        old='used.add(Path(os.readlink(process / "fd" / descriptor)))',
        new='os.readlink(process / "fd" / descriptor)',
        tests=("tests/comm/test_segment.py::test_a_segment_that_somebody_uses_stays",),
    ),
    Mutation(
        "the first fence waits behind the watchdog's back",
        "minidist/full/comm/mpi_wire/mpi_wire.py",
        old='status.awaiting(Awaited("the first fence", self.members), self.clock())',
        new='Status().awaiting(Awaited("the first fence", self.members), self.clock())',
        tests=(
            "tests/comm/test_faults_mpi.py::test_a_fault_ends_the_job[a rank asleep before its "
            "first backward]",
        ),
    ),
    Mutation(
        "a read-only buffer may receive",
        "minidist/full/comm/communicator.py",
        old='return flatten(buffer, writable=role == "source")',
        new="return flatten(buffer)",
        tests=("tests/comm/test_buffers.py::test_what_would_be_overwritten_is_refused",),
    ),
    Mutation(
        "a vector counts as contiguous whatever its stride",
        "minidist/full/comm/buffers.py",
        old="or not flat.is_contiguous():",
        new="or (flat.dim() > 1 and not flat.is_contiguous()):",
        tests=(
            "tests/comm/test_buffers.py::test_what_is_not_a_buffer_is_refused[an expanded tensor]",
        ),
    ),
    Mutation(
        "a collective's messages go on tags that users have",
        "minidist/full/comm/communicator.py",
        old="twin.tag_offset = TAGS",
        new="twin.tag_offset = 0",
        tests=(
            "tests/collectives/test_collectives.py::test_a_users_messages_never_mix_with_a_collectives",
        ),
    ),
    Mutation(
        "both ends of a message of a collective are named after the user's",
        "minidist/full/comm/request.py",
        old="key = (*ends, tag + comm.tag_offset)",
        new="key = (*ends, tag)",
        tests=(
            "tests/trace/test_trace.py::test_ends_pair_in_the_order_of_posting_whatever_is_waited_for_first",
        ),
    ),
    Mutation(
        "the barrier leaves out its last round",
        "minidist/full/comm/communicator.py",
        old="while distance < self.size:",
        new="while 2 * distance < self.size:",
        tests=(
            "tests/collectives/test_collective_bytes.py::test_a_barrier_sends_empty_messages[3]",
        ),
    ),
    Mutation(
        "a split ignores the key",
        "minidist/full/comm/wire.py",
        old="for chosen, _, rank in sorted(answers):",
        new="for chosen, _, rank in answers:",
        tests=("tests/comm/test_threads.py::test_split_groups_by_color_in_the_order_of_keys",),
    ),
    Mutation(
        "a group is taken again while another rank still holds it",
        "minidist/full/comm/engine/pool.py",
        old="if all(everyones[rank].get(n) == part for rank in part)",
        new="if everyones[part[0]].get(n) == part",
        tests=(
            "tests/comm/test_lifetimes.py::test_a_group_is_taken_again_once_all_its_ranks_have_forgotten_it",
        ),
    ),
    Mutation(
        "a stream does the latest work first",
        "minidist/full/comm/stream.py",
        old="job = jobs.popleft()",
        new="job = jobs.pop()",
        tests=(
            "tests/comm/test_streams.py::test_a_stream_runs_its_work_in_order_and_hands_back_results",
        ),
    ),
    Mutation(
        "a stream begins before the work was launched",
        "minidist/full/comm/stream.py",
        old="        comm.advance(max(0.0, job.launched - comm.clock()))\n",
        new="",
        tests=(
            "tests/comm/test_streams.py::test_a_stream_starts_at_the_later_of_its_own_time_and_its_launchers",
        ),
    ),
    Mutation(
        "an error of a stream's work is kept to itself",
        "minidist/full/comm/stream.py",
        old="        if self.error is not None:\n            self.comm.fail(self.error)\n",
        new="",
        tests=("tests/comm/test_streams.py::test_an_error_that_nobody_waits_for_ends_the_run_too",),
    ),
    Mutation(
        "what a stream waits for is the main thread's communication",
        "minidist/full/comm/ledger.py",
        old="if self._origin is not None and not self._other_thread:",
        new="if self._origin is not None:",
        tests=(
            "tests/comm/test_streams.py::"
            "test_what_a_stream_does_meanwhile_is_not_counted_as_the_main_threads_communication",
        ),
    ),
    Mutation(
        "what a stream does is not marked for profilers",
        "minidist/full/comm/ledger.py",
        old="status=Status(), flows=Counter())",
        new="status=Status(), flows=Counter(), mark=None)",
        tests=("tests/trainer/test_profile.py::test_every_span_of_every_thread_is_an_nvtx_range",),
    ),
    Mutation(
        "a range is made although nobody profiles",
        "minidist/full/comm/torch_wire/marks.py",
        old="profiler.record_function(name) if profiler._is_profiler_enabled else None",
        new="profiler.record_function(name)",
        tests=("tests/trainer/test_profile.py::test_while_nobody_profiles_no_range_is_made",),
    ),
    Mutation(
        "debug mode does not look at arguments with a name",
        "minidist/full/comm/agree.py",
        old=(
            "[_word(detail) for detail in details] + [\n"
            '        f"{name}={_word(detail)}" for name, detail in named.items()\n'
            "    ]"
        ),
        new="[_word(detail) for detail in details]",
        tests=(
            "tests/comm/test_mismatch.py::test_debug_mode_names_what_differs_on_every_rank[root]",
        ),
    ),
    Mutation(
        "a watchdog takes a rank that has finished for one that computes",
        "minidist/full/comm/job/watchdog.py",
        old="gone = [rank for rank in self._awaited(status) if self.answers.get(rank) == FINISHED]",
        new="gone = [rank for rank in self._awaited(status) if rank in self.answers and "
        "self.finished]",
        tests=(
            "tests/comm/test_faults_mpi.py::"
            "test_a_fault_ends_the_job[a roll call that never ends, found before the limit]",
        ),
    ),
    Mutation(
        "true is read as the number 1",
        "minidist/full/options.py",
        old="if isinstance(written, bool) or not isinstance(",
        new="if not isinstance(",
        tests=("tests/test_odd_values.py::test_numbers",),
    ),
    Mutation(
        "a number that is not a number is read as one",
        "minidist/full/options.py",
        old="    if number != number:\n        raise ValueError(wrong)\n",
        new="",
        tests=("tests/test_odd_values.py::test_numbers",),
    ),
    Mutation(
        "neighbours take turns over the GPUs that they share",
        "minidist/full/comm/torch_wire/gpus.py",
        old="return local // each",
        new="return local % gpus",
        tests=("tests/comm/test_gpus.py::test_rank_r_takes_gpu_r_divided_by_the_ranks_of_each",),
    ),
    Mutation(
        "the NCCL that torch was built for is asked, not the one that is loaded",
        "minidist/full/comm/torch_wire/gpus.py",
        old='ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)',
        new='ctypes.CDLL("libnccl.so.of-torch", mode=os.RTLD_NOLOAD)',
        tests=(
            "tests/comm/test_gpus.py::test_the_nccl_that_is_loaded_is_asked_and_not_the_one_torch_was_built_for",
        ),
    ),
]

# ---------------------------------------------------------------- floor 2: collectives

ENGINE_BYTES = (
    "tests/collectives/test_engine_bytes.py::"
    "test_the_sum_over_ranks_is_the_least_that_the_operation_has_to_move"
)
EVERY_ALGORITHM = (
    "tests/collectives/test_collectives.py::"
    "test_every_algorithm_gives_numpys_answer_on_any_number_of_ranks"
)

COLLECTIVES = [
    Mutation(
        "the parameter server forgets the last rank",
        "minidist/full/collectives/central.py",
        old="    arriving = temporary(comm, array, len(array))\n    for rank in "
        "range(comm.size):\n",
        new="    arriving = temporary(comm, array, len(array))\n    for rank in range(comm.size - "
        "1):\n",
        tests=(f"{EVERY_ALGORITHM}[reduce-4]",),
    ),
    Mutation(
        "recursive doubling combines in another order on either side",
        "minidist/full/collectives/recursive.py",
        old="lower, upper = (array, arriving) if comm.rank < partner else (arriving, array)",
        new="lower, upper = array, arriving",
        tests=(
            "tests/collectives/test_collectives.py::"
            "test_signed_zeros_and_not_a_numbers_are_the_same_bits_on_all_ranks[2]",
        ),
    ),
    Mutation(
        "recursive halving keeps the other rank's half",
        "minidist/full/collectives/recursive.py",
        old="if comm.rank >= middle:",
        new="if comm.rank < middle:",
        tests=(f"{EVERY_ALGORITHM}[reduce_scatter-4]",),
    ),
    Mutation(
        "ranks beyond the power of two never hear the result",
        "minidist/full/collectives/recursive.py",
        old="        comm.recv(array, comm.rank - ranks)\n    elif comm.rank + ranks < comm.size:\n"
        "        comm.send(array, comm.rank + ranks)\n",
        new="        pass\n",
        tests=(f"{EVERY_ALGORITHM}[all_reduce-5]",),
    ),
    Mutation(
        "a rank in the midst of a tree loses its own buffer",
        "minidist/full/collectives/tree.py",
        old="target = temporary(comm, block, len(block), slot=1)",
        new="target = block",
        tests=(f"{EVERY_ALGORITHM}[reduce-4]",),
    ),
    Mutation(
        "a tree hands a child the shards of all that come behind it",
        "minidist/full/collectives/tree.py",
        old="sum(inside.lengths[first : 2 * first])",
        new="sum(inside.lengths[first:])",
        tests=(f"{EVERY_ALGORITHM}[scatter-8]",),
    ),
    Mutation(
        "pairwise exchange fills the place of the one that it sends to",
        "minidist/full/collectives/pairwise.py",
        old="comm.exchange(leaving[to], to, arriving[source], source)",
        new="comm.exchange(leaving[to], to, arriving[to], source)",
        tests=(f"{EVERY_ALGORITHM}[all_to_all-4]",),
    ),
    Mutation(
        "hierarchies take all nodes to be as large as each other",
        "minidist/full/collectives/hierarchical.py",
        old="= len({len(node) for node in comm.nodes}) == 1",
        new="= True",
        tests=("tests/collectives/test_collectives.py::test_hierarchies_on_nodes_of_three[5]",),
    ),
    Mutation(
        "shared memory is left before the others have read it",
        "minidist/full/collectives/shared.py",
        old="array.dtype) for peer in peers], comm, combine)\n        comm.fence(array.nbytes)\n",
        new="array.dtype) for peer in peers], comm, combine)\n",
        tests=(
            "tests/collectives/test_collective_bytes.py::test_all_reduce_of_registered_buffers",
        ),
    ),
    Mutation(
        "one of two ranks copies its half back before the other one has added to it",
        "minidist/full/collectives/shared.py",
        old="    comm.fence(array.nbytes)\n    if back is not None:",
        new="    if back is not None:",
        tests=("tests/collectives/test_collectives.py::test_two_ranks_share_out_what_is_large",),
    ),
    Mutation(
        "a reduce-scatter reads registered memory before the others have filled it",
        "minidist/full/collectives/shared.py",
        old="        comm.fence(chunks.whole.nbytes)\n        for *pieces, target in",
        new="        for *pieces, target in",
        tests=(
            "tests/collectives/test_collectives.py::"
            "test_registered_buffers_are_scattered_from_where_they_are",
        ),
    ),
    Mutation(
        "shared memory is written again into the half that is still read",
        "minidist/full/collectives/shared.py",
        old="half = self.turns % 2",
        new="half = 0",
        tests=(
            "tests/collectives/test_collectives.py::test_what_a_slow_rank_still_reads_is_not_written_again",
        ),
    ),
    Mutation(
        "a handle always writes into the half of shared memory for which it was noted first",
        "minidist/full/collectives/prepared/noting.py",
        old="staging.turns = other",
        new="staging.turns = other + 1",
        tests=(
            "tests/collectives/test_prepared.py::"
            "test_handles_and_plain_calls_take_turns_in_shared_memory",
        ),
    ),
    Mutation(
        "a handle does not count what it sends",
        "minidist/full/collectives/prepared/noting.py",
        old="found = counting + self.steps",
        new="found = self.steps",
        tests=(
            "tests/collectives/test_prepared.py::"
            "test_nobody_sees_from_outside_that_it_was_prepared[broadcast-nodes of 2]",
        ),
    ),
    Mutation(
        "a handle does not look whether a tensor has moved",
        "minidist/full/collectives/prepared/handle.py",
        old="return tensor.shape, tensor.dtype, tensor.stride(), tensor.data_ptr()",
        new="return tensor.shape, tensor.dtype, tensor.stride()",
        tests=("tests/collectives/test_prepared.py::test_a_buffer_that_has_moved_is_refused",),
    ),
    Mutation(
        "an engine is asked for a mean, which it does not know",
        "minidist/full/collectives/reduction.py",
        old='    op = "sum" if op == "mean" else op\n',
        new="",
        tests=("tests/gpu/test_gpu_collectives.py::test_the_same_program_is_right_on_gloo",),
    ),
    Mutation(
        "the mean of a reduce-scatter is a sum",
        "minidist/full/collectives/operations.py",
        old=(
            "reduced, comm.internal, combine),\n"
            "        lengths,\n"
            "    )\n"
            '    if op == "mean":\n'
            "        comm.computing(finish)(op, reduced, comm.size)\n"
        ),
        new="reduced, comm.internal, combine), lengths)\n",
        tests=(f"{EVERY_ALGORITHM}[reduce_scatter-4]",),
    ),
    Mutation(
        "a reduce-scatter deals its own shards, whatever it was told",
        "minidist/full/collectives/operations.py",
        old="rows = cut(_rows(full), ranks) if counts is None else [*counts]",
        new="rows = cut(_rows(full), ranks)",
        tests=(
            "tests/collectives/test_collectives.py::test_uneven_shards_that_are_gathered_give_the_reduction",
        ),
    ),
    Mutation(
        "unequal shards are cut with the longer ones last",
        "minidist/full/collectives/fast.py",
        old="return longer + [whole] * (parts - rest)",
        new="return [whole] * (parts - rest) + longer",
        tests=(f"{EVERY_ALGORITHM}[reduce_scatter-5]",),
    ),
    Mutation(
        "an engine's scatter counts what the root keeps",
        "minidist/full/collectives/choose.py",
        old="0 if behind else foreign",
        new="0 if behind else whole",
        tests=(ENGINE_BYTES,),
    ),
    Mutation(
        "what the engine refused is counted",
        "minidist/full/comm/request.py",
        old="            if error is None:\n",
        new="            if True:\n",
        tests=(ENGINE_BYTES,),
    ),
    Mutation(
        "the rule takes halving where there is no power of two of ranks",
        "minidist/full/collectives/choose.py",
        old='if bytes <= SMALL and (power or operation == "all_reduce"):',
        new="if bytes <= SMALL:",
        tests=(f"{EVERY_ALGORITHM}[reduce_scatter-5]",),
    ),
    Mutation(
        "the rule sends everything across nodes though several ranks share one",
        "minidist/full/collectives/choose.py",
        old=(
            "if (\n"
            '        operation == "all_reduce"\n'
            "        and len(comm.node) < ranks\n"
            "        and any(len(node) > 1 for node in comm.nodes)\n"
            "    ):"
        ),
        new='if operation == "all_reduce" and len(comm.node) == ranks and any(len(node) > 1 for '
        "node in comm.nodes):",
        tests=("tests/comm/test_clock.py::test_hierarchies_pay_across_nodes",),
    ),
]

# ---------------------------------------------------------------- floor 3: mesh and models

MODEL = "tests/model/test_model.py"

MESH_AND_MODEL = [
    Mutation(
        "cuDNN computes attention for short sequences, too",
        "minidist/full/model/attention.py",
        old=" and fits and time >= 1024",
        new=" and fits",
        tests=("tests/model/test_attention.py::test_the_rule",),
    ),
    Mutation(
        "what autocast narrows is not narrowed for cuDNN",
        "minidist/full/model/attention.py",
        old="q, k, v = at_autocast(query, key, value)",
        new="q, k, v = query, key, value",
        tests=(
            "tests/model/test_attention.py::test_autocast_counts_as_16_bits_and_recomputation_asks_the_rule_again",
        ),
    ),
    Mutation(
        "the order of a layout's axes is ignored",
        "minidist/full/mesh.py",
        old="        sizes = [getattr(self, axis) for axis in self.order]\n",
        new="        return np.arange(self.size).reshape([getattr(self, axis) for axis in AXES])\n",
        tests=("tests/test_mesh.py::test_stages_across_pairs_of_nodes",),
    ),
    Mutation(
        "the experts of a mesh are dealt out among ranks far apart",
        "minidist/full/mesh.py",
        old="edp, ep = divmod(among_data, self.ep)",
        new="ep, edp = divmod(among_data, self.edp)",
        tests=(
            "tests/test_mesh.py::test_experts_are_cut_from_the_data_axes",
            "tests/test_mesh.py::test_groups_divide_the_ranks",
        ),
    ),
    Mutation(
        "rotary embedding turns neighbouring channels, not halves",
        "minidist/model.py",
        old="first, second = x.chunk(2, dim=-1)",
        new="first, second = x[..., ::2], x[..., 1::2]",
        tests=(f"{MODEL}::test_logits_and_gradients_equal_hugging_face_in_float64[2-untied]",),
    ),
    Mutation(
        "rotary embedding counts positions from where the rank's part begins",
        "minidist/full/model/gpt.py",
        old="positions = where.position_numbers(time, x.device)",
        new="positions = torch.arange(time, device=x.device)",
        tests=(f"{MODEL}::test_the_model_is_causal_and_depends_on_distances_only",),
    ),
    Mutation(
        "attention sees what comes later",
        "minidist/full/model/attention.py",
        old="is_causal=True, enable_gqa=grouped",
        new="is_causal=False, enable_gqa=grouped",
        tests=(f"{MODEL}::test_the_model_is_causal_and_depends_on_distances_only",),
    ),
    Mutation(
        "a window is masked, and all keys before it computed",
        "minidist/full/model/seen.py",
        old="earliest = int(begins.min()) // BAND if len(begins) else number",
        new="earliest = 0",
        tests=("tests/model/test_seen.py::test_what_no_query_of_a_band_sees_is_not_computed",),
    ),
    Mutation(
        "a window is a token too wide",
        "minidist/full/model/seen.py",
        old="first = positions - (window or time) + 1",
        new="first = positions - (window or time)",
        tests=("tests/model/test_seen.py::test_a_window_is_softmax_with_its_mask[5]",),
    ),
    Mutation(
        "packed documents are rotated by their positions in the row",
        "minidist/full/model/gpt.py",
        old="self.rotary(where.in_document(positions), x.dtype)",
        new="self.rotary(positions, x.dtype)",
        tests=("tests/model/test_seen.py::test_positions_begin_again_at_each_document",),
    ),
    Mutation(
        "dropout's mask depends on where a token is in this rank's part",
        "minidist/full/model/dropout.py",
        old="token_key = child(row_key[:, None], where.position_numbers(time, device))",
        new="token_key = child(row_key[:, None], torch.arange(time, device=device))",
        tests=(f"{MODEL}::test_a_slice_of_the_batch_gets_the_slice_of_the_serial_mask",),
    ),
    Mutation(
        "both dropouts of a layer draw the same mask",
        "minidist/full/model/gpt.py",
        old="self.mlp_dropout = Dropout(config.dropout, site=2 * index + 1)",
        new="self.mlp_dropout = Dropout(config.dropout, site=2 * index)",
        tests=(f"{MODEL}::test_every_dropout_of_the_model_has_masks_of_its_own",),
    ),
    Mutation(
        "a tied head is a copy of the embedding",
        "minidist/full/model/gpt.py",
        old="self.head.weight = self.embedding.weight",
        new="self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())",
        tests=(f"{MODEL}::test_parameters_and_flops_are_counted",),
    ),
    Mutation(
        "padding counts in the loss",
        "minidist/model.py",
        old="return F.cross_entropy(by_token, targets.flatten(), ",
        new="return F.cross_entropy(by_token, targets.flatten().clamp(min=0), ",
        tests=(f"{MODEL}::test_the_loss_is_a_sum_in_at_least_float32",),
    ),
]

# ---------------------------------------------------------------- floor 4: parallel

SAMPLER = "tests/parallel/data/test_sampler.py"
DDP_TRAPS = "tests/parallel/data/test_ddp_traps.py"
AUTOCAST = "tests/memory/precision/test_autocast.py"
ZERO = "tests/parallel/sharded/test_zero.py"
SHARDED_OPTIMIZER = "tests/parallel/sharded/test_sharded_optimizer.py"
ALONE = "tests/parallel/sharded/test_sharded_alone.py"
AXES = "tests/parallel/test_axes.py"
ADJOINT = "tests/parallel/test_adjoint.py"
SCHEDULES = "tests/parallel/pipeline/test_schedules.py"
PIPELINE = "tests/parallel/pipeline/test_pipeline.py"
OFFLOADED = "tests/parallel/pipeline/test_offloaded_stages.py"

DATA = [
    Mutation(
        "ranks that have a row more are not counted by those behind them",
        "minidist/full/ddp/sampler.py",
        old="first = rank * size + min(rank, larger)",
        new="first = rank * size",
        tests=(f"{SAMPLER}::test_a_share_is_the_cut_of_array_split",),
    ),
    Mutation(
        "every epoch has the order of the first",
        "minidist/full/ddp/sampler.py",
        old="np.random.default_rng([self.seed, epoch])",
        new="np.random.default_rng([self.seed, 0])",
        tests=(f"{SAMPLER}::test_every_epoch_has_another_order_without_being_told",),
    ),
    Mutation(
        "a batch is counted as dealt out only when the next one is asked for",
        "minidist/full/ddp/sampler.py",
        old="            self.position += len(whole)\n"
        "            if self.position == self.length:\n"
        "                self.epoch, self.position = self.epoch + 1, 0\n"
        "            yield whole\n",
        new="            yield whole\n"
        "            self.position += len(whole)\n"
        "            if self.position == self.length:\n"
        "                self.epoch, self.position = self.epoch + 1, 0\n",
        tests=(f"{SAMPLER}::test_a_restart_continues_exactly_on_any_number_of_ranks",),
    ),
    Mutation(
        "a gradient that is not in its bucket yet is not copied there",
        "minidist/full/ddp/buckets.py",
        old="        elif parameter._grad is not view:\n            view.copy_(parameter._grad)\n",
        new="",
        tests=(f"{DDP_TRAPS}::test_gradients_replaced_by_hand_are_reduced[DDP]",),
    ),
    Mutation(
        "parameters of two precisions share a bucket",
        "minidist/full/ddp/buckets.py",
        old="if not (same and held < limit):",
        new="if not (parts and held < limit):",
        tests=("tests/parallel/data/test_ddp.py::test_partition_keeps_precisions_apart",),
    ),
    Mutation(
        "replicas start from their own values",
        "minidist/full/ddp/replicas.py",
        old="        copy_from_root(tensor, comm)\n",
        new="        tensor.detach()\n",
        tests=(
            "tests/parallel/data/test_ddp_wrapper.py::test_ranks_start_with_the_parameters_and_buffers_of_rank_0[DDP]",
        ),
    ),
    Mutation(
        "ranks are compared by the shapes of their blocks, not by which these are",
        "minidist/full/ddp/replicas.py",
        old="    if block is None or block.dim is None or ignored:\n",
        new="    if block is not None or ignored:\n",
        tests=(f"{AXES}::test_ranks_with_other_blocks_are_no_replicas[DDP]",),
    ),
    Mutation(
        "an op that nobody has said is the sum",
        "minidist/full/ddp/strategy.py",
        old='    if op in ("sum", "mean"):\n        return op\n',
        new='    if op in ("sum", "mean", None):\n        return op or "sum"\n',
        tests=(
            "tests/parallel/data/test_ddp_wrapper.py::test_how_gradients_are_joined_is_to_be_said[DDP-1]",
        ),
    ),
]

SHARDED = [
    Mutation(
        "a parameter's place in a shard is taken for its place in the parameter",
        "minidist/full/fsdp/flat.py",
        old="self.pieces[parameter] = slice(begin, begin + last - first)",
        new="self.pieces[parameter] = slice(first, last)",
        tests=(f"{ZERO}::test_parity_with_the_serial_run[plain-3-ZeRO1]",),
    ),
    Mutation(
        "a parameter that nobody used gets a gradient of zeros",
        "minidist/full/fsdp/flat.py",
        old="if self.gradient is not None and parameter not in without:",
        new="if self.gradient is not None:",
        tests=(f"{ZERO}::test_what_no_rank_has_used_is_not_decayed[ZeRO1]",),
    ),
    Mutation(
        "gradients of one parameter that are forgotten stay in the shard",
        "minidist/full/fsdp/flat.py",
        old="                    self.gradient[self.pieces[parameter]].zero_()\n",
        new="                    pass\n",
        tests=(f"{SHARDED_OPTIMIZER}::test_two_optimizers_share_a_model",),
    ),
    Mutation(
        "a step passes over gradients that nobody has reduced",
        "minidist/full/optimizer/over_slices.py",
        old="            if owner.passed_over(parameter):",
        new="            if parameter.grad is None and owner.passed_over(parameter):",
        tests=(f"{SHARDED_OPTIMIZER}::test_a_step_that_would_ignore_a_gradient_is_refused",),
    ),
    Mutation(
        "an optimizer over parameters that are sharded may step",
        "minidist/full/optimizer/over_slices.py",
        old="if not self.sharded.isdisjoint(updated):",
        new="if self.sharded == updated:",
        tests=(f"{ZERO}::test_an_optimizer_over_whole_parameters_is_refused",),
    ),
    Mutation(
        "ZeRO-2 keeps what the last of several backwards has reduced",
        "minidist/full/zero/zero.py",
        old="self.shards[bucket].shard.add_gradient(reduce_scatter(gradients, bucket.link, self.op))",
        new="self.shards[bucket].shard.gradient = reduce_scatter(gradients, bucket.link, self.op)",
        tests=(
            f"{ZERO}::test_a_second_backward_adds_to_the_first_though_both_were_reduced[ZeRO2]",
        ),
    ),
    Mutation(
        "ZeRO-1's bucket keeps what was reduced, and a second backward reduces it again",
        "minidist/full/zero/zero.py",
        old="        gradients.zero_()\n",
        new="        pass\n",
        tests=(
            "tests/parallel/test_gradient.py::test_what_is_changed_between_two_backwards_stays_changed[ZeRO1]",
        ),
    ),
    Mutation(
        "the book's ZeRO-3 keeps every layer whole",
        "minidist/zero.py",
        old="        self.unsharded.untyped_storage().resize_(0)\n",
        new="        pass\n",
        tests=("tests/book/test_book_zero.py::test_what_is_held_is_what_the_table_says",),
    ),
    Mutation(
        "the plain buckets are reduced before they are complete",
        "minidist/full/ddp/after_backward.py",
        old="self.parameters_to_reduce[::-1], bucket_bytes, bucket_bytes",
        new="self.parameters_to_reduce[::-1], 1, bucket_bytes",
        tests=(
            "tests/parallel/data/test_after_backward.py::test_one_all_reduce_a_bucket_and_only_after_backward",
        ),
    ),
    Mutation(
        "ZeRO++ reduces inside a node the rows of other ranks than their owners",
        "minidist/further/zero_plus_plus/zero_plus_plus.py",
        old="        rows = _swapped(rows, self.across.size)  # all that goes to one neighbour "
        "together\n",
        new="",
        tests=(
            "tests/further/test_zero_plus_plus.py::"
            "test_rows_are_gathered_in_order_and_summed_for_their_owners[6-2]",
        ),
    ),
    Mutation(
        "ZeRO++ uses its second partition when parameters have new values",
        "minidist/full/fsdp/flat.py",
        old="            self.mine.copy_(self.shard.values)\n        self.second = None\n",
        new="            self.mine.copy_(self.shard.values)\n",
        tests=(
            "tests/further/test_zero_plus_plus.py::test_backward_gathers_inside_the_node_what_forward_used",
        ),
    ),
]

OPTIMIZER = [
    Mutation(
        "a rank cuts its slice of saved state from the beginning",
        "minidist/full/optimizer/state.py",
        old="placements[at].take(value)",
        new="value.flatten()[: placements[at].stop - placements[at].start]",
        tests=(f"{ZERO}::test_optimizer_state_of_any_number_of_ranks[ZeRO1]",),
    ),
    Mutation(
        "the state of another model is loaded",
        "minidist/full/optimizer/state.py",
        old="    check_state(saved, placements, same)\n",
        new="",
        tests=(f"{ZERO}::test_another_models_state_is_refused_by_name[ZeRO1]",),
    ),
    Mutation(
        "nobody asks what kind of optimizer another one is around",
        "minidist/full/optimizer/elementwise.py",
        old="inside = [optimizer.inner] if isinstance(optimizer, MasterWeights) else []",
        new="inside: list[type] = []",
        tests=(
            f"{SHARDED_OPTIMIZER}::test_what_is_not_known_to_work_element_by_element_is_refused[ZeRO1]",
        ),
    ),
    Mutation(
        "nobody watches the steps of optimizers over blocks",
        "minidist/full/tensor/plan.py",
        old="    guard_blocks(model)\n",
        new="",
        tests=(
            f"{AXES}::test_an_optimizer_that_needs_whole_parameters_is_refused_at_its_step[tensor]",
        ),
    ),
    Mutation(
        "parameters in other memory of the same dtype count as in place",
        "minidist/full/fsdp/flat.py",
        old="return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, "
        "tensor.device",
        new="return tensor.dtype, tensor.device",
        tests=(f"{ALONE}::test_steps_that_would_be_in_vain_are_refused[another ShardedOptimizer]",),
    ),
    Mutation(
        "experts are shared out over all ranks, not over their copies",
        "minidist/further/sharded_optimizer.py",
        old="BucketShard(alike, names, copies_of(alike[0], comm))",
        new="BucketShard(alike, names, comm)",
        tests=(
            f"{AXES}::test_experts_that_ranks_have_shared_out_are_reduced_among_their_copies[2-ShardedOptimizer]",
        ),
    ),
    Mutation(
        "Muon's matrices go to their owners in the order of the model",
        "minidist/further/muon/muon.py",
        old="            alike.sort(key=lambda part: self.owners[self.numbers[part.piece]])\n",
        new="",
        tests=("tests/further/test_muon.py::test_parity_beside_adamw[ZeRO1-options1-2-0]",),
    ),
    Mutation(
        "autocast is entered, and switched off",
        "minidist/full/layers/autocast.py",
        old="torch.autocast(device, self.dtype, cache_enabled=False)",
        new="torch.autocast(device, self.dtype, enabled=False, cache_enabled=False)",
        tests=(f"{AUTOCAST}::test_products_have_16_bits_and_all_that_is_kept_has_32",),
    ),
    Mutation(
        "autocast's copies of weights stay in torch's cache",
        "minidist/full/layers/autocast.py",
        old="self.dtype, cache_enabled=False",
        new="self.dtype",
        tests=(f"{AUTOCAST}::test_products_have_16_bits_and_all_that_is_kept_has_32",),
    ),
    Mutation(
        "Muon's largest matrices all go to one rank",
        "minidist/further/muon/muon.py",
        old="owners[number] = given.index(min(given))",
        new="owners[number] = given.index(max(given))",
        tests=("tests/further/test_muon.py::test_owners_take_the_largest_first",),
    ),
    Mutation(
        "Muon makes each block of a matrix orthogonal by itself",
        "minidist/further/muon/muon.py",
        old="            matrix = block.full(matrix)\n",
        new="            block = None\n",
        tests=("tests/trainer/test_train_muon.py::test_on_other_axes_too",),
    ),
    Mutation(
        "Muon gets no group of its own",
        "minidist/further/plugged_in.py",
        old="return MuonWithAdamW, muon_groups(model, groups)",
        new="return MuonWithAdamW, groups",
        tests=("tests/trainer/test_train_muon.py::test_masters_are_updated_in_32_bits",),
    ),
    Mutation(
        "clipping adds up norms instead of their squares",
        "minidist/full/clip.py",
        old="    square = norm.square()\n    all_reduce(square, comm)\n    return square.sqrt()\n",
        new="    square = norm.clone()\n    all_reduce(square, comm)\n    return square\n",
        tests=(f"{ZERO}::test_clipping_uses_the_norm_of_all_shards[ZeRO1]",),
    ),
    Mutation(
        "clipping counts what several ranks hold once for each of them",
        "minidist/full/clip.py",
        old="for parameter, gradient in parts if placement_of(parameter).counts]",
        new="for _, gradient in parts]",
        tests=(
            "tests/parallel/tensor/test_tensor_parallel.py::test_parity_with_clipping_counts_each_element_once",
        ),
    ),
    Mutation(
        "torch's clipping counts a key-value head once for each rank that holds it",
        "minidist/full/placement.py",
        old="counted = block.first",
        new="counted = True",
        tests=("tests/parallel/test_gradient.py::test_a_head_that_two_ranks_share_counts_once",),
    ),
    Mutation(
        "each rank decides for itself whether torch's GradScaler leaves a step out",
        "minidist/full/gradients/gradient.py",
        old='all_reduce(found, comm, op="max")',
        new="pass",
        tests=(
            "tests/parallel/test_gradient.py::test_torchs_scaler_skips_a_step_on_all_ranks[FSDP-False]",
        ),
    ),
]

TENSOR = [
    Mutation(
        "the gradient of what enters a region is not summed",
        "minidist/full/adjoint.py",
        old="return _linear(x, comm, lambda x: x.view_as(x), lambda gradient: "
        "reduce_from(gradient, comm))",
        new="return _linear(x, comm, lambda x: x.view_as(x), lambda gradient: gradient)",
        tests=(f"{ADJOINT}::test_backward_is_the_adjoint[copy_to-2]",),
    ),
    Mutation(
        "the backward of an all-gather keeps one rank's terms only",
        "minidist/full/adjoint.py",
        old=(
            "lambda x: _gathered(x, comm, dim, size),\n"
            "        lambda gradient: reduce_scatter(gradient, comm, dim)"
        ),
        new="lambda x: _gathered(x, comm, dim, size), lambda gradient: scatter_to(gradient, comm, "
        "dim)",
        tests=(f"{ADJOINT}::test_backward_is_the_adjoint[all_gather-2]",),
    ),
    Mutation(
        "a reduce changes the tensor that it is given",
        "minidist/full/adjoint.py",
        old="total = x.clone(memory_format=torch.contiguous_format)",
        new="total = x.contiguous()",
        tests=(f"{ADJOINT}::test_backward_is_the_adjoint[reduce_from-2]",),
    ),
    Mutation(
        "each rank subtracts the largest logit of its own words",
        "minidist/full/tensor/vocabulary.py",
        old='    all_reduce(largest, comm, "max")\n',
        new="",
        tests=(f"{ADJOINT}::test_cross_entropy_is_the_serial_one_and_holds_no_full_row[dtype0-2]",),
    ),
    Mutation(
        "a word of another rank counts as this one's first",
        "minidist/full/tensor/vocabulary.py",
        old="torch.stack((normalizer, picked.masked_fill(~here, 0)))",
        new="torch.stack((normalizer, picked))",
        tests=(f"{ADJOINT}::test_cross_entropy_is_the_serial_one_and_holds_no_full_row[dtype0-2]",),
    ),
    Mutation(
        "a block that several ranks hold is put together from each of them",
        "minidist/full/placement.py",
        old="stop - start if rank % self.copies == 0 else 0",
        new="stop - start",
        tests=(
            "tests/parallel/tensor/test_tensor_parallel.py::"
            "test_parity_on_eight_ranks_of_which_four_share_a_key_value_head",
        ),
    ),
    Mutation(
        "under sequence parallelism every rank drops at the first positions",
        "minidist/full/tensor/tensor_parallel.py",
        old=("cut(time, comm.size))[\n            comm.rank\n        ]"),
        new="cut(time, comm.size))[0]",
        tests=(
            "tests/parallel/tensor/test_sequence_parallel.py::test_the_mask_is_the_slice_of_the_serial_one",
        ),
    ),
]

EXPERT_TEST = "tests/parallel/expert/test_expert_parallel.py::"
MOE_TEST = "tests/model/test_moe.py::"

EXPERTS = [
    Mutation(
        "the bias weighs the outputs, too",
        "minidist/full/model/moe/routed.py",
        old="weights_of(scores_BTE, choice_BTK",
        new="weights_of(scores_BTE + self.bias * config.balance_rate, choice_BTK",
        tests=(MOE_TEST + "test_a_bias_only_selects",),
    ),
    Mutation(
        "the auxiliary loss is never attached",
        "minidist/full/model/moe/losses.py",
        old="return gradient, ctx.loss, None, None",
        new="return gradient, None, None, None",
        tests=(EXPERT_TEST + "test_the_auxiliary_loss_alone_is_one_number",),
    ),
    Mutation(
        "the auxiliary loss forgets the loss scale",
        "minidist/full/model/moe/routed.py",
        old="Attach.apply(weights_BTK, where.weight * loss, self, tally)",
        new="Attach.apply(weights_BTK, loss, self, tally)",
        tests=(EXPERT_TEST + "test_the_auxiliary_loss_alone_is_one_number",),
    ),
    Mutation(
        "the fractions of the auxiliary loss are those of this rank's tokens",
        "minidist/full/model/moe/losses.py",
        old="counts_BE = sum_over_sequence(chosen_BTE.sum(1))",
        new="counts_BE = chosen_BTE.sum(1)",
        tests=(EXPERT_TEST + "test_the_auxiliary_loss_alone_is_one_number",),
    ),
    Mutation(
        "capacity is counted in the order of this rank's tokens",
        "minidist/full/model/moe/capacity.py",
        old="sequence_BSK = sum_over_sequence(sequence_BSK)",
        new="sequence_BSK = sequence_BSK.clone()",
        tests=(EXPERT_TEST + "test_the_same_choices_are_dropped_on_every_layout",),
    ),
    Mutation(
        "tokens are counted in forward, and so again when that is recomputed",
        "minidist/full/model/moe/routed.py",
        old="            weights_BTK = Attach.apply(",
        new="            self.tally = self.tally + tally\n            weights_BTK = Attach.apply(",
        tests=(MOE_TEST + "test_only_what_trains_is_counted_and_only_once",),
    ),
    Mutation(
        "what comes back is not sorted back",
        "minidist/full/expert/dispatch.py",
        old="rows = undone(rows, self.last)",
        new="rows = rows.clone()",
        tests=(EXPERT_TEST + "test_any_counts_travel", EXPERT_TEST + "test_parity"),
    ),
    Mutation(
        "gradients of experts are summed over the whole data axis",
        "minidist/full/placement.py",
        old="return experts.copies if experts else data",
        new="return data",
        tests=(EXPERT_TEST + "test_parity",),
    ),
    Mutation(
        "the norm leaves out the experts, and the blocks, of other ranks",
        "minidist/full/placement.py",
        old="for part in (self.slice, self.block) if",
        new="for part in (self.slice,) if",
        tests=(EXPERT_TEST + "test_parity",),
    ),
    Mutation(
        "the router's gradient is not summed over ranks that route some tokens",
        "minidist/full/tensor/plan.py",
        old="split = sequence or any(style.splits_tokens for style in around)",
        new="split = sequence",
        tests=(EXPERT_TEST + "test_parity",),
    ),
    Mutation(
        "a checkpoint has the experts of the first ranks of the data axis alone",
        "minidist/full/checkpoint/saving.py",
        old="copies_of(parameter, parallel.mesh.data).rank <",
        new="parallel.mesh.data.rank <",
        tests=("tests/trainer/test_train_experts.py::test_a_checkpoint_moves_between_any_ep",),
    ),
]

PIPELINE = [
    Mutation(
        "a backward needs no forward of its own stage",
        "minidist/full/pipeline/order.py",
        old="own = [] if kind == Kind.FORWARD else [Action(Kind.FORWARD, stage, microbatch)]",
        new="own: list[Action] = []",
        tests=(f"{SCHEDULES}::test_texts_that_are_no_schedule",),
    ),
    Mutation(
        "a send does not wait for its receive",
        "minidist/full/pipeline/order.py",
        old="            if action.communicates:",
        new="            if action.communicates and action.kind == FLOWS[action.kind].receive:",
        tests=(f"{SCHEDULES}::test_texts_that_are_no_schedule",),
    ),
    Mutation(
        "a reduction may come before the last backward",
        "minidist/full/pipeline/order.py",
        old="if each.kind in BACKWARDS]",
        new="if each.kind == Kind.FORWARD]",
        tests=(f"{SCHEDULES}::test_texts_that_are_no_schedule",),
    ),
    Mutation(
        "gradients are reduced whatever the plan says",
        "minidist/full/pipeline/executor.py",
        old="each.kind in BACKWARDS and self.plan.reduces",
        new="each.kind in BACKWARDS",
        tests=(
            f"{PIPELINE}::test_gradients_are_reduced_over_the_data_axis_because_the_plan_says_so",
        ),
    ),
    Mutation(
        "the cycle of a stuck plan begins where the search began",
        "minidist/full/pipeline/order.py",
        old="cycle = ranks[ranks.index(rank) :] if rank in path else ranks[-1:]",
        new="cycle = ranks if rank in path else ranks[-1:]",
        tests=(f"{SCHEDULES}::test_a_cycle_that_leaves_out_some_ranks_is_named_without_them",),
    ),
    Mutation(
        "messages are laid out rank by rank instead of moment by moment",
        "minidist/full/pipeline/communicate.py",
        old="for _, rank, position in sorted(line):",
        new="for _, rank, position in line:",
        tests=(f"{SCHEDULES}::test_receives_are_posted_ahead",),
    ),
    Mutation(
        "nobody asks where a gradient is received",
        "minidist/full/pipeline/check.py",
        old="for end in plan.message(action) if plan.communicates]",
        new="for end in plan.message(action) if plan.communicates and end.kind != "
        "Kind.RECEIVE_GRADIENT]",
        tests=(f"{SCHEDULES}::test_texts_that_are_no_schedule",),
    ),
    Mutation(
        "what a rank hands to itself takes a latency",
        "minidist/full/pipeline/simulate.py",
        old="(0.0 if here else latency)",
        new="latency",
        tests=(f"{SCHEDULES}::test_latency_lies_between_ranks_only",),
    ),
    Mutation(
        "activations are held until the weights have their gradients",
        "minidist/full/pipeline/simulate.py",
        old="{Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUTS: -1}",
        new="{Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: -1}",
        tests=(f"{SCHEDULES}::test_peaks",),
    ),
    Mutation(
        "1F1B warms up with a forward more",
        "minidist/full/pipeline/schedules.py",
        old="return in_turn(rank, ranks, microbatches, warm_up=ranks - rank - 1)",
        new="return in_turn(rank, ranks, microbatches, warm_up=ranks - rank)",
        tests=(f"{SCHEDULES}::test_peaks",),
    ),
    Mutation(
        "zb1p warms up as interleaved does",
        "minidist/full/pipeline/schedules.py",
        old="warm_up = (chunks - 1) * group + ranks - rank - 1",
        new="warm_up = (chunks - 1) * group + 2 * (ranks - rank - 1)",
        tests=(f"{SCHEDULES}::test_peaks",),
    ),
    Mutation(
        "zb1p computes weight gradients at once",
        "minidist/full/pipeline/schedules.py",
        old='backwards[rank:] = [f"{step}, W" for step in backwards[rank:]]',
        new='backwards = [f"{step}, W" for step in backwards]',
        tests=(f"{SCHEDULES}::test_bubble_of_zb1p",),
    ),
    Mutation(
        "a copy to the host takes no time on the clock",
        "minidist/full/pipeline/simulate.py",
        old="            port[rank] = end\n",
        new="            port[rank] = moment\n",
        tests=(f"{OFFLOADED}::test_by_hand",),
    ),
    Mutation(
        "a stage computes on the clock before its weights are back",
        "minidist/full/pipeline/simulate.py",
        old="moment = max(moment, back[stage])",
        new="pass",
        tests=(f"{OFFLOADED}::test_a_link_that_is_slower_than_was_said_makes_the_step_longer",),
    ),
    Mutation(
        "nobody asks whether a stage computes while its weights are away",
        "minidist/full/pipeline/check.py",
        old="if kind in COMPUTING and away:",
        new="if kind == Kind.FORWARD and away:",
        tests=(f"{OFFLOADED}::test_what_the_checker_says",),
    ),
    Mutation(
        "weights come back as soon as they have left",
        "minidist/full/pipeline/offload/pauses.py",
        old="range(pause.last, pause.first, -1)",
        new="range(pause.first + 1, pause.last + 1)",
        tests=(f"{OFFLOADED}::test_by_hand",),
    ),
    Mutation(
        "weights that come back count as changed",
        "minidist/full/pipeline/offload/host.py",
        old="port.copy(parameter.data, kept.data)",
        new="port.copy(parameter.detach(), kept.data)",
        tests=(f"{OFFLOADED}::test_no_bit_changes",),
    ),
    Mutation(
        "weights are copied, and stay",
        "minidist/full/pipeline/offload/host.py",
        old="            parameter.untyped_storage().resize_(0)\n",
        new="",
        tests=(f"{OFFLOADED}::test_the_bytes_are_those_of_the_stages_that_are_there",),
    ),
    Mutation(
        "a stage does not wait for its weights",
        "minidist/full/pipeline/offload/host.py",
        old="            weights.coming()\n",
        new="",
        tests=(f"{OFFLOADED}::test_computing_goes_on_beside_a_copy_and_waits_where_it_needs_it",),
    ),
    Mutation(
        "an output is kept after its gradient has come",
        "minidist/full/pipeline/executor.py",
        old="        self.free_sent()  # this microbatch's output at least: its gradient is here\n",
        new="",
        tests=(f"{PIPELINE}::test_an_output_is_let_go_when_its_gradient_has_come",),
    ),
]

# ---------------------------------------------------------------- floor 4: memory

OPINION = (
    "tests/plan/test_second_opinion.py::test_a_step_sends_and_takes_what_the_real_program_does"
)
PRECISION = "tests/memory/precision/test_precision.py"
FP8 = "tests/memory/precision/test_fp8.py"
LORA = "tests/further/test_lora.py"

MEMORY = [
    Mutation(
        "two parameters in one storage count twice",
        "minidist/full/memory/account.py",
        old="if start not in counted:",
        new="if True:",
        tests=("tests/memory/test_account.py::test_storages_count_once_and_at_their_present_size",),
    ),
    Mutation(
        "what a saved tensor came from is kept alive with it",
        "minidist/full/memory/account.py",
        old="self.tensor = tensor.detach()",
        new="self.tensor = tensor",
        tests=(
            "tests/memory/test_account.py::test_a_graph_that_is_dropped_gives_back_its_activations",
        ),
    ),
    Mutation(
        "tensor parallelism divides what only sequence parallelism can",
        "minidist/plan/equation.py",
        old="undivided = 10 / (tp if sequence_parallel else 1)",
        new="undivided = 10 / tp",
        tests=("tests/plan/test_equation.py::test_the_equations_of_the_recomputation_paper",),
    ),
    Mutation(
        "a plan hides the gradients that come last, too",
        "minidist/plan/parts/data.py",
        old="    exposed = all_reduce(run, last, run.gradients)\n",
        new="    exposed = 0.0\n",
        tests=(f"{OPINION}[dp 4]",),
    ),
    Mutation(
        "a plan lets ZeRO 1 gather parameters for nothing",
        "minidist/plan/parts/data.py",
        old="return Reduction(exposed + gathering, hideable, times * backward)",
        new="return Reduction(exposed, hideable, times * backward)",
        tests=(f"{OPINION}[zero 1]",),
    ),
    Mutation(
        "a plan recomputes no collectives",
        "minidist/plan/parts/layer.py",
        old="return reducing, reducing * repeated.get(run.recompute, 0.0)",
        new="return reducing, 0.0",
        tests=(f"{OPINION}[tp 2, sp, recomputed]",),
    ),
    Mutation(
        "a plan lets stages begin without waiting",
        "minidist/plan/stages.py",
        old="    return clock.length - m * max(stage.seconds + waits for stage in ranks)\n",
        new="    return 0.0 * clock.length\n",
        tests=(f"{OPINION}[pp 4]",),
    ),
    Mutation(
        "a plan sends the gradients of keys in 16 bits",
        "minidist/plan/traffic.py",
        old="hops_of_gradients = run.cp * 4 / width",
        new="hops_of_gradients = run.cp",
        tests=(f"{OPINION}[cp 2]",),
    ),
    Mutation(
        "a plan cuts all activations without sequence parallelism",
        "minidist/plan/run.py",
        old="        return self.tp if self.sp else 1\n",
        new="        return self.tp\n",
        tests=(
            "tests/plan/test_budget.py::test_bytes_are_near_the_planners_without_sequence_parallelism",
        ),
    ),
    Mutation(
        "a plan divides the state of experts by all ranks of the data axis",
        "minidist/plan/memory/states.py",
        old="each = state_bytes(run, same.ranks)",
        new="each = state_bytes(run, run.sharded.ranks)",
        tests=(
            "tests/plan/test_second_opinion.py::test_experts_states_are_divided_by_their_copies[ep "
            "2, zero 1]",
        ),
    ),
    Mutation(
        "a plan is made from numbers of any size",
        "minidist/plan/device.py",
        old="            typed(value, *known[name])\n",
        new="            typed(value, known[name][0])\n",
        tests=("tests/plan/test_input.py::test_what_is_impossible_is_refused_by_its_name",),
    ),
    Mutation(
        "a published row may say what nobody reads",
        "minidist/plan/published/fields.py",
        old="        if name not in known:\n            raise",
        new='        if name == "":\n            raise',
        tests=("tests/plan/test_rows.py::test_what_is_not_known_leaves_a_row_out",),
    ),
    Mutation(
        "a plan gives each ring of a node the whole network",
        "minidist/plan/links.py",
        old="return min(self.card() * cards, link)",
        new="return min(self.card() * self.machine.node, link)",
        tests=("tests/plan/test_planner.py::test_both_orders_of_the_axes_are_looked_at",),
    ),
    Mutation(
        "the command of a plan loses what the model ties",
        "minidist/cli/plan/runnable.py",
        old='    "tied": "tied",\n',
        new="",
        tests=("tests/plan/test_answer.py::test_what_is_planned_can_be_trained",),
    ),
    Mutation(
        "a plan without torch asks train, which needs torch",
        "minidist/cli/plan/runnable.py",
        old="    if not train_can_be_asked():\n",
        new="    if not run.model:\n",
        tests=("tests/test_without_torch.py::test_the_command_answers_as_it_does_with_torch",),
    ),
    Mutation(
        "a plan's reserve is said, and not kept",
        "minidist/plan/search/fitting.py",
        old="memory * (1 - reserve)",
        new="memory",
        tests=("tests/plan/test_answer.py::test_five_percent_of_the_memory_stay_free",),
    ),
    Mutation(
        "gradients on their way look like computing",
        "minidist/draw/plan.py",
        old='"data": Look("#009E73", "||")',
        new='"data": Look("#0072B2")',
        tests=("tests/plan/test_answer.py::test_no_two_kinds_look_alike[looks1]",),
    ),
    Mutation(
        "tensor parallelism may be ordered across nodes",
        "minidist/full/trainer/checked.py",
        old='    if layout.links_between(nodes)["tp"] != "inside"',
        new='    if layout.links_between(nodes)["tp"] == ""',
        tests=("tests/trainer/test_order.py::test_an_order_that_cannot_be_meant_is_refused",),
    ),
    Mutation(
        "a second forward draws other random numbers than the first",
        "minidist/full/recompute/segments.py",
        old="            torch.set_rng_state(self.random_state)\n",
        new="",
        tests=(
            "tests/memory/recompute/test_recompute.py::"
            "test_torchs_dropout_draws_the_same_again_and_what_follows_draws_as_if_nothing_had_been[full]",
        ),
    ),
    Mutation(
        "a stage's backward has no room for the gradient of its input",
        "minidist/plan/memory/chain.py",
        old="backward = stage.saved + size[start + 1] + size[start] - size[end]",
        new="backward = stage.saved + size[start + 1] - size[end]",
        tests=("tests/plan/test_chain.py::test_no_plan_beats_the_best_one",),
    ),
    Mutation(
        "recomputing a range costs no forward on the way to what follows",
        "minidist/plan/memory/chain.py",
        old="time = passing + inner.time + rest.time",
        new="time = inner.time + rest.time",
        tests=("tests/plan/test_chain.py::test_no_plan_beats_the_best_one",),
    ),
    Mutation(
        "an overflow makes only the rank skip that has seen it",
        "minidist/full/precision/mixed.py",
        old="        if self.comm is not None:\n            all_reduce(overflow, self.comm, "
        'op="max")\n',
        new="",
        tests=(f"{PRECISION}::test_an_overflow_on_one_rank_makes_all_ranks_skip[2]",),
    ),
    Mutation(
        "the loss scale grows a step late",
        "minidist/full/precision/mixed.py",
        old="if self.good_steps == self.interval:",
        new="if self.good_steps > self.interval:",
        tests=(f"{PRECISION}::test_the_scale_backs_off_and_grows_again",),
    ),
    Mutation(
        "stochastic rounding draws a bit too few",
        "minidist/full/precision/rounding.py",
        old=("noise = torch.randint(\n        1 << DROPPED_BITS,"),
        new="noise = torch.randint(1 << (DROPPED_BITS - 1),",
        tests=(
            f"{PRECISION}::test_stochastic_rounding_is_right_on_average_and_goes_to_a_neighbour",
        ),
    ),
    Mutation(
        "a parameter that somebody has overwritten gets its old master back",
        "minidist/full/precision/masters.py",
        old="if master is None or (written and not torch.equal(parameter, master.to(parameter))):",
        new="if master is None:",
        tests=(f"{PRECISION}::test_who_overwrites_a_parameter_overwrites_its_master",),
    ),
    Mutation(
        "a float8 scale goes by the last step alone",
        "minidist/full/precision/fp8.py",
        old="past = history.amax(-1)",
        new="past = history[..., 0]",
        tests=(
            f"{FP8}::test_a_scale_goes_by_the_largest_of_its_history_and_what_outgrows_it_saturates",
        ),
    ),
    Mutation(
        "the ranks' largest magnitudes are added up",
        "minidist/full/precision/fp8.py",
        old='all_reduce(amaxes, comm, op="max")',
        new="all_reduce(amaxes, comm)",
        tests=(f"{FP8}::test_amaxes_are_the_largest_of_all_ranks_for_one_message_a_step[2]",),
    ),
    Mutation(
        "a scale of NF4 is rounded down, below its largest weight",
        "minidist/further/nf4/nf4.py",
        old="in_steps.ceil()",
        new="in_steps.floor()",
        tests=(f"{LORA}::test_an_error_is_at_most_half_the_widest_gap_of_its_block",),
    ),
    Mutation(
        "two weights of NF4 change their places in a byte",
        "minidist/further/nf4/nf4.py",
        old="pairs[:, 0] << 4 | pairs[:, 1]",
        new="pairs[:, 1] << 4 | pairs[:, 0]",
        tests=(f"{LORA}::test_each_level_comes_back_as_itself",),
    ),
    Mutation(
        "an adapter is merged without its scale",
        "minidist/full/adapters/lora.py",
        old="self.B.detach() @ self.A.detach() * self.scale",
        new="self.B.detach() @ self.A.detach()",
        tests=(f"{LORA}::test_merging_leaves_plain_layers_and_the_same_outputs[lora]",),
    ),
    Mutation(
        "an adapter is scaled by alpha, whatever its rank",
        "minidist/full/adapters/lora.py",
        old="self.base, self.scale = base, alpha / rank",
        new="self.base, self.scale = base, alpha",
        tests=(f"{LORA}::test_an_adapter_is_scaled_by_alpha_over_rank",),
    ),
    Mutation(
        "state that is offloaded is worked on in its file",
        "minidist/full/memory/offload.py",
        old="return {name: value.clone() if name in files else value for name, value in "
        "state.items()}",
        new="return state",
        tests=("tests/memory/test_offload.py::test_memory_holds_the_state_of_two_parameters",),
    ),
    Mutation(
        "the file of a mapped tensor keeps its name",
        "minidist/full/memory/offload.py",
        old="        os.close(descriptor)\n        os.unlink(path)\n",
        new="        os.close(descriptor)\n",
        tests=("tests/memory/test_offload.py::test_a_mapped_tensor_is_a_file_without_a_name",),
    ),
]

# ---------------------------------------------------------------- floor 5: trainer

STORE = "tests/trainer/checkpoint/test_store.py"
PIECES = "tests/trainer/checkpoint/test_pieces.py"
CHECKPOINT = "tests/trainer/checkpoint/test_checkpoint.py"
PACKED = "tests/trainer/test_packed.py"
RATE = "tests/trainer/test_schedule.py"
MEASURED = "tests/trainer/test_evaluation.py::test_every_layout_measures_the_serial_number_and_trains_as_if_it_did_not"

TRAINER = [
    Mutation(
        "a checkpoint says where the thread that reads ahead stands",
        "minidist/full/trainer/batches.py",
        old="return dict(self._consumed)",
        new="return dict(self._source.state_dict())",
        tests=("tests/trainer/test_text.py::test_a_restart_has_exactly_the_next_batch[3-False]",),
    ),
    Mutation(
        "every microbatch begins at the row at which the batch does",
        "minidist/full/trainer/batches.py",
        old="self.first_row + cut.start",
        new="self.first_row",
        tests=(f"{SAMPLER}::test_microbatches_are_the_batch_cut_up",),
    ),
    Mutation(
        "the width of a batch is that of this rank's rows",
        "minidist/full/trainer/batches.py",
        old="width = -(-(int(lengths.max()) - 1) // self.multiple)",
        new="width = -(-(int(lengths[mine].max(initial=2)) - 1) // self.multiple)",
        tests=(f"{SAMPLER}::test_the_ranks_together_have_the_serial_batch[True-3]",),
    ),
    Mutation(
        "the learning rate is that of the step before",
        "minidist/full/trainer/schedule.py",
        old="done = step + 1  # steps taken once this one is",
        new="done = step",
        tests=(f"{RATE}::test_it_starts_low_reaches_the_peak_and_ends_at_the_final_rate",),
    ),
    Mutation(
        "the rate falls from the end of the warm-up, though it was to be stable",
        "minidist/full/trainer/schedule.py",
        old='fall = total - cooldown if shape == "wsd" else warmup',
        new="fall = warmup",
        tests=(f"{RATE}::test_other_shapes_fall_along_a_straight_line_or_late_or_not_at_all",),
    ),
    Mutation(
        "what is measured on held-out text is measured with dropout",
        "minidist/full/strategy.py",
        old="                module.training = False\n",
        new="                module.training = True\n",
        tests=(
            "tests/trainer/test_evaluation.py::test_it_is_the_loss_of_the_model_that_was_saved",
        ),
    ),
    Mutation(
        "measuring leaves the model in evaluation",
        "minidist/full/strategy.py",
        old="                module.training = training\n",
        new="                pass\n",
        tests=(f"{MEASURED}[2-dense---zero 2 --recompute full]",),
    ),
    Mutation(
        "each batch of held-out text counts alike, however few tokens it has",
        "minidist/full/trainer/observed/held_out.py",
        old="        total += loss.double() * batch.tokens\n        tokens += batch.tokens\n",
        new="        total += loss.double()\n        tokens += 1\n",
        tests=(
            "tests/trainer/test_evaluation.py::test_it_is_the_loss_of_the_model_that_was_saved",
        ),
    ),
    Mutation(
        "packed documents attend to those before them in their row",
        "minidist/full/data/packed.py",
        old="rows.documents[place, begin:end] = begin",
        new="rows.documents[place, begin:end] = 0",
        tests=(
            f"{PACKED}::test_packed_rows_train_as_their_documents_one_by_one",
            f"{PACKED}::test_what_is_measured_is_the_loss_of_each_document_alone",
        ),
    ),
    Mutation(
        "the end of a packed document predicts the beginning of the next",
        "minidist/full/data/packed.py",
        old="                end = begin + size - 1\n",
        new="                end = begin + size\n",
        tests=(f"{PACKED}::test_rows_hold_documents_side_by_side_and_no_target_crosses_a_border",),
    ),
    Mutation(
        "each document is packed into the first row that has just opened",
        "minidist/full/data/packed.py",
        old="fits = bisect_left(rooms, size)",
        new="fits = len(rooms) - 1 if rooms and rooms[-1] >= size else len(rooms)",
        tests=(f"{PACKED}::test_a_document_goes_where_it_leaves_the_least_room",),
    ),
    Mutation(
        "every microbatch has the documents of the first rows",
        "minidist/full/trainer/batches.py",
        old="None if self.documents is None else self.documents[cut]",
        new="None if self.documents is None else self.documents[: cut.stop - cut.start]",
        tests=(f"{PACKED}::test_ranks_and_microbatches_have_the_documents_of_their_rows",),
    ),
    Mutation(
        "what was in memory is lost when the tokens go into a file",
        "minidist/full/data/token_file.py",
        old="            self._file.write(self._short)\n",
        new="",
        tests=("tests/trainer/test_corpus.py::test_tokens_in_a_file_are_those_in_memory",),
    ),
    Mutation(
        "a piece of text ends inside a character",
        "minidist/full/data/sources.py",
        old="        end -= 1\n",
        new="        break\n",
        tests=(
            "tests/trainer/test_corpus.py::test_a_long_text_is_cut_where_a_paragraph_ends_or_a_line_or_a_character",
        ),
    ),
    Mutation(
        "an exported model forgets the tokens that begin and end its texts",
        "minidist/full/trainer/foreign/llama.py",
        old="        return {**origin, **changed}\n",
        new="        pass\n",
        tests=(
            "tests/cli/test_export.py::test_init_takes_everything_from_the_folder_and_export_gives_it_back",
        ),
    ),
    Mutation(
        "a shard may still be in memory when it is said to be written",
        "minidist/full/checkpoint/store.py",
        old="        save_file(tensors, file)\n        flush(file)\n",
        new="        save_file(tensors, file)\n",
        tests=(f"{STORE}::test_the_disk_holds_everything_before_it_gets_its_name",),
    ),
    Mutation(
        "a checkpoint gets its name before the disk holds its index",
        "minidist/full/checkpoint/store.py",
        old="        for path in (unfinished / INDEX, unfinished / STATE, unfinished / SUMS, "
        "unfinished):\n            flush(path)\n        unfinished.rename(final)  # fails if "
        "there is one already\n",
        new="        unfinished.rename(final)\n"
        "        for path in (final / INDEX, final / STATE, final / SUMS, final):\n"
        "            flush(path)\n",
        tests=(f"{STORE}::test_the_disk_holds_everything_before_it_gets_its_name",),
    ),
    Mutation(
        "one checkpoint more is kept than was asked for",
        "minidist/full/checkpoint/store.py",
        old="complete(folder)[: -max(keep, 1)]",
        new="complete(folder)[: -max(keep, 1) - 1]",
        tests=(f"{STORE}::test_the_newest_are_kept_and_every_so_many_steps_one",),
    ),
    Mutation(
        "an index is written though an element is in two files",
        "minidist/full/checkpoint/index.py",
        old='        assert not words, f"ranks have not written each element of {name} once: '
        '{words}"\n',
        new="",
        tests=(f"{STORE}::test_an_element_written_never_or_twice_is_our_mistake",),
    ),
    Mutation(
        "a piece is read from where its elements are in the whole tensor",
        "minidist/full/checkpoint/pieces.py",
        old="runs.append(read(start - run.start, stop - run.start))",
        new="runs.append(read(start, stop))",
        tests=(f"{PIECES}::test_cutting_pasting_and_putting_together",),
    ),
    Mutation(
        "a column of a block is counted from the beginning of the block",
        "minidist/full/checkpoint/pieces.py",
        old="[first:last, column : column + width]",
        new="[first:last, :width]",
        tests=(f"{PIECES}::test_cutting_pasting_and_putting_together",),
    ),
    Mutation(
        "a checkpoint of a longer run is continued",
        "minidist/full/trainer/resume.py",
        old="if step > config.run.steps:",
        new="if step < 0:",
        tests=(f"{CHECKPOINT}::test_what_does_not_fit_the_checkpoint_is_named",),
    ),
    Mutation(
        "two runs may save to one folder",
        "minidist/full/checkpoint/lock.py",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        tests=(
            f"{CHECKPOINT}::test_a_second_run_in_the_same_folder_is_refused_before_it_writes[--steps "
            "6]",
        ),
    ),
    Mutation(
        "a file wins over the flags",
        "minidist/full/trainer/flags.py",
        old="with_folder(merged(sections, flags))",
        new="with_folder(merged(flags, sections))",
        tests=(
            "tests/trainer/test_flags.py::test_flags_win_over_the_file_and_the_file_over_defaults",
        ),
    ),
    Mutation(
        "DeepSpeed's buckets are counted in elements of float32 under bfloat16",
        "minidist/full/trainer/foreign/options.py",
        old='bytes = 2 if "precision" in sections.get("run", {}) else 4',
        new="bytes = 4",
        tests=(
            "tests/trainer/foreign/test_deepspeed.py::test_buckets_are_counted_in_elements_there_and_bytes_here",
        ),
    ),
    Mutation(
        "DeepSpeed's rate falls without anybody setting the steps of the run",
        "minidist/full/trainer/foreign/names.toml",
        old='scheduler.params.total_num_steps", kind = "int", to = "run.steps"',
        new='scheduler.params.total_num_steps", kind = "int"',
        tests=(
            "tests/trainer/foreign/test_deepspeed.py::test_what_has_a_counterpart_is_translated",
        ),
    ),
]

# ---------------------------------------------------------------- floor 6: course, bench, commands; and draw

GRADE = "tests/course/test_grade.py"
ATTACKS = "tests/course/test_grade_attacks.py"

COURSE = [
    Mutation(
        "a shortcut past the messages is not looked at",
        "minidist/course/grader/contract.py",
        old="names = note.through if note.kind in verbs else own",
        new="names = note.through",
        tests=(f"{ATTACKS}::test_lean_on_the_package[a roll call]",),
    ),
    Mutation(
        "the package's own text may run under another name",
        "minidist/course/texts.py",
        old='found = "" if code in self.own else self.recognized(code)',
        new='found = ""',
        tests=(f"{ATTACKS}::test_lean_without_a_message[its text under another name]",),
    ),
    Mutation(
        "colors may carry data, a bit at a time",
        "minidist/course/grader/contract.py",
        old="    if len(splits) > task.splits * ranks:\n",
        new="    if not task.may_use and splits:\n",
        tests=(f"{ATTACKS}::test_a_rank_splits_only_a_few_times",),
    ),
    Mutation(
        "a writer that the answer has replaced writes the record",
        "minidist/course/grader/child.py",
        old='            write(folder / f"record-{share.rank}"',
        new='            record.write(folder / f"record-{share.rank}"',
        tests=(f"{ATTACKS}::test_a_patched_writer_hides_no_leaning",),
    ),
    Mutation(
        "None from an answer is told as the check's own fault",
        "minidist/course/grader/child.py",
        old="            last = watch.returned.get(threading.get_ident(), NOTHING_YET)\n",
        new="            last = NOTHING_YET\n",
        tests=(f"{GRADE}::test_none_and_other_arguments_are_told_as_the_answer_s_doing",),
    ),
    Mutation(
        "an answer's stream sends past the witness",
        "minidist/course/grader/witness.py",
        old="return Witness(self.inner.fork(name), self._note, self._watch)",
        new="return self.inner.fork(name)",
        tests=(f"{GRADE}::test_what_a_stream_sends_is_witnessed",),
    ),
    Mutation(
        "a case that leans costs its own points, and not the task's",
        "minidist/course/grader/grading.py",
        old="            if task in found:\n",
        new="            if test.status == LEANS:\n",
        tests=(f"{ATTACKS}::test_lean_in_one_case_only",),
    ),
    Mutation(
        "calls on a thread that an answer starts are not watched",
        "minidist/course/grader/watch.py",
        old="                self.switch(self.calls)\n                function(*arguments, "
        "**options)\n",
        new="                function(*arguments, **options)\n",
        tests=(f"{ATTACKS}::test_lean_without_a_message[a call on a thread]",),
    ),
    Mutation(
        "a record counts whoever has signed it",
        "minidist/course/grader/record.py",
        old="if not compare_digest(signature, digest(nonce.encode(), text, "
        '"sha256").hex().encode()):',
        new="if len(signature) != 64:",
        tests=(f"{GRADE}::test_only_a_record_that_bears_the_nonce_counts",),
    ),
    Mutation(
        "the nonce lies beside the answer",
        "minidist/course/grader/child.py",
        old="    path.unlink()\n",
        new="",
        tests=(f"{ATTACKS}::test_the_nonces_are_gone_before_the_students_code_comes",),
    ),
    Mutation(
        "a known mistake that has to be computed first is never told",
        "minidist/course/grader/compare.py",
        old="outcome = same(value() if callable(value) else value)",
        new="outcome = not callable(value) and same(value)",
        tests=(f"{GRADE}::test_what_a_wrong_value_looks_like_is_told",),
    ),
    Mutation(
        "a value that is not a number is close to all",
        "minidist/course/grader/compare.py",
        old="return bool(np.abs(found - 1.0 * expected).max() <= tolerance * largest)",
        new="return not bool(np.abs(found - 1.0 * expected).max() > tolerance * largest)",
        tests=(f"{GRADE}::test_what_a_wrong_value_looks_like_is_told",),
    ),
    Mutation(
        "a task that is not started counts as a failure",
        "minidist/course/grader/runner.py",
        old='        if error["type"] == "NotImplementedError":\n'
        '            return Ran(notes=notes, not_started=error["text"] or "not started")\n',
        new="",
        tests=(f"{GRADE}::test_a_stub_is_not_started_beside_a_task_that_is",),
    ),
]

REST = [
    Mutation(
        "a ratio is that of the medians, not of the rounds",
        "minidist/bench/measure.py",
        old=(
            "return statistics.median(\n            mine / other for mine, other in "
            "zip(self.values, peer.values, strict=True)\n        )"
        ),
        new="return self.median / peer.median",
        tests=("tests/bench/test_bench.py::test_ratios_are_taken_within_a_round",),
    ),
    Mutation(
        "an all-reduce crosses the slowest link once",
        "minidist/bench/measure.py",
        old='"all_reduce": lambda ranks: 2 * (ranks - 1) / ranks',
        new='"all_reduce": lambda ranks: (ranks - 1) / ranks',
        tests=("tests/bench/test_bench.py::test_bus_bandwidth_is_that_of_nccl_tests",),
    ),
    Mutation(
        "bounds are judged in every precision",
        "minidist/bench/report.py",
        old="(measurement.ranks, self.dtype) != (RANKS, DTYPE)",
        new="measurement.ranks != RANKS",
        tests=(
            "tests/bench/test_bench.py::test_bounds_are_judged_on_their_launch_and_never_on_another_dtype",
        ),
    ),
    Mutation(
        "FSDP is measured in float32, beside peers in 16 bits",
        "minidist/bench/gpu/competitors.py",
        old='partial(FSDP, op="sum", precision=MixedPrecision(BITS))',
        new='partial(FSDP, op="sum")',
        tests=("tests/bench/test_bench.py::test_each_competitor_is_what_it_says",),
    ),
    Mutation(
        "a competitor that is to be compiled runs eagerly",
        "minidist/bench/gpu/competitors.py",
        old="            block.compile(backend=work.backend)",
        new="            block.eval()",
        tests=("tests/bench/test_bench.py::test_each_competitor_is_what_it_says",),
    ),
    Mutation(
        "a shard's elements are those of the whole buffer",
        "minidist/bench/nccl.py",
        old="(1 if row.bench in WHOLE else row.ranks)",
        new="1",
        tests=("tests/bench/test_bench.py::test_bench_nccl_has_the_columns_of_nccl_tests",),
    ),
    Mutation(
        "a table of variants shows the rank that held the least",
        "minidist/cli/variants/compare.py",
        old="category: max(peak[category] for peak in peaks) for category",
        new="category: min(peak[category] for peak in peaks) for category",
        tests=("tests/cli/test_stages.py::test_of_unequal_stages_the_larger_is_shown",),
    ),
    Mutation(
        "the player shows what a receive brings before its rank has waited",
        "minidist/draw/observer.py",
        old="found[name][number] = self.shown[name][number]",
        new="pass",
        tests=(
            "tests/draw/test_player.py::test_what_came_early_is_shown_once_it_has_been_waited_for",
        ),
    ),
    Mutation(
        "the player counts idle time as computing",
        "minidist/draw/observer.py",
        old="idle = round(100 * (1 - self.busy / seconds)) if seconds else 0",
        new="idle = round(100 * self.busy / seconds) if seconds else 0",
        tests=("tests/draw/test_player.py::test_the_bubble_is_the_time_without_computing",),
    ),
]

MIXED = "tests/parallel/sharded/test_fsdp_traps.py::test_computing_in_bfloat16_is_what_one_would_write_by_hand"
UNITS = [
    Mutation(
        "shards in mixed precision are kept twice",
        "minidist/full/fsdp/flat.py",
        old="(replicated or values.device != self.device)",
        new="(replicated or values.device == self.device)",
        tests=(MIXED,),
    ),
    Mutation(
        "on a GPU a gather waits for gradients that have not been computed",
        "minidist/full/fsdp/passes.py",
        old="self.ahead_of_time or not unit.parameters",
        new="not unit.parameters",
        tests=(
            "tests/parallel/sharded/test_fsdp.py::test_in_backward_a_gpu_gathers_the_previous_unit_at_once",
        ),
    ),
    Mutation(
        "gradients laid end to end are not forgotten",
        "minidist/full/ddp/flatten.py",
        old="        parameter._grad = None\n    flat = parameters[0]",
        new="    flat = parameters[0]",
        tests=(MIXED,),
    ),
]

COMPILED_TEST = "tests/parallel/test_compiled.py::test_the_numbers_of_the_serial_run"
COMPILED = [
    Mutation(
        "attention is compiled apart for its second run",
        "minidist/full/layers/compiled.py",
        old="torch._dynamo.disable(attend.args[0])",
        new="attend.args[0]",
        tests=(COMPILED_TEST,),
    ),
    Mutation(
        "a compiled pipeline breaks its graphs at every product",
        "minidist/full/apply.py",
        old="fused=not parallel.recipe.compile",
        new="fused=True",
        tests=(COMPILED_TEST,),
    ),
    Mutation(
        "a model stays compiled after training",
        "minidist/full/layers/compiled.py",
        old="        as_they_were(blocks_of(parallel.model))",
        new="        pass",
        tests=(
            "tests/parallel/test_compiled.py::test_only_the_blocks_are_compiled_and_unwrapping_undoes_it",
        ),
    ),
]

# ---------------------------------------------------------------- adapters, 8 bits and ZeRO++ in a recipe

ADAPTERS_TEST = "tests/trainer/test_adapters.py::"
FEW_BITS = [
    Mutation(
        "ranks that have parts of an adapter's input do not add its products up",
        "minidist/full/tensor/styles.py",
        old="            module.join = boundary.leave",
        new="            pass",
        tests=(
            "tests/further/test_lora.py::test_adapters_of_every_matrix_are_cut_as_the_matrices_are",
        ),
    ),
    Mutation(
        "scales follow what the ranks of the data axis have seen, and not those of the tensor axis",
        "minidist/full/layers/float8.py",
        old="update_scales(parallel.model, parallel.mesh.data, parallel.mesh.tp)",
        new="update_scales(parallel.model, parallel.mesh.data)",
        tests=(ADAPTERS_TEST + "test_scales_are_equal_on_all_ranks_and_belong_to_the_checkpoint",),
    ),
    Mutation(
        "a rank's experts take the scales of the first ones",
        "minidist/full/precision/fp8_experts.py",
        old="self.mine = slice(experts.numbers.start, experts.numbers.stop)",
        new="self.mine = slice(0, len(experts.numbers))",
        tests=(
            "tests/parallel/expert/test_experts_in_8_bits.py::"
            "test_whoever_has_an_expert_its_scales_are_those_of_the_serial_layer",
        ),
    ),
    Mutation(
        "a pipeline takes products in 8 bits for its own",
        "minidist/full/pipeline/weight_gradients.py",
        old="if any(isinstance(part, Float8Multiply) for part in layer.children()):",
        new="if False:",
        tests=(ADAPTERS_TEST + "test_every_product_of_the_blocks_is_one_of_8_bits",),
    ),
    Mutation(
        "a model that ZeRO++ gives back is rounded to 8 bits",
        "minidist/further/zero_plus_plus/zero_plus_plus.py",
        old="        self.nodes.exact = True",
        new="        pass",
        tests=("tests/further/test_zero_plus_plus.py::test_what_is_read_is_not_rounded",),
    ),
    Mutation(
        "adapters go on beside whatever weights are there",
        "minidist/full/trainer/resume.py",
        old=(
            "    if before != now:\n"
            "        raise CheckpointError(\n"
            '            f"{path} has adapters'
        ),
        new=('    if not now:\n        raise CheckpointError(f"{path} has adapters'),
        tests=(ADAPTERS_TEST + "test_a_base_that_changed_or_is_gone_is_named",),
    ),
]

FLASH = "tests/parallel/test_flash.py"
CONTEXT = [
    Mutation(
        "a larger score does not shrink what was summed before",
        "minidist/full/context/flash.py",
        old="shrink * output[..., rows, :] + weights",
        new="output[..., rows, :] + weights",
        tests=(f"{FLASH}::test_it_is_softmax_attention",),
    ),
    Mutation(
        "tiles above the diagonal are computed as those below",
        "minidist/full/context/flash.py",
        old="min(keys, rows.stop) if causal else keys",
        new="keys",
        tests=(f"{FLASH}::test_it_is_softmax_attention",),
    ),
    Mutation(
        "tiles that a window does not see are computed and masked",
        "minidist/full/context/flash.py",
        old="if blocks is None or blocks[top // tile][left // tile]:",
        new="if True:",
        tests=(f"{FLASH}::test_a_window_is_softmax_with_its_mask_and_leaves_tiles_out[7]",),
    ),
    Mutation(
        "torch's kernel gets rows that are scattered in memory",
        "minidist/full/context/flash.py",
        old="return x if x.stride(-1) == 1 else x.contiguous()",
        new="return x",
        tests=(f"{FLASH}::test_any_layout_in_memory_gives_the_same",),
    ),
    Mutation(
        "a GPU computes by a kernel what has no keys",
        "minidist/full/context/flash.py",
        old="row <= 512 and query.numel() > 0 and key.numel() > 0",
        new="row <= 512",
        tests=(f"{FLASH}::test_a_gpu_takes_the_kernels_where_they_are_right",),
    ),
    Mutation(
        "partial results of 16 bits are rounded before they are merged",
        "minidist/full/context/flash.py",
        old="output.to(dtype or q.dtype)",
        new="output.to(dtype or query.dtype)",
        tests=(f"{FLASH}::test_partial_results_are_not_rounded_to_16_bits",),
    ),
]

ACROSS = "tests/parallel/context/test_context_parallel.py"
IN_SIGHT = "tests/parallel/context/test_in_sight.py"
CONTEXT += [
    Mutation(
        "partial results merge with the weights of each other",
        "minidist/full/context/blocks.py",
        old="torch.sigmoid(its - lse)",
        new="torch.sigmoid(lse - its)",
        tests=(f"{ACROSS}::test_parity",),
    ),
    Mutation(
        "a striped rank's token sees the one after it",
        "minidist/full/context/order.py",
        old="Meeting(slice(1, None), slice(-1), causal=True)",
        new="Meeting(slice(1, None), slice(1, None), causal=True)",
        tests=(f"{ACROSS}::test_parity",),
    ),
    Mutation(
        "a plan takes a window for as wide as all of a rank's tokens",
        "minidist/plan/traffic.py",
        old="left = window - 1 - (min(later) - j - 1) * chunk",
        new="left = chunk",
        tests=("tests/plan/test_second_opinion.py::test_tokens_that_are_seen_are_counted",),
    ),
    Mutation(
        "all keys of a rank travel, seen or not",
        "minidist/full/context/order.py",
        old="return change.cumsum(0)[:-1].nonzero().flatten()",
        new="return torch.arange(len(keys))",
        tests=(
            f"{IN_SIGHT}::test_bytes_and_messages_are_those_of_the_tokens_that_are_seen",
            f"{IN_SIGHT}::test_documents_that_end_where_a_rank_does_send_nothing",
        ),
    ),
    Mutation(
        "gradients of the keys that another rank saw are lost",
        "minidist/full/context/in_sight.py",
        old="            total.index_add_(-2, places.to(total.device), arrive())\n",
        new="            arrive()\n",
        tests=(f"{IN_SIGHT}::test_parity",),
    ),
    Mutation(
        "the next block travels only before this one is met",
        "minidist/full/context/ring.py",
        old="            yield (rank - hop) % ranks, block\n",
        new="            arriving.wait()\n            yield (rank - hop) % ranks, block\n",
        tests=(f"{ACROSS}::test_the_next_block_travels_beside_computing",),
    ),
    Mutation(
        "gradients of keys are summed in 16 bits",
        "minidist/full/context/blocks.py",
        old="to_block = torch.zeros_like(block, dtype=wide(key))",
        new="to_block = torch.zeros_like(block)",
        tests=(f"{ACROSS}::test_bytes_and_messages_are_those_of_the_formulas",),
    ),
    Mutation(
        "ranks of the context axis keep gradients for themselves",
        "minidist/full/apply.py",
        old="reduce=mesh.data.size > 1",
        new="reduce=mesh.dp.size > 1",
        tests=("tests/parallel/test_random_layouts.py::test_every_layout",),
    ),
    Mutation(
        "a probe of attention takes a scale for another",
        "minidist/full/context/probe.py",
        old="tolerance = 1e-4 if",
        new="tolerance = 10 if",
        tests=(f"{ACROSS}::test_another_attention_is_refused_before_anything_is_sent",),
    ),
    Mutation(
        "a probe of attention that has asked in evaluation does not ask again in training",
        "minidist/full/context/probe.py",
        old="tokens, module.training",
        new="tokens",
        tests=(f"{ACROSS}::test_dropout_is_found_when_training_begins",),
    ),
    Mutation(
        "experts that all ranks copy are cut among all, beside groups",
        "minidist/full/fsdp/ranks.py",
        old="return self.shard_comm if copies is self.comm else copies",
        new="return copies",
        tests=("tests/parallel/expert/test_expert_parallel.py::test_parity",),
    ),
    Mutation(
        "a layer of FSDP computes with NaN outside of its unit",
        "minidist/full/fsdp/flat.py",
        old="            hide(parameter, self.shard.placements[parameter].name)\n",
        new="",
        tests=(
            "tests/parallel/sharded/test_fsdp_traps.py::test_a_method_that_nobody_registered_says_so_in_place_of_nan",
        ),
    ),
    Mutation(
        "a unit is freed by a forward in the midst of its own method",
        "minidist/full/fsdp/passes.py",
        old="        if unit.training_state is TrainingState.METHOD:\n            return output\n",
        new="",
        tests=(
            "tests/parallel/sharded/test_fsdp_traps.py::test_methods_of_units_train_and_evaluate_as_in_a_serial_run",
        ),
    ),
]

# ---------------------------------------------------------------- machines fail

VIEWS = "tests/comm/test_membership.py"
ELASTIC = "tests/trainer/test_elastic.py"
GOODPUT = "tests/plan/test_goodput.py"

FAILURES = [
    Mutation(
        "half of the members is a majority",
        "minidist/full/comm/membership/agreement.py",
        old="return not voters or 2 * len(here) > len(voters) or tied",
        new="return not voters or 2 * len(here) >= len(voters)",
        tests=(f"{VIEWS}::test_of_two_parts_that_cannot_see_each_other_at_most_one_goes_on",),
    ),
    Mutation(
        "the dead vote",
        "minidist/full/comm/membership/agreement.py",
        old="voters = [member for member in last.members if member not in dead]",
        new="voters = list(last.members)",
        tests=(f"{VIEWS}::test_the_view_that_follows",),
    ),
    Mutation(
        "a place of a replica goes to whoever had the lowest rank, though another is further",
        "minidist/full/comm/membership/agreement.py",
        old="return -each.done, ranks.get(each.member, len(ranks))",
        new="return 0, ranks.get(each.member, len(ranks))",
        tests=(f"{VIEWS}::test_the_view_that_follows",),
    ),
    Mutation(
        "a survivor takes any place of a replica",
        "minidist/full/comm/membership/agreement.py",
        old="if each.done >= 0 and each.place == place]",
        new="if each.done >= 0 and place == 0]",
        tests=(f"{VIEWS}::test_the_view_that_follows",),
    ),
    Mutation(
        "a view with a dead member goes on until somebody says that it is over",
        "minidist/full/comm/membership/member.py",
        old="return bool(over) or not self.dead().isdisjoint(self.view.members)",
        new="return bool(over)",
        tests=(f"{VIEWS}::test_a_view_is_over_once_a_member_is_dead",),
    ),
    Mutation(
        "who is ready for a step does not take it though others have",
        "minidist/full/trainer/elastic/carry.py",
        old="return 0 <= step in (self.done, self.done + self.ready)",
        new="return 0 <= step == self.done",
        tests=(f"{ELASTIC}::test_who_takes_a_step_late_keeps_what_is_known_of_it",),
    ),
    Mutation(
        "a replacement gets weights, but begins its optimizer anew",
        "minidist/full/trainer/elastic/carry.py",
        old="    trainer.optimizer.restore(states)\n",
        new="",
        tests=(f"{ELASTIC}::test_a_member_may_die_at_any_event[dp, with a spare-1-5-0.0]",),
    ),
    Mutation(
        "after a loss the batches go on behind the one that was not trained on",
        "minidist/full/trainer/elastic/carry.py",
        old="trainer.start.batches.load_state_dict(holder.position)",
        new="trainer.start.batches.load_state_dict(holder.reached or holder.position)",
        tests=(f"{ELASTIC}::test_a_member_may_die_at_any_event[dp, on what is left-0-5-0.0]",),
    ),
    Mutation(
        "a step that was due to be saved or measured when a rank was lost is not",
        "minidist/full/trainer/loop.py",
        old="            self._after_step(self.last, reporter, None if saved else writer)\n",
        new="            pass\n",
        tests=(f"{ELASTIC}::test_the_last_checkpoint_and_no_measurement_is_lost",),
    ),
    Mutation(
        "a failure on the way back does not begin the restart anew",
        "minidist/plan/failures/simulate.py",
        old="            if ready <= self.fails:\n",
        new="            if True:\n",
        tests=(f"{GOODPUT}::test_the_simulation_is_the_closed_form_where_there_is_one",),
    ),
    Mutation(
        "spares never run out",
        "minidist/plan/failures/simulate.py",
        old="if len(self.away) <= job.spares:",
        new="if job.spares:",
        tests=(f"{GOODPUT}::test_spares_run_out",),
    ),
    Mutation(
        "a rank is scored by its step, waiting included",
        "minidist/full/trainer/observed/meter.py",
        old="computed = self.comm.clock() - self.started - waited",
        new="computed = self.comm.clock() - self.started",
        tests=("tests/trainer/test_observed.py::test_train_names_it",),
    ),
    Mutation(
        "who has more rows is slow",
        "minidist/full/trainer/observed/stragglers.py",
        old="each = [seconds / max(1, count) for",
        new="each = [seconds / max(1, count) ** 0 for",
        tests=("tests/trainer/test_observed.py::test_more_rows_or_other_layers_are_no_fault",),
    ),
    Mutation(
        "a member that has left and waits outside counts twice",
        "minidist/full/comm/membership/agreement.py",
        old="{each for each in outside if each.member not in view.members}",
        new="set(outside)",
        tests=(f"{VIEWS}::test_a_view_grows_only_by_whole_replicas",),
    ),
    Mutation(
        "a rank that computes on as the program ends comes back when Python is gone",
        "minidist/full/comm/job/background.py",
        old="        thread.interrupt()\n    _still_working",
        new="        pass\n    _still_working",
        tests=(
            "tests/comm/test_background.py::"
            "test_a_rank_that_computes_on_after_another_has_failed_does_not_abort_the_program",
        ),
    ),
    Mutation(
        "a thread frees its process group while Python ends",
        "minidist/full/comm/job/background.py",
        old="            with self.working():\n                del self._held\n",
        new="            pass\n",
        tests=(
            "tests/comm/test_background.py::"
            "test_a_thread_that_leaves_frees_what_it_was_called_with_before_python_ends",
        ),
    ),
]

COMPRESS = "tests/further/test_compress.py"

COMPRESSION = [
    Mutation(
        "PowerSGD keeps what all ranks have not sent, in place of its own",
        "minidist/further/compress/power_sgd.py",
        old="            own = matrix.right.T\n",
        new="            own = matrix.right.T * comm.size\n",
        tests=(f"{COMPRESS}::test_what_was_sent_and_what_is_kept_back_are_all_gradients",),
    ),
    Mutation(
        "PowerSGD begins each step with the first factor",
        "minidist/further/compress/power_sgd.py",
        old="            torch.mm(whole, matrix.right, out=matrix.left)\n",
        new="            torch.mm(whole, torch.ones_like(matrix.right), out=matrix.left)\n",
        tests=(f"{COMPRESS}::test_the_warm_start_finds_the_best_factors",),
    ),
    Mutation(
        "an index that several ranks send is the last one's",
        "minidist/full/ddp/compress/top_k.py",
        old="            total.index_add_(0, indices, addends)\n",
        new="            total.index_copy_(0, indices, addends)\n",
        tests=(f"{COMPRESS}::test_an_index_that_several_ranks_send_adds_up",),
    ),
    Mutation(
        "velocities go on after they were sent",
        "minidist/full/ddp/compress/top_k.py",
        old="            new[chosen] = 0\n",
        new="",
        tests=(f"{COMPRESS}::test_kept_velocities_are_those_of_momentum",),
    ),
    Mutation(
        "what rounding a sum to signs loses is lost",
        "minidist/further/compress/one_bit.py",
        old="        rest[comm.rank] += (mine - sent)[0]\n",
        new="",
        tests=(f"{COMPRESS}::test_nothing_is_lost_by_signs",),
    ),
    Mutation(
        "what ranks that are gone have kept back is lost",
        "minidist/full/checkpoint/remembered.py",
        old="    for rank in itertools.count(copies.rank, copies.size):\n",
        new="    for rank in (copies.rank,):\n",
        tests=(
            "tests/trainer/checkpoint/test_resume_mesh.py::"
            "test_what_other_ranks_kept_back_is_not_lost",
        ),
    ),
]

# ---------------------------------------------------------------- slow wires and old weights

SITES = "tests/parallel/sites/test_sites.py::"
STALE = "tests/parallel/stale/test_stale.py::"

OLD_WEIGHTS = [
    Mutation(
        "sites climb: after minus before",
        "minidist/full/slow_wires/outer.py",
        old="torch.sub(fragment.shared, fragment.change, out=fragment.change)",
        new="torch.sub(fragment.change, fragment.shared, out=fragment.change)",
        tests=(f"{SITES}test_plain_steps_that_meet_each_time_are_data_parallelism",),
    ),
    Mutation(
        "the outer step is plain momentum, not Nesterov's",
        "minidist/full/slow_wires/outer.py",
        old="step = step.add(fragment.velocity, alpha=meetings.momentum)",
        new="step = fragment.velocity.clone()",
        tests=(f"{SITES}test_meeting_each_time_with_momentum_is_nesterov_of_the_mean_gradient",),
    ),
    Mutation(
        "an outer step is taken on the rounded weights",
        "minidist/full/slow_wires/outer.py",
        old="            return self.optimizer.master_of(parameter)\n",
        new="            return parameter.detach()\n",
        tests=(f"{SITES}test_the_outer_step_is_taken_on_masters",),
    ),
    Mutation(
        "what is not sent of an outer step is forgotten",
        "minidist/further/sparse_step/sparse_step.py",
        old="        self.error.copy_(kept)\n",
        new="        self.error.zero_()\n",
        tests=(f"{SITES}test_a_sparse_step_loses_nothing_for_good",),
    ),
    Mutation(
        "a site divides by all tokens, not by its share",
        "minidist/full/trainer/loop.py",
        old="mean = sum_of(logits, part.targets) * sites / part.tokens",
        new="mean = sum_of(logits, part.targets) / part.tokens",
        tests=(f"{SITES}test_sites_report_their_share_of_the_serial_loss",),
    ),
    Mutation(
        "a backward uses newer weights than its forward",
        "minidist/further/stale/pipeline.py",
        old="                parameter.data = parameter.data.clone()\n",
        new="                pass\n",
        tests=(f"{STALE}test_pipedream_is_sgd_with_the_delay_of_each_stage",),
    ),
    Mutation(
        "versions are kept for ever",
        "minidist/further/stale/pipeline.py",
        old="        users[used] -= self.plan.batch\n",
        new="",
        tests=(f"{STALE}test_versions_are_as_many_as_the_table_says",),
    ),
    Mutation(
        "sites that meet in every step fail as seldom as one",
        "minidist/plan/sites/stops.py",
        old="mtbf=job.mtbf / sites",
        new="mtbf=job.mtbf",
        tests=(
            "tests/plan/test_planned_sites.py::test_sites_that_meet_in_every_step_stop_together",
        ),
    ),
    Mutation(
        "a site that stops alone loses one step",
        "minidist/plan/sites/stops.py",
        old="step=step * way.every, stall",
        new="step=step, stall",
        tests=(
            "tests/plan/test_planned_sites.py::test_a_site_that_stops_alone_loses_what_it_did_since_sites_met",
        ),
    ),
    Mutation(
        "a worker takes a version that is one too new",
        "minidist/further/stale/server.py",
        old="        take(max(0, step - stale))\n",
        new="        take(max(0, step - stale + (stale > 0)))\n",
        tests=(f"{STALE}test_a_stale_server_is_sgd_with_a_delay",),
    ),
]

MUTATIONS = [
    *(*TRACE, *COMM, *COLLECTIVES, *MESH_AND_MODEL),
    *(
        *DATA,
        *SHARDED,
        *OPTIMIZER,
        *TENSOR,
        *PIPELINE,
        *CONTEXT,
        *EXPERTS,
        *MEMORY,
        *COMPILED,
        *FEW_BITS,
        *UNITS,
    ),
    *(*TRAINER, *COURSE, *REST, *FAILURES, *COMPRESSION, *OLD_WEIGHTS),
]
