"""BlockManager: the paged KV cache's bookkeeping, in block ids only.

It owns the pool of blocks, their reference counts and the prefix cache. It knows nothing of tensors, devices or steps:
whoever calls `hash_blocks` vouches that the KV of a sequence's computed tokens was written by a launched step.

Paged KV memory: PagedAttention, arXiv 2309.06180.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence


class Block:
    """One block of the pool: how many sequences hold it and, once full and computed, what it holds.

    `prefix_print` stands for all tokens up to the block's end: it tells equal tokens behind different prefixes apart
    even where the hash does not.
    """

    __slots__ = ("block_id", "hash", "prefix_print", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.prefix_print = b""
        self.token_ids: list[int] = []

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={self.hash})"


class BlockManager:
    """Hands out, shares and takes back KV blocks.

    Args:
        num_blocks: Blocks in the pool, at least 1.
        block_size: Tokens a block holds, at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        # A queue (first freed, first reused) with removal from its middle in constant time.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @staticmethod
    def compute_hash(token_ids: SequenceOf[int], prefix: int | None = None) -> int:
        """Return the chained hash of a full block.

        Args:
            token_ids: The block's tokens.
            prefix: Hash of the block before it; None for the first. It makes equal blocks behind different
                prefixes differ, as their KV does.

        Returns:
            xxh64 over the predecessor's hash (8 bytes, little-endian) and the tokens (int64, little-endian).
        """
        digest = xxhash.xxh64()
        if prefix is not None:
            digest.update(prefix.to_bytes(8, "little"))
        digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
        return digest.intdigest()

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> int:
        """Return how many of the sequence's leading blocks are in the prefix cache, or -1 if it does not fit now.

        A hit on a block in use costs no free block. The last block never counts as a hit, even when full: at least one
        token has to be computed for logits to exist.
        """
        needed = self.blocks_needed(seq.num_tokens)
        num_hits = num_free_needed = 0
        # A cached prefix is not computed, so it has no logits either.
        for i in range(0 if seq.wants_prompt_logprobs else needed - 1):
            block_id = self.hash_to_block_id.get(self._block_hash(seq, i))
            # A hash collision must not serve another prefix's KV.
            if block_id is None or not self._holds(self.blocks[block_id], seq, i):
                break
            num_hits += 1
            num_free_needed += self.blocks[block_id].ref_count == 0
        num_free_needed += needed - num_hits
        return num_hits if num_free_needed <= len(self.free_block_ids) else -1

    def num_used_hits(self, seq: Sequence, num_hits: int) -> int:
        """Return how many of the hits of `can_allocate` others hold, so that they take no free block."""
        hashes = seq.block_hashes[: max(0, num_hits)]
        return sum(self.blocks[self.hash_to_block_id[hash_]].ref_count > 0 for hash_ in hashes)

    def allocate(self, seq: Sequence, num_hits: int) -> None:
        """Give the sequence all blocks for its tokens, the first ``num_hits`` (of `can_allocate`) from the cache."""
        assert not seq.block_table
        for i in range(num_hits):
            block = self.blocks[self.hash_to_block_id[seq.block_hashes[i]]]
            if block.ref_count == 0:
                del self.free_block_ids[block.block_id]
                self.used_block_ids.add(block.block_id)
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        for _ in range(self.blocks_needed(seq.num_tokens) - num_hits):
            seq.block_table.append(self._take_free_block())
        seq.num_cached_tokens = num_hits * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Take back the sequence's blocks, last first, so that a prefix outlives its continuation in the free queue."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def can_fork(self, seq: Sequence) -> bool:
        """Return whether another sequence can share this one's KV: a partly filled last block takes a free one."""
        return bool(self.free_block_ids) or seq.num_tokens % self.block_size == 0

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Let ``child``, which has the same tokens, share the full blocks of ``seq``.

        A partly filled last block gets a twin; the runner copies it once ``seq`` has been computed.
        """
        num_full = seq.num_tokens // self.block_size
        child.block_table = seq.block_table[:num_full]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        if seq.num_tokens % self.block_size:
            child.block_table.append(self._take_free_block())
        child.num_cached_tokens = seq.num_tokens

    def needs_block(self, seq: Sequence) -> bool:
        """Return whether the sequence's tokens no longer fit into the blocks that it holds."""
        return self.blocks_needed(seq.num_tokens) > len(seq.block_table)

    def can_append(self, seq: Sequence) -> bool:
        """Return whether the sequence's newest token has a place, or a free block can give it one."""
        return bool(self.free_block_ids) or not self.needs_block(seq)

    def may_append(self, seq: Sequence) -> None:
        """Give the sequence one more block if its newest token needs it."""
        if self.needs_block(seq):
            seq.block_table.append(self._take_free_block())

    def hash_blocks(self, seq: Sequence) -> None:
        """Offer the sequence's full blocks to others: those whose tokens are all known and computed."""
        num_full = min(seq.num_cached_tokens, len(seq.token_ids)) // self.block_size
        first = num_full  # hashed blocks are a prefix of the table, so walk back to where it ends
        while first > 0 and self.blocks[seq.block_table[first - 1]].hash is None:
            first -= 1
        for i in range(first, num_full):
            block = self.blocks[seq.block_table[i]]
            block.hash = self._block_hash(seq, i)
            block.prefix_print = seq.block_prints[i]
            block.token_ids = self._block_tokens(seq, i)
            self.hash_to_block_id[block.hash] = block.block_id

    def check_invariants(self, seqs: Iterable[Sequence] | None = None) -> None:
        """Assert that the books agree with themselves and, where given, with all sequences that hold blocks."""
        free, used = set(self.free_block_ids), self.used_block_ids
        assert not free & used and free | used == set(range(self.num_blocks)), "a block is lost or free and used"
        for block in self.blocks:
            assert block.ref_count >= 0 and (block.ref_count > 0) == (block.block_id in used), block
            assert block.hash is None or len(block.token_ids) == self.block_size, block
        for hash_, block_id in self.hash_to_block_id.items():
            assert self.blocks[block_id].hash == hash_, f"stale hash entry for block {block_id}"
        if seqs is not None:
            held = Counter(block_id for seq in seqs for block_id in seq.block_table)
            assert held == Counter({b.block_id: b.ref_count for b in self.blocks if b.ref_count}), "reference counts"

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        # Its old content is gone from here on; another block may have taken over the entry since.
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.hash = None
        block.token_ids = []
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id

    def _block_tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _holds(self, block: Block, seq: Sequence, i: int) -> bool:
        return block.prefix_print == seq.block_prints[i] and block.token_ids == self._block_tokens(seq, i)

    def _block_hash(self, seq: Sequence, i: int) -> int:
        hashes, prints = seq.block_hashes, seq.block_prints
        while len(hashes) <= i:
            token_ids = self._block_tokens(seq, len(hashes))
            content = (prints[-1] if prints else b"") + np.asarray(token_ids, dtype="<i8").tobytes()
            prints.append(xxhash.xxh3_128_digest(content))
            hashes.append(self.compute_hash(token_ids, hashes[-1] if hashes else None))
        return hashes[i]
