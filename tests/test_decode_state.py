"""The lanes of decode steps: what a step lays out equals what its sequences say, whatever came and went before."""

import random

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.decode_state import TritonDecodeState

BLOCK_SIZE, MAX_BLOCKS, NUM_LANES = 4, 200, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATES = pytest.mark.parametrize("state_class", [DecodeState, TritonDecodeState])


class Seq(Sequence):
    """A sequence that keeps, for the test, the token that the host need not know."""

    newest = -1


class Rig:
    """A decode state, and the part of an engine that feeds it: sequences, blocks, steps one token ahead of the host."""

    def __init__(self, state_class, seed=0):
        with torch.device(DEVICE):
            self.state = state_class(NUM_LANES, MAX_BLOCKS, BLOCK_SIZE)
        self.rng = random.Random(seed)
        self.last_rows = {}
        self.next_id = 0

    def seq(self, num_tokens, temperature=1.0, key=None):
        seq = Seq(range(100, 100 + num_tokens), SamplingParams(temperature), self.next_id, key or self.next_id)
        seq.sample_index = self.next_id % 3
        self.next_id += 1
        self.give_blocks(seq)
        return seq

    def give_blocks(self, seq):
        while len(seq.block_table) * BLOCK_SIZE < seq.num_tokens:
            seq.block_table.append(self.rng.randrange(10**6))

    def prefill(self, seqs):
        """Sample a token for each, as a prefill step does, known to the device alone."""
        self.state.forget(seqs)
        tokens = [self.rng.randrange(1000) for _ in seqs]
        self.state.last_tokens[: len(seqs)] = torch.tensor(tokens, device=DEVICE)
        self.last_rows = {seq.seq_id: row for row, seq in enumerate(seqs)}
        for seq, token in zip(seqs, tokens, strict=True):
            seq.num_pending_tokens += 1
            seq.newest = token
            self.give_blocks(seq)

    def step(self, seqs):
        """Run one decode step without a model; returns the packet's size after comparing all that was laid out."""
        for seq in seqs:
            self.give_blocks(seq)
        step = self.state.prepare(seqs, self.last_rows)
        if step.packet.size:
            self.state.apply(torch.from_numpy(step.packet).to(DEVICE), step)
        size = len(seqs) + self.rng.randrange(3) if len(seqs) < NUM_LANES - 2 else len(seqs)
        rows = self.state.lay_out(size)
        self.compare(rows, [seqs[self.state.rows.index(row)] for row in range(len(seqs))])
        tokens = torch.tensor([self.rng.randrange(1000) for _ in range(size)])
        self.state.advance(tokens.to(DEVICE))
        if self.rng.random() < 0.2:  # rows with extras are sampled again
            tokens[: len(seqs)] += 1
            self.state.replace_tokens(tokens[: len(seqs)].to(DEVICE))
        for seq, row in zip(seqs, self.state.rows, strict=True):
            if seq.num_pending_tokens:
                seq.append_token(seq.newest)
            seq.num_pending_tokens += 1
            seq.newest = int(tokens[row])
        assert self.state.last_tokens[: len(seqs)].tolist() == tokens[: len(seqs)].tolist()
        self.last_rows = {seq.seq_id: row for seq, row in zip(seqs, self.state.rows, strict=True)}
        return step.packet.size

    def compare(self, rows, seqs):
        lens = [seq.num_tokens for seq in seqs]
        assert lens == sorted(lens, reverse=True)
        padding = [0] * (len(rows.input_ids) - len(seqs))
        assert rows.input_ids.tolist() == [seq.newest for seq in seqs] + padding
        assert rows.positions.tolist() == [n - 1 for n in lens] + padding
        assert rows.context.context_lens.tolist() == lens + padding
        assert rows.context.context_lens.dtype == torch.int32
        slots = [s.block_table[-1] * BLOCK_SIZE + (s.num_tokens - 1) % BLOCK_SIZE for s in seqs]
        assert rows.context.slot_mapping.tolist() == slots + [-1 for _ in padding]
        for seq, table in zip(seqs, rows.context.block_tables.tolist(), strict=False):
            assert table[: len(seq.block_table)] == seq.block_table
        some = rows.first(len(seqs)).sampling
        assert some.temperatures.tolist() == [np.float32(seq.sampling_params.temperature) for seq in seqs]
        keys = (some.keys.long() & 0xFFFFFFFF).tolist()
        assert [low | high << 32 for low, high in keys] == [seq.request_key for seq in seqs]
        assert some.positions.tolist() == [seq.num_completion_tokens for seq in seqs]
        assert some.sample_indices.tolist() == [seq.sample_index for seq in seqs]


def make_known(seq):
    seq.newest = seq.last_token
    return seq


@STATES
@pytest.mark.parametrize("seed", range(6))
def test_rows_equal_their_sequences_while_they_come_grow_and_go(state_class, seed):
    rig = Rig(state_class, seed)
    rng, alive = rig.rng, []
    for _ in range(60):
        rng.shuffle(alive)
        alive = alive[: rng.choice([0, 2, len(alive), len(alive), len(alive)])]
        if len(alive) < NUM_LANES and rng.random() < 0.3:
            new = [
                rig.seq(rng.choice([1, 3, 4, 5, 130, 600]), rng.choice([0, 0.7, 2]), rng.getrandbits(64))
                for _ in range(rng.randint(1, NUM_LANES - len(alive)))
            ]
            if rng.random() < 0.5:
                rig.prefill(new)
            else:
                for seq in new:
                    make_known(seq)
            alive += new
        for _ in range(rng.randint(1, 4)):
            if alive:
                rig.step(alive)


@STATES
def test_a_steady_step_tells_the_device_nothing_but_appended_blocks(state_class):
    rig = Rig(state_class)
    seqs = [make_known(rig.seq(n)) for n in (5, 90, 6)]
    sizes = [rig.step(seqs) for _ in range(9)]
    # Lengths 5, 90 and 6 pass a multiple of 4 after 4, 3 and 3 steps; a triple of integers tells of a block.
    assert sizes[1:] == [0, 0, 6, 3, 0, 0, 6, 3]


@STATES
def test_a_row_alone_that_was_preempted_and_prefilled_again_has_its_new_blocks(state_class):
    """Between the two steps no other one tells that the blocks are not those of the last step."""
    rig = Rig(state_class)
    seqs = [make_known(rig.seq(6))]
    rig.step(seqs)
    seqs[0].append_token(seqs[0].newest)
    seqs[0].block_table.clear()
    rig.give_blocks(seqs[0])
    rig.prefill(seqs)
    rig.step(seqs)


@STATES
def test_all_lanes_can_change_hands_at_once(state_class):
    rig = Rig(state_class)
    for _ in range(3):
        rig.step([make_known(rig.seq(n + 1)) for n in range(NUM_LANES)])


@STATES
def test_an_idle_step_changes_no_lane(state_class):
    """Such steps warm up and are captured before there are sequences."""
    rig = Rig(state_class)
    rows = rig.state.lay_out(3)
    assert rows.context.slot_mapping.tolist() == [-1] * 3
    assert rows.context.context_lens.tolist() == rows.input_ids.tolist() == rows.positions.tolist() == [0] * 3
    rig.state.advance(torch.tensor([7, 8, 9], device=DEVICE))
    assert not rig.state.lanes.any()
