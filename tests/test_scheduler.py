"""What a step holds: admission, chunks, preemption, ends; and the stories of faults that other engines had."""

import random

import pytest
from fakes import (
    LOOKAHEADS,
    VOCAB_SIZE,
    LetterTokenizer,
    Watch,
    make_engine,
    make_llm,
    naive_completion,
    run_until_idle,
)

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

BOTH_LOOPS = pytest.mark.parametrize("lookahead", LOOKAHEADS)
WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED


def make_scheduler(num_blocks, block_size, *, end_token_ids=(), **knobs):
    knobs = {"greedy_admission": True, **knobs}  # nano-vLLM's rule, on which the examples are built
    config = Config("fake", num_kvcache_blocks=num_blocks, kvcache_block_size=block_size, **knobs)
    return Scheduler(config, end_token_ids)


def add(scheduler, token_ids, seq_id=0, **params):
    seq = Sequence(token_ids, SamplingParams(**params), seq_id)
    scheduler.add(seq)
    return seq


def distinct(num_tokens, start):
    """Return a prompt that shares nothing with prompts of another start."""
    return range(start, start + num_tokens)


def book(scheduler, seqs, is_prefill, token_id=7):
    """Book a step in which every sequence whose tokens are all computed samples ``token_id``."""
    scheduler.launched(seqs)
    scheduler.postprocess(seqs, [token_id if seq.num_pending_tokens else None for seq in seqs], is_prefill)


def step(scheduler, token_id=7):
    """Run one synchronous step; return its sequences, the tokens each computes, and whether it is a prefill."""
    seqs, is_prefill = scheduler.schedule()
    num_tokens = [seq.num_scheduled_tokens for seq in seqs]
    book(scheduler, seqs, is_prefill, token_id)
    scheduler.block_manager.check_invariants()
    return seqs, num_tokens, is_prefill


def greedy(max_tokens, ignore_eos=True):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def run_all(engine, prompts, params):
    """Hand in prompts, run to the end, return outputs in order."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = run_until_idle(engine)
    assert set(outputs) == set(ids)
    return [outputs[id_] for id_ in ids]


# Admission and continuous batching.


@BOTH_LOOPS
def test_a_finished_place_is_filled_at_the_next_step(lookahead):
    engine = make_engine(100, 4, max_num_seqs=3, lookahead=lookahead)
    watch = Watch(engine)
    for i, num_tokens in enumerate((3, 8, 5, 4, 6)):
        engine.add_request([i, i, i], greedy(num_tokens))
    run_until_idle(engine)
    pattern = "".join("P" if is_prefill else "D" for is_prefill, _ in engine.model_runner.log)
    assert pattern == "PDDPDDPDDDDD"
    assert [[seq_id for seq_id, _, _ in rows] for _, rows in engine.model_runner.log] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2],
        [3],
        [1, 2, 3],
        [1, 2, 3],
        [4],
        [1, 3, 4],
        [1, 4],
        [1, 4],
        [4],
        [4],
    ]
    assert watch.most_alive == 3


def test_prefill_comes_first_and_running_sequences_keep_place_and_blocks():
    scheduler = make_scheduler(10, 4)
    first = add(scheduler, distinct(3, 0))
    assert step(scheduler) == ([first], [3], True)
    second = add(scheduler, distinct(2, 10))
    assert step(scheduler) == ([second], [2], True)
    assert (first.block_table, first.num_tokens, scheduler.running) == ([0], 4, [first, second])
    assert step(scheduler) == ([first, second], [1, 1], False)


def test_requests_are_admitted_first_come_first_served():
    scheduler = make_scheduler(4, 4)
    first = add(scheduler, distinct(12, 0))
    large, small = add(scheduler, distinct(8, 100)), add(scheduler, distinct(2, 200))
    assert step(scheduler)[0] == [first]  # large does not fit, and small does not overtake it
    assert list(scheduler.waiting) == [large, small]


def test_states_change_where_they_should():
    scheduler = make_scheduler(4, 4, max_num_batched_tokens=4)
    seq = add(scheduler, distinct(6, 0), max_tokens=2)
    assert seq.status is WAITING
    assert step(scheduler)[1:] == ([4], True)
    assert seq.status is WAITING  # half prefilled: at the head of the queue, with all its blocks
    assert (list(scheduler.waiting), scheduler.running, len(seq.block_table)) == ([seq], [], 2)
    seqs, is_prefill = scheduler.schedule()
    assert seq.status is RUNNING  # when its last prompt token is scheduled
    assert (list(scheduler.waiting), scheduler.running) == ([], [seq])
    book(scheduler, seqs, is_prefill)
    assert step(scheduler)[1:] == ([1], False)
    assert (seq.status, seq.finish_reason, seq.block_table) == (FINISHED, "length", [])
    assert scheduler.take_finished() == [seq]
    assert scheduler.take_finished() == []
    assert scheduler.is_finished()


def test_only_uncached_tokens_are_scheduled():
    scheduler = make_scheduler(10, 256)
    add(scheduler, distinct(500, 0), max_tokens=1)
    step(scheduler)
    again = add(scheduler, [*range(300), *distinct(200, 5000)])
    assert step(scheduler) == ([again], [244], True)
    assert again.num_prefix_hit_tokens == 256


def test_hits_do_not_count_against_the_budget():
    scheduler = make_scheduler(20, 4, max_num_batched_tokens=12)
    add(scheduler, distinct(8, 0), max_tokens=1)
    step(scheduler)
    first, second = add(scheduler, distinct(6, 100)), add(scheduler, distinct(12, 0))
    assert step(scheduler) == ([first, second], [6, 4], True)


# Chunks.


def test_a_long_prompt_is_cut_only_when_it_is_first():
    scheduler = make_scheduler(100, 256, max_num_batched_tokens=1024)
    a, b, c = (add(scheduler, distinct(n, start)) for n, start in ((512, 0), (200, 10_000), (3000, 20_000)))
    steps = [step(scheduler) for _ in range(5)]
    assert steps == [
        ([a, b], [512, 200], True),
        ([c], [1024], True),
        ([c], [1024], True),
        ([c], [952], True),
        ([a, b, c], [1, 1, 1], False),
    ]


def test_a_chunk_that_ends_a_prompt_leaves_its_budget_to_the_next():
    scheduler = make_scheduler(100, 4, max_num_batched_tokens=8)
    long, short = add(scheduler, distinct(12, 0)), add(scheduler, distinct(4, 100))
    assert step(scheduler) == ([long], [8], True)
    assert step(scheduler) == ([long, short], [4, 4], True)


def test_an_unfinished_chunk_samples_nothing():
    scheduler = make_scheduler(100, 4, max_num_batched_tokens=4)
    seq = add(scheduler, distinct(10, 0))
    for num_known in (10, 10, 11):
        step(scheduler)
        assert (seq.num_tokens, seq.num_pending_tokens, len(seq.token_ids)) == (num_known, 0, num_known)


def test_blocks_of_a_half_prefilled_prompt_are_offered_as_soon_as_they_are_written():
    scheduler = make_scheduler(100, 4, max_num_batched_tokens=8)
    add(scheduler, distinct(12, 0))
    scheduler.schedule()
    assert scheduler.block_manager.hash_to_block_id == {}
    book(scheduler, list(scheduler.waiting), True)
    assert len(scheduler.block_manager.hash_to_block_id) == 2


# Preemption.


def test_the_youngest_is_preempted_and_at_last_a_sequence_preempts_itself():
    scheduler = make_scheduler(3, 4)
    d, e, f = (add(scheduler, distinct(4, start), seq_id) for seq_id, start in enumerate((0, 100, 200)))
    assert step(scheduler) == ([d, e, f], [4, 4, 4], True)
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([d], False)
    assert list(scheduler.waiting) == [e, f]
    assert scheduler.running == [d]
    assert (e.status, f.status) == (WAITING, WAITING)
    assert d.block_table == [0, 2]  # F's block
    assert (e.block_table, f.block_table) == ([], [])
    assert (e.num_cached_tokens, f.num_cached_tokens) == (0, 0)
    assert (e.num_tokens, f.num_tokens) == (5, 5)  # the sampled token is kept
    assert scheduler.num_preemptions == 2
    scheduler.block_manager.check_invariants([d])


def test_a_sequence_preempts_itself_when_it_is_the_youngest():
    scheduler = make_scheduler(3, 256)
    a, b = add(scheduler, distinct(299, 0), 0, max_tokens=None), add(scheduler, distinct(149, 1000), 1, max_tokens=None)
    assert step(scheduler) == ([a, b], [299, 149], True)
    assert (a.num_tokens, b.num_tokens) == (300, 150)
    for _ in range(107):
        assert step(scheduler) == ([a, b], [1, 1], False)
    assert (a.num_tokens, b.num_tokens) == (407, 257)
    assert step(scheduler) == ([a], [1], False)
    assert list(scheduler.waiting) == [b]
    assert (b.status, b.num_tokens, b.block_table) == (WAITING, 257, [])


def test_a_preempted_sequence_waits_before_newcomers_and_recomputes_only_what_is_not_cached():
    scheduler = make_scheduler(5, 4)
    a, b = add(scheduler, distinct(8, 0), 0, max_tokens=5), add(scheduler, distinct(7, 100), 1, max_tokens=20)
    newcomer = add(scheduler, distinct(12, 200), 2)
    assert step(scheduler) == ([a, b], [8, 7], True)
    assert step(scheduler) == ([a, b], [1, 1], False)  # a takes the last free block; b holds 9 tokens now
    assert step(scheduler) == ([a], [1], False)
    assert list(scheduler.waiting) == [b, newcomer]
    assert step(scheduler) == ([a], [1], False)  # b needs 3 blocks and 2 are free
    assert step(scheduler) == ([a], [1], False)
    assert a.is_finished
    assert step(scheduler) == ([b], [1], True)  # its two full blocks are hits: one token of nine is left
    assert b.num_prefix_hit_tokens == 0  # hits at first admission


def test_a_preempted_sequence_with_a_pending_token_waits_until_that_token_is_known():
    scheduler = make_scheduler(3, 4)
    d, e = add(scheduler, distinct(4, 0), 0), add(scheduler, distinct(8, 100), 1)
    first, _ = scheduler.schedule()
    scheduler.launched(first)
    assert (d.num_pending_tokens, e.num_pending_tokens) == (1, 1)
    second, _ = scheduler.schedule()  # e gives way to d while its first token is under way
    scheduler.launched(second)
    assert (second, list(scheduler.waiting), e.num_pending_tokens) == ([d], [e], 1)
    scheduler.abort(d)  # so that all blocks are free
    assert scheduler.schedule() == ([], False)
    scheduler.postprocess(first, [5, 6], True)
    assert (e.token_ids[-1], e.num_pending_tokens) == (6, 0)
    assert scheduler.schedule() == ([e], True)


def test_a_pending_token_that_turns_out_to_be_the_end_finishes_a_preempted_sequence():
    scheduler = make_scheduler(3, 4, end_token_ids=[6])
    add(scheduler, distinct(4, 0), 0)
    e = add(scheduler, distinct(8, 100), 1)
    first, _ = scheduler.schedule()
    scheduler.launched(first)
    second, _ = scheduler.schedule()
    scheduler.launched(second)
    scheduler.postprocess(first, [5, 6], True)
    assert (e.status, e.finish_reason, e.completion_token_ids) == (FINISHED, "stop", [6])
    scheduler.postprocess(second, [5], False)
    seqs, is_prefill = scheduler.schedule()
    assert (e in seqs, is_prefill, list(scheduler.waiting)) == (False, False, [])


# Steps under way.


def test_an_end_by_length_is_foreseen_and_its_place_and_blocks_are_free_at_once():
    scheduler = make_scheduler(2, 4, max_num_seqs=1)
    first, second = add(scheduler, distinct(8, 0), 0, max_tokens=1), add(scheduler, distinct(8, 100), 1)
    seqs, is_prefill = scheduler.schedule()
    scheduler.launched(seqs)
    assert (first.block_table, scheduler.running, first.is_finished) == ([], [], False)
    assert scheduler.schedule() == ([second], True)
    scheduler.postprocess(seqs, [5], is_prefill)
    assert (first.finish_reason, first.completion_token_ids) == ("length", [5])


def test_an_end_by_stop_token_is_found_one_step_late_and_the_extra_token_is_dropped():
    scheduler = make_scheduler(4, 4, end_token_ids=[6])
    seq = add(scheduler, distinct(3, 0))
    first, _ = scheduler.schedule()
    scheduler.launched(first)
    second, _ = scheduler.schedule()
    scheduler.launched(second)
    assert (first, second) == ([seq], [seq])
    scheduler.postprocess(first, [6], True)
    assert (seq.finish_reason, seq.completion_token_ids, seq.block_table) == ("stop", [6], [])
    scheduler.postprocess(second, [6], False)
    assert seq.completion_token_ids == [6]
    assert scheduler.take_finished() == [seq]


def test_a_block_that_fills_up_is_offered_only_once_its_tokens_are_known():
    scheduler = make_scheduler(4, 4)
    add(scheduler, distinct(3, 0))
    first, _ = scheduler.schedule()
    scheduler.launched(first)
    second, _ = scheduler.schedule()
    scheduler.launched(second)  # the fourth token is computed, though not known
    assert scheduler.block_manager.hash_to_block_id == {}
    scheduler.postprocess(first, [9], True)
    assert scheduler.block_manager.hash_to_block_id == {BlockManager.compute_hash([0, 1, 2, 9]): 0}


@BOTH_LOOPS
@pytest.mark.parametrize(("max_tokens", "num_cached"), [(1, 4), (2, 4), (3, 8), (6, 8), (7, 12)])
def test_the_next_turn_of_a_dialog_finds_all_full_blocks_of_the_last_one(max_tokens, num_cached, lookahead):
    """With lookahead, a block that the last token but one completed was given up before that token was known."""
    llm = make_llm(20, 4, lookahead=lookahead)
    prompt = list(distinct(6, 0))
    (first,) = llm.generate([prompt], greedy(max_tokens), use_tqdm=False)
    (second,) = llm.generate([prompt + first.token_ids + [1]], greedy(1), use_tqdm=False)
    assert second.num_cached_tokens == num_cached  # all but the last token were computed


# Ends.


def test_an_end_token_ends_a_sequence_unless_it_ignores_end_tokens():
    scheduler = make_scheduler(9, 4, end_token_ids=[6, 8])
    one, two = add(scheduler, [1], 0, max_tokens=3), add(scheduler, [2], 1, max_tokens=3, ignore_eos=True)
    other_end = add(scheduler, [3], 2, max_tokens=3)
    seqs, is_prefill = scheduler.schedule()
    scheduler.postprocess(seqs, [6, 6, 5], is_prefill)
    seqs, is_prefill = scheduler.schedule()
    assert seqs == [two, other_end]
    scheduler.postprocess(seqs, [5, 8], is_prefill)
    step(scheduler, 6)
    assert [(seq.completion_token_ids, seq.finish_reason) for seq in (one, two, other_end)] == [
        ([6], "stop"),
        ([6, 5, 6], "length"),
        ([5, 8], "stop"),
    ]


def test_an_end_token_at_the_length_limit_is_a_stop():
    scheduler = make_scheduler(9, 4, end_token_ids=[6])
    seq = add(scheduler, [1], max_tokens=2)
    step(scheduler, 5)
    step(scheduler, 6)
    assert (seq.completion_token_ids, seq.finish_reason) == ([5, 6], "stop")


@BOTH_LOOPS
def test_the_last_sampled_token_needs_no_slot(lookahead):
    engine = make_engine(4, 4, lookahead=lookahead)
    prompt = [i % 11 for i in range(16)]
    (output,) = run_all(engine, [prompt], greedy(1))
    assert (output.token_ids, output.finish_reason, output.error) == (*naive_completion(prompt, greedy(1)), None)
    assert len(output.token_ids) == 1


# Abort.


@BOTH_LOOPS
@pytest.mark.parametrize("state", ["waiting", "half prefilled", "running"])
def test_an_aborted_request_leaves_nothing_behind(state, lookahead):
    engine = make_engine(9, 4, lookahead=lookahead, max_num_batched_tokens=8)
    watch = Watch(engine)
    engine.add_request([i % 7 for i in range(8 if state == "running" else 22)], greedy(6))
    engine.add_request([3, 1, 4], greedy(6))
    if state == "half prefilled":
        engine.step()
        assert engine.scheduler.waiting[0].block_table
    elif state == "running":
        while len(engine.scheduler.running) < 2:
            engine.step()
        engine.step()
    engine.abort(0)
    assert not watch.seqs[0].block_table
    outputs = run_until_idle(engine)
    assert outputs.keys() == {1}
    assert (outputs[1].token_ids, outputs[1].finish_reason) == naive_completion([3, 1, 4], greedy(6))
    assert not engine.scheduler.block_manager.used_block_ids
    assert not engine._requests
    assert engine.step() == ([], 0)


@BOTH_LOOPS
@pytest.mark.parametrize("at_wait", [1, 2, 3])
def test_a_request_can_be_aborted_while_its_step_is_under_way(at_wait, lookahead):
    engine = make_engine(8, 4, lookahead=lookahead, max_num_batched_tokens=8)
    watch = Watch(engine)
    engine.add_request([1, 2, 3], greedy(3))  # its last token is under way at the third wait
    engine.add_request([3, 1, 4], greedy(6))
    engine.model_runner.on_wait = lambda number: engine.abort(0) if number == at_wait else None
    outputs = run_until_idle(engine)
    assert outputs.keys() == {1}
    assert outputs[1].token_ids == naive_completion([3, 1, 4], greedy(6))[0]
    assert len(watch.seqs[0].completion_token_ids) == at_wait - 1
    assert not engine.scheduler.block_manager.used_block_ids


@BOTH_LOOPS
def test_a_preempted_request_can_be_aborted(lookahead):
    engine = make_engine(4, 4, lookahead=lookahead)
    Watch(engine)
    old, young = [1, 2, 3, 4, 5, 6, 7], [8, 9, 1, 2, 3, 4, 5]
    engine.add_request(old, greedy(8))
    engine.add_request(young, greedy(8))
    while not engine.scheduler.num_preemptions:
        assert not engine.step()[0]
    assert [seq.seq_id for seq in engine.scheduler.waiting] == [1]
    engine.abort(1)
    outputs = run_until_idle(engine)
    assert outputs.keys() == {0}
    assert outputs[0].token_ids == naive_completion(old, greedy(8))[0]
    assert not engine.scheduler.block_manager.used_block_ids


def test_aborting_unknown_and_ended_requests_does_nothing():
    engine = make_engine(8, 4)
    (output,) = run_all(engine, [[1, 2]], greedy(2))
    engine.abort(output.request_id)
    engine.abort(12345)
    assert engine.is_finished()
    assert engine.step() == ([], 0)


def test_an_aborted_place_is_filled_again():
    engine = make_engine(8, 4, max_num_seqs=1, lookahead=0)
    first, second = engine.add_request([1, 2], greedy(50)), engine.add_request([3, 4], greedy(3))
    engine.step()
    engine.abort(first)
    assert engine.step() == ([], 2)  # the second one's prefill
    assert run_until_idle(engine)[second].token_ids == naive_completion([3, 4], greedy(3))[0]


# Stories of faults; the numbers are the smallest input that showed them.


@BOTH_LOOPS
def test_a_row_without_kv_memory_ends_with_an_error_and_the_others_go_on(lookahead):
    """KV memory ran out in the middle of a decode, and a bare assert killed the whole batch."""
    engine = make_engine(2, 256, lookahead=lookahead)
    prompt = [i * i % 11 for i in range(512)]
    too_long, other = run_all(engine, [prompt, [1, 2, 3]], greedy(4))
    assert too_long.finish_reason == "error"
    assert too_long.token_ids == naive_completion(prompt, greedy(1))[0]  # the token that still had a place
    assert too_long.error == (
        "Out of KV memory: 513 tokens need 3 KV blocks of 256 tokens, but the pool has 2. Shorten the request or raise "
        "num_kvcache_blocks (or the memory that it is sized by)."
    )
    assert (other.token_ids, other.finish_reason) == naive_completion([1, 2, 3], greedy(4))
    assert not engine.scheduler.block_manager.used_block_ids


@BOTH_LOOPS
def test_a_row_that_outgrows_the_pool_keeps_its_tokens_while_others_go_on(lookahead):
    """The same among neighbours that were preempted for it: their tokens are whole, its own are kept."""
    engine = make_engine(5, 4, lookahead=lookahead)
    Watch(engine)
    growing, others = [1, 2, 3, 4, 5], [[7, 8], [9], [10, 1, 2]]
    ids = [engine.add_request(growing, greedy(100)), *(engine.add_request(prompt, greedy(12)) for prompt in others)]
    outputs = run_until_idle(engine)
    assert engine.scheduler.num_preemptions > 0
    output = outputs[ids[0]]
    assert (output.token_ids, output.finish_reason) == naive_completion(growing, greedy(100), num_slots=20)
    assert (len(output.token_ids), output.finish_reason) == (16, "error")
    assert "21 tokens need 6 KV blocks of 4 tokens, but the pool has 5." in output.error
    for id_, prompt in zip(ids[1:], others, strict=True):
        assert (outputs[id_].token_ids, outputs[id_].finish_reason) == naive_completion(prompt, greedy(12))


@BOTH_LOOPS
def test_a_row_that_ends_with_the_token_that_has_no_place_is_no_error(lookahead):
    """Running out of memory one step early would lose rows whose last token ends them."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    end_token = naive_completion(prompt, greedy(1))[0][0]
    engine = make_engine(2, 4, lookahead=lookahead, end_token_ids=[end_token])
    (output,) = run_all(engine, [prompt], greedy(9, ignore_eos=False))
    assert (output.token_ids, output.finish_reason, output.error) == ([end_token], "stop", None)


def test_a_prompt_that_can_never_fit_is_refused_when_handed_in():
    """A prompt larger than the pool waited, never fitted, and then killed everything that ran beside it."""
    engine = make_engine(2, 256)
    with pytest.raises(ValueError, match=r"600 tokens need 3 KV blocks of 256 tokens, but the pool has 2\."):
        engine.add_request([1] * 600)
    assert engine.is_finished()
    assert not engine._requests
    llm = make_llm(2, 256)
    refused, served = llm.generate([[1] * 600, [1, 2]], greedy(3), use_tqdm=False)
    assert (refused.finish_reason, refused.token_ids, refused.prompt_token_ids) == ("error", [], [1] * 600)
    assert "need 3 KV blocks of 256 tokens, but the pool has 2." in refused.error
    assert (served.token_ids, served.finish_reason) == naive_completion([1, 2], greedy(3))


@BOTH_LOOPS
def test_a_step_of_an_idle_engine_does_nothing(lookahead):
    """`step()` on an idle engine met an assert."""
    engine = make_engine(2, 4, lookahead=lookahead)
    assert engine.step() == ([], 0)
    run_all(engine, [[1]], greedy(1))
    assert engine.step() == ([], 0)
    assert engine.is_finished()


def test_a_request_that_comes_in_while_the_scheduler_is_asked_for_its_end_is_no_error():
    """Another thread added to the queue during an iteration over it: a RuntimeError, now and then."""
    scheduler = make_scheduler(4, 4)

    class Ended(Sequence):
        @property
        def is_finished(self):
            add(scheduler, [1, 2])  # at the worst moment
            return True

    scheduler.waiting.extend([Ended([1]), Ended([2])])
    assert scheduler.is_finished()  # it was, when it was asked
    assert not scheduler.is_finished()


def test_the_cost_of_a_sample_does_not_grow_with_their_number(monkeypatch):
    """At the end of each sample all samples of its prompt were looked at."""
    num_looks = 0

    def is_finished(seq):
        nonlocal num_looks
        num_looks += 1
        return seq.status is FINISHED

    def looks_at(n):
        nonlocal num_looks
        num_looks = 0
        engine = make_engine(40, 4, max_num_seqs=8)
        id_ = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, n=n))
        assert len(run_until_idle(engine)[id_].outputs) == n
        return num_looks

    monkeypatch.setattr(Sequence, "is_finished", property(is_finished))
    assert looks_at(400) < 5 * looks_at(100)


@BOTH_LOOPS
def test_max_num_seqs_bounds_the_sequences_alive(lookahead):
    """The limit once bounded a step only: of 1000 prompts 737 were alive, held KV memory and starved."""
    engine = make_engine(2000, 4, max_num_seqs=64, lookahead=lookahead)
    watch = Watch(engine)
    rng = random.Random(0)
    prompts = [[rng.randrange(11) for _ in range(rng.randint(1, 6))] for _ in range(1000)]
    ids = [engine.add_request(prompt, greedy(1 + i % 5)) for i, prompt in enumerate(prompts)]
    outputs = run_until_idle(engine)
    assert watch.most_alive == 64
    assert max(len(rows) for _, rows in engine.model_runner.log) == 64
    for i, (id_, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert outputs[id_].token_ids == naive_completion(prompt, greedy(1 + i % 5))[0]


@BOTH_LOOPS
def test_a_half_prefilled_sequence_counts_as_alive(lookahead):
    """A sibling: a sequence that still waits for chunks is in no running list, but it holds memory."""
    engine = make_engine(100, 4, max_num_seqs=2, max_num_batched_tokens=4, lookahead=lookahead)
    watch = Watch(engine)
    for start in range(5):
        engine.add_request([(start + i) % 11 for i in range(10)], greedy(4))
    run_until_idle(engine)
    assert watch.most_alive == 2


@BOTH_LOOPS
def test_a_fully_cached_prompt_computes_at_least_one_token(lookahead):
    """The same prompt of exactly two blocks, a second time, left nothing to compute: the kernel got an empty query."""
    engine = make_engine(10, 4, lookahead=lookahead)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = (run_all(engine, [prompt], greedy(5))[0] for _ in range(2))
    assert first.token_ids == second.token_ids == naive_completion(prompt, greedy(5))[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    prefills = [rows for is_prefill, rows in engine.model_runner.log if is_prefill]
    assert prefills == [[(0, 0, 8)], [(1, 4, 8)]]


def test_the_tokens_to_compute_are_counted_after_the_cache_hit_is_known():
    """The count was once taken before the hit, so a prompt whose first block was cached got a wrong slice."""
    engine = make_engine(10, 256, lookahead=0)
    head = [i * i % 11 for i in range(256)]
    run_all(engine, [[*head, 1]], greedy(1))
    prompt = head + [i % 5 for i in range(465 - 256)]
    (output,) = run_all(engine, [prompt], greedy(3))
    assert output.token_ids == naive_completion(prompt, greedy(3))[0]
    assert output.num_cached_tokens == 256
    assert engine.model_runner.log[1] == (True, [(1, 256, 465)])


@BOTH_LOOPS
def test_two_prompts_with_one_head_in_one_step_do_not_read_what_is_not_written(lookahead):
    """A block was offered when it was handed out, so the second prompt of a step hit KV that nobody had written."""
    engine = make_engine(10, 256, lookahead=lookahead)
    head = [i * 3 % 11 for i in range(300)]
    prompts = [[*head, 1], [*head, 2, 3]]
    outputs = run_all(engine, prompts, greedy(4))
    assert len(engine.model_runner.log[0][1]) == 2
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == naive_completion(prompt, greedy(4))[0]
        assert output.num_cached_tokens == 0


@BOTH_LOOPS
@pytest.mark.parametrize("budget", [1, 3, 4, 7, 29])
def test_a_prompt_cut_into_chunks_gives_the_output_of_the_whole(budget, lookahead):
    """A chunk of a long prompt attended to KV that was not yet written."""
    engine = make_engine(20, 4, lookahead=lookahead, max_num_batched_tokens=budget)
    prompt = [i * i % 11 for i in range(30)]
    (output,) = run_all(engine, [prompt], greedy(5))
    assert output.token_ids == naive_completion(prompt, greedy(5))[0]
    chunks = [end - start for is_prefill, rows in engine.model_runner.log if is_prefill for _, start, end in rows]
    assert chunks == [budget] * (30 // budget) + [30 % budget] * (30 % budget > 0)


def test_a_blocked_head_of_the_queue_is_hashed_once(monkeypatch):
    """A long prompt that waited for memory was hashed again at every step, 185 us each."""
    hashed = []
    compute_hash = BlockManager.compute_hash
    monkeypatch.setattr(
        BlockManager,
        "compute_hash",
        staticmethod(lambda ids, prefix=None: hashed.append(1) or compute_hash(ids, prefix)),
    )
    scheduler = make_scheduler(8, 4)
    add(scheduler, distinct(20, 0), 0, max_tokens=None)
    blocked = add(scheduler, distinct(28, 0), 1)
    assert step(scheduler)[2]
    num_hashed = []
    for _ in range(8):
        step(scheduler)
        num_hashed.append(len(hashed))
    assert list(scheduler.waiting) == [blocked]
    assert num_hashed[-1] - num_hashed[0] == 1  # the running one's sixth block filled up; nothing else was hashed


@BOTH_LOOPS
def test_a_sequence_ends_at_max_model_len(lookahead):
    """Beyond `max_model_len` one engine crashed with graphs and overran its tables without."""
    engine = make_engine(40, 16, max_model_len=512, lookahead=lookahead)
    prompt = [i * i % 11 for i in range(500)]
    for max_tokens in (100, None):
        (output,) = run_all(engine, [prompt], greedy(max_tokens))
        assert (len(output.token_ids), output.finish_reason) == (12, "length")
        assert output.token_ids == naive_completion(prompt, greedy(12))[0]
    (output,) = run_all(engine, [[1] * 511], greedy(100))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    for length in (512, 600):
        with pytest.raises(ValueError, match=rf"{length} tokens.*max_model_len=512"):
            engine.add_request([1] * length)


def test_an_empty_prompt_is_an_error_of_its_row():
    """An empty prompt was an IndexError that took the whole batch with it."""
    llm = make_llm(10, 4, tokenizer=LetterTokenizer())
    outputs = llm.generate(["abc", "", [], "b", "!"], greedy(3), use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length", "error"]
    for i, prompt in ((0, [0, 1, 2]), (3, [1])):
        assert outputs[i].token_ids == naive_completion(prompt, greedy(3))[0]
        assert outputs[i].text == "".join("abcdefghijk"[token_id] for token_id in outputs[i].token_ids)
    assert outputs[1].error == outputs[2].error == "The prompt is empty: it needs at least one token."
    assert "cannot be tokenized" in outputs[4].error
    with pytest.raises(ValueError, match="empty"):
        llm.add_request([])


def test_one_bad_row_among_many_costs_one_error():
    """One bad row, empty or too long, once ended a job of a million."""
    llm = make_llm(50, 4, max_model_len=100, max_num_seqs=16)
    prompts = [[i % 11, i // 11 % 11, i // 121] for i in range(600)]
    prompts[300], prompts[500], prompts[550] = [], [1] * 150, [11]
    outputs = llm.generate(prompts, greedy(2), use_tqdm=False)
    assert [i for i, output in enumerate(outputs) if output.finish_reason == "error"] == [300, 500, 550]
    for i, output in enumerate(outputs):
        assert (output.index, output.prompt_token_ids) == (i, prompts[i])
        assert i in (300, 500, 550) or output.token_ids == naive_completion(prompts[i], greedy(2))[0]


def test_temperature_zero_is_allowed_beside_sampled_rows():
    """Temperature 0 was refused; it is the exact argmax, and anything at most 1e-10 is taken for it."""
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-10).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
    llm = make_llm(10, 4)
    params = [SamplingParams(temperature=t, max_tokens=3) for t in (0, 1.0)]
    outputs = llm.generate([[1, 2], [1, 2]], params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [3, 3]


@pytest.mark.parametrize("end_token", [3, 7, 9])
def test_every_known_end_token_ends_a_row(end_token):
    """Only the tokenizer's one end token was known, so chat models talked on."""
    prompt = next([i] for i in range(11) if naive_completion([i], greedy(1))[0] == [end_token])
    engine = make_engine(10, 4, end_token_ids=[3, 7], tokenizer=LetterTokenizer(eos_token_id=9))
    (output,) = run_all(engine, [prompt], greedy(4, ignore_eos=False))
    assert (output.token_ids, output.finish_reason) == ([end_token], "stop")


# The step's own report.


def test_a_step_reports_prefilled_tokens_or_minus_its_sequences():
    engine = make_engine(10, 4, lookahead=0, max_num_batched_tokens=5)
    engine.add_request([1, 2, 3, 4, 5, 6, 7], greedy(3))
    engine.add_request([1, 2, 3], greedy(2))
    reports = []
    while not engine.is_finished():
        outputs, num_tokens = engine.step()
        reports.append((num_tokens, [output.request_id for output in outputs]))
    assert reports == [(5, []), (5, []), (-2, [1]), (-1, [0])]


@BOTH_LOOPS
def test_statistics_count_the_tokens_that_rows_keep(lookahead):
    """The token that is sampled behind an end token, before that is known, once counted as well."""
    engine = make_engine(50, 4, lookahead=lookahead, end_token_ids=range(0, VOCAB_SIZE, 3))
    for i in range(8):
        engine.add_request([1, 2, i], SamplingParams(temperature=0, max_tokens=60))
    outputs = run_until_idle(engine)
    assert {output.finish_reason for output in outputs.values()} == {"stop"}
    assert engine.stats()["num_completion_tokens"] == sum(len(output.token_ids) for output in outputs.values())
