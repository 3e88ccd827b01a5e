"""Blocks, reference counts, the free queue and the prefix cache, down to exact tables and hashes."""

import time

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence


def admit(manager, token_ids):
    """Allocate a new sequence's blocks."""
    seq = Sequence(token_ids)
    num_hits = manager.can_allocate(seq)
    assert num_hits >= 0
    manager.allocate(seq, num_hits)
    return seq


def compute(manager, seq, num_tokens=None):
    """Book the sequence's tokens (all, or the first few) as computed by a launched step."""
    seq.num_cached_tokens = seq.num_tokens if num_tokens is None else num_tokens
    manager.hash_blocks(seq)


def append(seq, *token_ids):
    """Append known tokens."""
    for token_id in token_ids:
        seq.num_pending_tokens += 1
        seq.append_token(token_id)


def ref_counts(manager):
    return [block.ref_count for block in manager.blocks]


def hashes(manager):
    return [block.hash for block in manager.blocks]


def free_queue(manager):
    return list(manager.free_block_ids)


# Hashes.


def test_hashes_have_the_documented_check_values():
    first = BlockManager.compute_hash([1, 2, 3])
    second = BlockManager.compute_hash([4, 5, 6], first)
    assert first == 0x8799E152E5C0CDFA
    assert second == 0xF6B4DD819373AD93
    assert BlockManager.compute_hash([7, 8, 9], second) == 0xB0D5AD0799630A48
    assert BlockManager.compute_hash([12, 13, 14], second) == 0x5683CD257D6ADF8C


def test_equal_tokens_behind_different_prefixes_have_different_hashes():
    manager = BlockManager(num_blocks=8, block_size=2)
    one, two = admit(manager, [1, 1, 5, 5]), admit(manager, [2, 2, 5, 5])
    compute(manager, one)
    compute(manager, two)
    assert manager.blocks[one.block_table[1]].token_ids == manager.blocks[two.block_table[1]].token_ids == [5, 5]
    assert len(set(hashes(manager)[:4])) == 4
    assert manager.can_allocate(Sequence([5, 5, 9])) == 0


def test_a_prefix_of_hash_zero_is_not_taken_for_no_prefix():
    assert BlockManager.compute_hash([1], 0) != BlockManager.compute_hash([1])


# Tables, reference counts and the free queue.


def test_a_freed_prefix_is_taken_back_from_the_free_queue():
    manager = BlockManager(num_blocks=5, block_size=4)
    seq0, seq1 = admit(manager, range(8)), admit(manager, range(100, 108))
    assert (seq0.block_table, seq1.block_table) == ([0, 1], [2, 3])
    compute(manager, seq0)
    compute(manager, seq1)
    manager.deallocate(seq0)
    assert free_queue(manager) == [4, 1, 0]
    seq2 = admit(manager, range(8))
    assert seq2.block_table == [0, 4]
    assert seq2.num_cached_tokens == 4
    assert free_queue(manager) == [1]
    manager.check_invariants([seq1, seq2])


def test_a_shared_head_is_shared_block_by_block():
    manager = BlockManager(num_blocks=8, block_size=3)
    a = admit(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hashes(manager) == [None] * 8  # they appear after the step
    compute(manager, a)
    b = admit(manager, [1, 2, 3, 4, 5, 6, 12, 13, 14])
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 1, 3])
    assert ref_counts(manager) == [2, 2, 1, 1, 0, 0, 0, 0]
    assert free_queue(manager) == [4, 5, 6, 7]
    assert b.num_cached_tokens == 6
    compute(manager, b)
    assert hashes(manager)[:4] == [0x8799E152E5C0CDFA, 0xF6B4DD819373AD93, 0xB0D5AD0799630A48, 0x5683CD257D6ADF8C]
    assert hashes(manager)[4:] == [None] * 4
    manager.check_invariants([a, b])
    manager.deallocate(a)
    assert ref_counts(manager) == [1, 1, 0, 1, 0, 0, 0, 0]
    assert free_queue(manager) == [4, 5, 6, 7, 2]
    manager.check_invariants([b])


def test_a_partial_block_has_no_hash():
    manager = BlockManager(num_blocks=4, block_size=4)
    seq = admit(manager, range(6))
    compute(manager, seq)
    assert hashes(manager)[0] == BlockManager.compute_hash(range(4))
    assert hashes(manager)[1:] == [None] * 3


def test_a_block_is_offered_only_once_its_last_token_is_computed():
    manager = BlockManager(num_blocks=4, block_size=4)
    seq = admit(manager, range(8))
    compute(manager, seq, 7)
    assert len(manager.hash_to_block_id) == 1
    compute(manager, seq, 8)
    assert len(manager.hash_to_block_id) == 2


def test_a_block_whose_last_token_is_not_yet_known_is_not_offered():
    manager = BlockManager(num_blocks=4, block_size=4)
    seq = admit(manager, range(3))
    compute(manager, seq)
    seq.num_pending_tokens = 1  # computed by the next step before the host knows it
    compute(manager, seq, 4)
    assert manager.hash_to_block_id == {}
    seq.append_token(3)
    manager.hash_blocks(seq)
    assert manager.hash_to_block_id == {BlockManager.compute_hash(range(4)): 0}


def test_freeing_goes_from_the_last_block_to_the_first():
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = admit(manager, range(8))
    manager.deallocate(seq)
    assert free_queue(manager) == [3, 2, 1, 0]
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)


def test_a_hit_on_a_block_in_use_costs_no_free_block():
    manager = BlockManager(num_blocks=4, block_size=4)
    first = admit(manager, range(12))
    compute(manager, first)
    assert free_queue(manager) == [3]
    second = Sequence([*range(8), 90, 91])  # needs 3 blocks, 2 of them hits in use
    assert manager.can_allocate(second) == 2
    manager.allocate(second, 2)
    assert second.block_table == [0, 1, 3]
    assert ref_counts(manager) == [2, 2, 1, 1]
    assert free_queue(manager) == []


def test_a_hit_on_a_free_block_costs_that_block():
    manager = BlockManager(num_blocks=3, block_size=4)
    first = admit(manager, range(8))
    compute(manager, first)
    manager.deallocate(first)
    other = admit(manager, [70])
    assert free_queue(manager) == [1, 0]
    assert manager.can_allocate(Sequence([*range(8), 90])) == -1  # 2 free hits and a third block: 3 > 2
    assert manager.can_allocate(Sequence([*range(4), 90])) == 1
    manager.check_invariants([other])


def test_a_sequence_that_does_not_fit_is_told_apart_from_one_without_hits():
    manager = BlockManager(num_blocks=2, block_size=4)
    assert manager.can_allocate(Sequence(range(8))) == 0
    assert manager.can_allocate(Sequence(range(9))) == -1


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_the_last_block_is_never_matched_even_when_full(num_tokens, num_hits):
    manager = BlockManager(num_blocks=9, block_size=4)
    compute(manager, admit(manager, range(12)))
    assert manager.can_allocate(Sequence(range(num_tokens))) == num_hits


def test_blocks_filled_during_decode_are_hits_for_the_next_turn():
    manager = BlockManager(num_blocks=6, block_size=2)
    seq = admit(manager, [1, 2, 3])
    compute(manager, seq)
    for token_id in (4, 5):
        append(seq, token_id)
        manager.may_append(seq)
        compute(manager, seq)
    manager.deallocate(seq)
    assert manager.can_allocate(Sequence([1, 2, 3, 4, 5, 6])) == 2


def test_a_match_stops_at_the_first_block_that_differs():
    manager = BlockManager(num_blocks=9, block_size=2)
    compute(manager, admit(manager, [1, 2, 3, 4, 5, 6]))
    assert manager.can_allocate(Sequence([1, 2, 9, 9, 5, 6, 7])) == 1


# Content of free blocks.


def test_freed_blocks_keep_their_content_until_they_are_reused():
    manager = BlockManager(num_blocks=3, block_size=2)
    first = admit(manager, [1, 2, 3, 4, 5])
    compute(manager, first)
    manager.deallocate(first)
    assert free_queue(manager) == [2, 1, 0]
    assert [block.token_ids for block in manager.blocks] == [[1, 2], [3, 4], []]
    admit(manager, [9])  # takes block 2, which held nothing to share
    assert manager.can_allocate(Sequence([1, 2, 3, 4])) == 1
    admit(manager, [9])  # takes block 1, the tail of the prefix
    assert [block.token_ids for block in manager.blocks] == [[1, 2], [], []]
    assert manager.hash_to_block_id == {BlockManager.compute_hash([1, 2]): 0}
    assert manager.can_allocate(Sequence([1, 2])) == 0
    admit(manager, [9])  # takes block 0
    assert manager.hash_to_block_id == {}
    assert hashes(manager) == [None] * 3


def test_the_free_queue_is_first_in_first_out():
    manager = BlockManager(num_blocks=4, block_size=2)
    a, b, c = admit(manager, [1]), admit(manager, [2]), admit(manager, [3])
    for seq in (b, a, c):
        manager.deallocate(seq)
    assert free_queue(manager) == [3, 1, 0, 2]
    assert admit(manager, range(5)).block_table == [3, 1, 0]


def test_reuse_drops_a_hash_entry_only_if_it_still_points_to_the_block():
    manager = BlockManager(num_blocks=4, block_size=2)
    twins = [admit(manager, [1, 2]), admit(manager, [1, 2])]  # neither can hit: the last block is never matched
    compute(manager, twins[0])
    compute(manager, twins[1])
    entry = {BlockManager.compute_hash([1, 2]): 1}
    assert manager.hash_to_block_id == entry  # the later one took it over
    manager.deallocate(twins[0])
    assert free_queue(manager) == [2, 3, 0]
    admit(manager, range(10, 16))  # reuses block 0
    assert manager.hash_to_block_id == entry
    manager.deallocate(twins[1])
    assert admit(manager, [30]).block_table == [1]
    assert manager.hash_to_block_id == {}


def test_a_hash_collision_does_not_serve_the_other_prefix(monkeypatch):
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=None: 7))
    manager = BlockManager(num_blocks=6, block_size=2)
    seq = admit(manager, [1, 2])
    compute(manager, seq)
    assert manager.hash_to_block_id == {7: 0}
    assert manager.can_allocate(Sequence([3, 4, 5])) == 0
    assert manager.can_allocate(Sequence([1, 2, 5])) == 1


def test_a_block_behind_a_prefix_whose_hash_collides_is_not_served(monkeypatch):
    """The tokens of each block were compared, not those before it: behind a collided block any chain matched."""
    compute_hash = BlockManager.compute_hash
    monkeypatch.setattr(
        BlockManager,
        "compute_hash",
        staticmethod(lambda ids, prefix=None: 7 if prefix is None else compute_hash(ids, 7)),
    )
    manager = BlockManager(num_blocks=8, block_size=2)
    compute(manager, admit(manager, [1, 1, 5, 5]))
    compute(manager, admit(manager, [2, 2]))  # takes over the entry of [1, 1]
    assert manager.can_allocate(Sequence([2, 2, 5, 5, 9])) == 1  # [5, 5] was computed behind [1, 1]


# Growth by decode.


@pytest.mark.parametrize(("num_tokens", "needs_block"), [(255, False), (256, False), (257, True)])
def test_a_sequence_needs_a_block_only_when_blocks_needed_exceed_blocks_held(num_tokens, needs_block):
    manager = BlockManager(num_blocks=1, block_size=256)
    seq = admit(manager, range(254))
    append(seq, *range(num_tokens - 254))
    assert manager.needs_block(seq) is needs_block
    assert manager.can_append(seq) is not needs_block  # no block is free


def test_may_append_takes_one_block_when_the_newest_token_needs_it():
    manager = BlockManager(num_blocks=3, block_size=256)
    seq = admit(manager, range(255))
    append(seq, 1)
    manager.may_append(seq)
    assert seq.block_table == [0]
    append(seq, 2)
    assert manager.can_append(seq)
    manager.may_append(seq)
    assert seq.block_table == [0, 1]
    manager.may_append(seq)
    assert seq.block_table == [0, 1]
    assert free_queue(manager) == [2]


def test_four_blocks_of_four_hold_sixteen_tokens():
    manager = BlockManager(num_blocks=4, block_size=4)
    assert [manager.blocks_needed(n) for n in (1, 4, 5, 16, 17)] == [1, 1, 2, 4, 5]
    assert admit(manager, range(16)).block_table == [0, 1, 2, 3]


# Slots.


@pytest.mark.parametrize(
    ("num_cached", "num_tokens", "block_table", "slots"),
    [
        (0, 7, [24, 25], [96, 97, 98, 99, 100, 101, 102]),
        (6, 7, [24, 25], [102]),  # block 25, offset 2
        (3, 5, [24, 2], [99, 8]),
        (4, 6, [0, 25], [100, 101]),
    ],
)
def test_a_token_is_stored_at_its_slot(num_cached, num_tokens, block_table, slots):
    runner = ModelRunner.__new__(ModelRunner)
    runner.block_size, runner._last_rows, runner.backend = 4, {}, TorchBackend()
    runner.decode_state = DecodeState(num_lanes=3, max_blocks=2, block_size=4)
    seq = Sequence(range(num_tokens))
    seq.block_table, seq.num_cached_tokens = block_table, num_cached
    seq.num_scheduled_tokens = num_tokens - num_cached
    assert runner.prepare_prefill([seq]).slot_mapping.tolist() == slots
    if seq.num_scheduled_tokens == 1:
        step = runner.prepare_decode([seq])
        runner.decode_state.apply(torch.from_numpy(step.packet), step)
        assert runner.decode_state.lay_out(1).context.slot_mapping.tolist() == slots


# Cost.


def test_taking_a_block_out_of_the_middle_of_the_free_queue_does_not_walk_it():
    """A hit on a free block once walked a whole deque: with a large pool, many hits cost seconds."""
    num_blocks = 100_000
    manager = BlockManager(num_blocks, block_size=1)
    seq = admit(manager, range(num_blocks))
    compute(manager, seq)
    manager.deallocate(seq)
    middle = num_blocks // 2
    start = time.perf_counter()
    for block_id in range(middle, middle + 2000):
        del manager.free_block_ids[block_id]
    assert time.perf_counter() - start < 0.2  # a walk of 50,000 entries for each: seconds


# The books' own check.


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manager: setattr(manager.blocks[0], "ref_count", 2),
        lambda manager: setattr(manager.blocks[0], "ref_count", 0),
        lambda manager: setattr(manager.blocks[3], "ref_count", -1),
        lambda manager: manager.free_block_ids.popitem(),
        lambda manager: manager.used_block_ids.add(3),
        lambda manager: manager.hash_to_block_id.update({5: 3}),
        lambda manager: setattr(manager.blocks[0], "token_ids", [1]),
    ],
)
def test_check_invariants_notices_books_that_disagree(spoil):
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = admit(manager, [1, 2, 3])
    compute(manager, seq)
    manager.check_invariants([seq])
    spoil(manager)
    with pytest.raises(AssertionError):
        manager.check_invariants([seq])


def test_check_invariants_notices_a_holder_that_nobody_counted():
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = admit(manager, [1, 2, 3])
    manager.check_invariants()
    with pytest.raises(AssertionError):
        manager.check_invariants([])
    stranger = Sequence([1])
    stranger.block_table = [0]
    with pytest.raises(AssertionError):
        manager.check_invariants([seq, stranger])


# Everything at once, against a model that knows prefixes instead of hashes.


class BlockManagerMachine(RuleBasedStateMachine):
    """Random operations; the model keeps whole prefixes where the block manager keeps hashes."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 3))
    def start(self, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size)
        self.block_size = block_size
        self.live = []
        self.free = list(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.content = [None] * num_blocks  # the prefix that a computed full block ends
        self.offered = {}  # prefix -> block

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, token_ids):
        size = self.block_size
        needed = -(-len(token_ids) // size)
        hits = []
        for i in range(needed - 1):
            block_id = self.offered.get(tuple(token_ids[: (i + 1) * size]))
            if block_id is None:
                break
            hits.append(block_id)
        cost = needed - sum(self.ref_counts[block_id] > 0 for block_id in hits)
        seq = Sequence(token_ids)
        assert self.manager.can_allocate(seq) == (len(hits) if cost <= len(self.free) else -1)
        if cost > len(self.free):
            return
        self.manager.allocate(seq, len(hits))
        for block_id in hits:
            if self.ref_counts[block_id] == 0:
                self.free.remove(block_id)
            self.ref_counts[block_id] += 1
        table = hits + [self.take() for _ in range(needed - len(hits))]
        assert seq.block_table == table
        assert seq.num_cached_tokens == len(hits) * size
        self.live.append(seq)

    def take(self):
        block_id = self.free.pop(0)
        if self.offered.get(self.content[block_id]) == block_id:
            del self.offered[self.content[block_id]]
        self.content[block_id] = None
        self.ref_counts[block_id] = 1
        return block_id

    def pick(self, index):
        return self.live[index % len(self.live)]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), num_tokens=st.integers(1, 12))
    def compute(self, index, num_tokens):
        seq = self.pick(index)
        compute(self.manager, seq, min(seq.num_tokens, seq.num_cached_tokens + num_tokens))
        for i in range(seq.num_cached_tokens // self.block_size):
            block_id = seq.block_table[i]
            if self.content[block_id] is None:
                self.content[block_id] = tuple(seq.token_ids[: (i + 1) * self.block_size])
                self.offered[self.content[block_id]] = block_id

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), token_id=st.integers(0, 1))
    def append(self, index, token_id):
        seq = self.pick(index)
        append(seq, token_id)
        fits = seq.num_tokens <= len(seq.block_table) * self.block_size
        assert self.manager.can_append(seq) == (fits or bool(self.free))
        if not fits and not self.free:
            self.release(index)
            return
        table = seq.block_table if fits else [*seq.block_table, self.take()]
        self.manager.may_append(seq)
        assert seq.block_table == table

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def release(self, index):
        seq = self.pick(index)
        self.live.remove(seq)
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free.append(block_id)
        self.manager.deallocate(seq)
        assert (seq.block_table, seq.num_cached_tokens) == ([], 0)

    @invariant()
    def books_agree(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(self.live)
        assert free_queue(self.manager) == self.free
        assert ref_counts(self.manager) == self.ref_counts
        assert sorted(self.manager.hash_to_block_id.values()) == sorted(self.offered.values())
        for block, content in zip(self.manager.blocks, self.content, strict=True):
            assert block.token_ids == ([] if content is None else list(content[-self.block_size :]))


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockManagerAgainstAModel = BlockManagerMachine.TestCase
