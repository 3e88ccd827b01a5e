"""The random check has teeth: each fault planted here makes it fail within a few dozen fixed seeds.

Faults are planted by monkeypatch. With the books unchecked, the fake's KV alone must tell by a wrong token or a read of
what nobody wrote.
"""

import pytest
from fakes import FakeRunner, check_workload, random_workload

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import SequenceStatus

NUM_SEEDS = 100


def first_failure(*, check_books):
    """Return the first seed whose workload fails, or None."""
    for seed in range(NUM_SEEDS):
        try:
            check_workload(random_workload(seed), check_books=check_books)
        except AssertionError:  # a wrong output, wrong books, or the fake's own error
            return seed
        except Exception:  # the engine noticed by itself; look for a seed where the check does
            continue
    return None


def uncounted_hit(patch):
    allocate = BlockManager.allocate

    def faulty(self, seq, num_hits):
        allocate(self, seq, num_hits)
        for block_id in seq.block_table[:num_hits]:
            self.blocks[block_id].ref_count = max(1, self.blocks[block_id].ref_count - 1)

    patch.setattr(BlockManager, "allocate", faulty)


def block_offered_before_it_is_written(patch):
    allocate = BlockManager.allocate

    def faulty(self, seq, num_hits):
        allocate(self, seq, num_hits)
        num_cached, seq.num_cached_tokens = seq.num_cached_tokens, seq.num_tokens
        self.hash_blocks(seq)
        seq.num_cached_tokens = num_cached

    patch.setattr(BlockManager, "allocate", faulty)


def hash_without_prefix(patch):
    def tokens_only(self, block, seq, i):
        return block.token_ids == self._block_tokens(seq, i)

    compute_hash = BlockManager.compute_hash
    patch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=None: compute_hash(token_ids)))
    patch.setattr(BlockManager, "_holds", tokens_only)


def chunk_that_samples(patch):
    launched = Scheduler.launched

    def faulty(self, seqs):
        chunks = [seq for seq in seqs if 0 < seq.num_scheduled_tokens < seq.num_tokens - seq.num_cached_tokens]
        launched(self, seqs)
        for seq in chunks:
            seq.num_pending_tokens += 1

    patch.setattr(Scheduler, "launched", faulty)
    patch.setattr(FakeRunner, "samples", lambda self, seq, end: True)


def preempted_sequence_that_keeps_its_computed_count(patch):
    preempt = Scheduler.preempt

    def faulty(self, seq):
        num_cached = seq.num_cached_tokens
        preempt(self, seq)
        seq.num_cached_tokens = num_cached

    patch.setattr(Scheduler, "preempt", faulty)


def last_block_matched_too(patch):
    can_allocate = BlockManager.can_allocate

    def faulty(self, seq):
        num_hits = can_allocate(self, seq)
        needed = self.blocks_needed(seq.num_tokens)
        if num_hits == needed - 1 and seq.num_tokens % self.block_size == 0:
            block_id = self.hash_to_block_id.get(self._block_hash(seq, num_hits))
            if block_id is not None and self.blocks[block_id].token_ids == self._block_tokens(seq, num_hits):
                return needed
        return num_hits

    patch.setattr(BlockManager, "can_allocate", faulty)


def ended_sequence_that_is_booked_again(patch):
    postprocess = Scheduler.postprocess

    def faulty(self, seqs, token_ids, is_prefill):
        ended = [seq for seq in seqs if seq.is_finished]
        for seq in ended:
            seq.status = SequenceStatus.RUNNING
        postprocess(self, seqs, token_ids, is_prefill)
        for seq in ended:
            seq.status = SequenceStatus.FINISHED

    patch.setattr(Scheduler, "postprocess", faulty)


def stale_content_of_a_reused_block(patch):
    take = BlockManager._take_free_block

    def faulty(self):
        block = self.blocks[next(iter(self.free_block_ids))]
        hash_, token_ids = block.hash, block.token_ids
        block_id = take(self)
        if hash_ is not None:
            block.hash, block.token_ids = hash_, token_ids
            self.hash_to_block_id.setdefault(hash_, block_id)
        return block_id

    patch.setattr(BlockManager, "_take_free_block", faulty)


def hit_that_stays_in_the_free_queue(patch):
    allocate = BlockManager.allocate

    def faulty(self, seq, num_hits):
        free = list(self.free_block_ids)
        allocate(self, seq, num_hits)
        for block_id in seq.block_table[:num_hits]:
            if block_id in free:
                self.free_block_ids[block_id] = None

    patch.setattr(BlockManager, "allocate", faulty)


def token_of_the_host_in_place_of_the_pending_one(patch):
    patch.setattr(
        FakeRunner, "_token", lambda self, seq, position, is_prefill: seq.token_ids[min(position, len(seq) - 2)]
    )


def sequences_alive_without_limit(patch):
    schedule_prefill = Scheduler._schedule_prefill

    def faulty(self):
        limit, self.max_num_seqs = self.max_num_seqs, 1000
        seqs = schedule_prefill(self)
        self.max_num_seqs = limit
        return seqs

    patch.setattr(Scheduler, "_schedule_prefill", faulty)


def aborted_sequence_that_keeps_its_blocks(patch):
    def faulty(self, request_id):
        for seq in self._requests.pop(request_id, ()):
            self.scheduler.running = [other for other in self.scheduler.running if other is not seq]
            seq.status = SequenceStatus.FINISHED

    patch.setattr(LLMEngine, "abort", faulty)


FAULTS = [
    uncounted_hit,
    block_offered_before_it_is_written,
    hash_without_prefix,
    chunk_that_samples,
    preempted_sequence_that_keeps_its_computed_count,
    last_block_matched_too,
    stale_content_of_a_reused_block,
    hit_that_stays_in_the_free_queue,
    sequences_alive_without_limit,
]
OVERLAPPED_FAULTS = [
    ended_sequence_that_is_booked_again,
    token_of_the_host_in_place_of_the_pending_one,
]
BOOKS_FAULTS = [aborted_sequence_that_keeps_its_blocks]  # memory leaks, but every token stays right


def test_without_a_fault_the_check_passes():
    assert first_failure(check_books=True) is None


@pytest.mark.parametrize("plant", FAULTS + BOOKS_FAULTS)
def test_a_planted_fault_fails_the_random_check(plant, monkeypatch):
    plant(monkeypatch)
    assert first_failure(check_books=True) is not None


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_shows_without_a_look_at_the_books(plant, monkeypatch):
    plant(monkeypatch)
    assert first_failure(check_books=False) is not None


@pytest.mark.parametrize("check_books", [True, False])
@pytest.mark.parametrize("plant", OVERLAPPED_FAULTS)
def test_a_fault_planted_in_the_overlapped_loop_fails_the_random_check(plant, check_books, monkeypatch):
    plant(monkeypatch)
    assert first_failure(check_books=check_books) is not None
