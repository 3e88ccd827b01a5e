"""DecodeState: the rows of decode steps, kept on the device from step to step.

Each row has a *lane*, where its next token, its position, its sampling parameters and its block table stay for as long
as it decodes. The host sends what changed: rows that came or went, and blocks that were appended. A step lays its
rows out from the lanes, and at its end advances them, so that a captured step needs no input in between.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import DecodeInput
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.utils.context import Context

# Fields of a lane, an int32 each (temperatures as their bits), in the order of `DecodeInput.new_rows`.
INPUT_ID, POSITION, TEMPERATURE, KEY_LOW, KEY_HIGH, OUTPUT_POSITION, SAMPLE_INDEX = range(7)
NUM_FIELDS = 7


class DecodeRows(NamedTuple):
    """The rows of a step as the model takes them: ids and positions [num_rows], and what attention and sampler read."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sampling: SamplingInputs

    def first(self, num_rows: int) -> "DecodeRows":
        """Return the first rows, for the sampler."""
        sampling = SamplingInputs(*(part[:num_rows] for part in self.sampling))
        return self._replace(
            input_ids=self.input_ids[:num_rows], positions=self.positions[:num_rows], sampling=sampling
        )


class DecodeState:
    """Lanes in plain torch; `nanovllm/kernels/decode_state.py` has the same in kernels.

    Rows stand longest first, which keeps the last wave of attention programs short; the order changes only when rows
    come or go, since all grow by one token a step.

    Args:
        num_lanes: Most rows of a step.
        max_blocks: Most blocks of a sequence.
        block_size: Tokens a block holds.
    """

    def __init__(self, num_lanes: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.order = torch.full((num_lanes,), -1, dtype=torch.int32)  # lane of each row; -1: no row
        self.lanes = torch.zeros(NUM_FIELDS, num_lanes, dtype=torch.int32)
        self.block_tables = torch.zeros(num_lanes, max_blocks, dtype=torch.int32)
        self.last_tokens = torch.zeros(num_lanes, dtype=torch.int64)  # what the last step sampled, by row of its logits
        self._lane_of: dict[int, int] = {}  # by sequence id; the host's record, like all that follows
        self._seqs: list[Sequence] = []  # of the last step, as the scheduler gave them
        self._num_tokens = np.zeros(num_lanes, np.int64)  # by lane
        self.seqs: list[Sequence] = []  # of the last step, by row
        self.rows: list[int] = []  # row of each of `_seqs`

    def prepare(self, seqs: SequenceOf[Sequence], last_rows: dict[int, int]) -> DecodeInput:
        """Return what a step of these sequences has to tell the device, and note it as told.

        Args:
            seqs: The step's sequences, of each of which the newest token is computed.
            last_rows: Row of the last step's samples that holds a sequence's pending token, by sequence id.
        """
        order, came = None, list[Sequence]()
        if seqs != self._seqs:
            came = self._rearrange(seqs)
            order = self._order
        self._num_tokens[self._order] += 1
        position = self._num_tokens[self._order] - 1
        appended = np.flatnonzero(position % self.block_size == 0)
        new_blocks = [(self._order[r], position[r] // self.block_size, self.seqs[r].block_table[-1]) for r in appended]
        return DecodeInput(
            len(seqs), order, *self._describe(came, last_rows), np.array(new_blocks, np.int32).reshape(-1, 3)
        )

    def forget(self, seqs: SequenceOf[Sequence]) -> None:
        """Take lanes from sequences that are prefilled (again): their blocks are other ones now."""
        gone = {seq.seq_id for seq in seqs} & self._lane_of.keys()
        if gone:
            self._lane_of = {seq_id: lane for seq_id, lane in self._lane_of.items() if seq_id not in gone}
            self._seqs = []

    def _rearrange(self, seqs: SequenceOf[Sequence]) -> list[Sequence]:
        """Give lanes to new sequences and sort the rows; returns the new ones."""
        lane_of = {seq.seq_id: self._lane_of[seq.seq_id] for seq in seqs if seq.seq_id in self._lane_of}
        came = [seq for seq in seqs if seq.seq_id not in lane_of]
        taken = set(lane_of.values())
        free = (lane for lane in range(len(self._num_tokens)) if lane not in taken)
        for seq, lane in zip(came, free, strict=False):
            lane_of[seq.seq_id] = lane
            self._num_tokens[lane] = seq.num_tokens - 1
        lanes = np.array([lane_of[seq.seq_id] for seq in seqs], np.int32)
        by_length = np.argsort(-self._num_tokens[lanes], kind="stable")
        rows = np.empty_like(by_length)
        rows[by_length] = np.arange(len(seqs))
        self._order: np.ndarray = lanes[by_length]
        self._lane_of, self._seqs = lane_of, list(seqs)
        self.seqs, self.rows = [seqs[i] for i in by_length], rows.tolist()
        return came

    def _describe(self, came: SequenceOf[Sequence], last_rows: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the fields of `DecodeInput` that tell of new sequences."""
        rows = np.zeros((len(came), 1 + NUM_FIELDS), np.int32)
        tables = np.zeros((len(came), max((len(seq.block_table) for seq in came), default=0)), np.int32)
        for row, table, seq in zip(rows, tables, came, strict=True):
            row[0] = self._lane_of[seq.seq_id]
            row[1 + INPUT_ID] = -1 - last_rows[seq.seq_id] if seq.num_pending_tokens else seq.last_token
            row[1 + POSITION] = seq.num_tokens - 1
            row[1 + TEMPERATURE] = np.float32(seq.sampling_params.temperature).view(np.int32)
            row[1 + KEY_LOW : 1 + KEY_HIGH + 1] = np.array([seq.request_key], "<u8").view("<i4")
            row[1 + OUTPUT_POSITION] = seq.num_completion_tokens
            row[1 + SAMPLE_INDEX] = seq.sample_index
            table[: len(seq.block_table)] = seq.block_table
        return rows, tables

    def apply(self, packet: torch.Tensor, step: DecodeInput) -> None:
        """Bring the lanes up to date.

        Args:
            packet: `DecodeInput.packet` on the device.
            step: The same on the host, for its sizes.
        """
        order, new_rows, new_tables, new_blocks = packet.split([part.size for part in step.parts])
        if step.order is not None:
            self.order[: step.num_rows] = order
            self.order[step.num_rows :] = -1
        if len(step.new_rows):
            lanes, fields = new_rows.view(step.new_rows.shape).T.long().split((1, NUM_FIELDS))
            pending = self.last_tokens[(-1 - fields[INPUT_ID]).clamp(min=0)]
            fields[INPUT_ID] = torch.where(fields[INPUT_ID] < 0, pending, fields[INPUT_ID])
            self.lanes[:, lanes[0]] = fields.int()
            self.block_tables[lanes[0], : step.new_tables.shape[1]] = new_tables.view(step.new_tables.shape)
        if len(step.new_blocks):
            lanes, indices, blocks = new_blocks.view(-1, 3).unbind(1)
            self.block_tables[lanes.long(), indices.long()] = blocks

    def lay_out(self, num_rows: int) -> DecodeRows:
        """Return the first rows; those without a lane have slot -1 and length 0."""
        order = self.order[:num_rows].long()
        is_live, lanes = order >= 0, order.clamp(min=0)
        fields = self.lanes[:, lanes]
        keys = fields[[KEY_LOW, KEY_HIGH]].T.long() & 0xFFFFFFFF
        temperatures = fields[TEMPERATURE].view(torch.float32)
        fields = fields.long()
        positions = torch.where(is_live, fields[POSITION], 0)
        tables = self.block_tables[lanes]
        blocks = tables.gather(1, positions.unsqueeze(1) // self.block_size).squeeze(1).long()
        slots = blocks * self.block_size + positions % self.block_size
        context = Context(
            slot_mapping=torch.where(is_live, slots, -1),
            context_lens=torch.where(is_live, positions + 1, 0).int(),
            block_tables=tables,
        )
        sampling = SamplingInputs(temperatures, keys, fields[OUTPUT_POSITION], fields[SAMPLE_INDEX])
        return DecodeRows(torch.where(is_live, fields[INPUT_ID], 0), positions, context, sampling)

    def advance(self, tokens: torch.Tensor) -> None:
        """Move the rows on by the tokens [num_rows] that were sampled for them."""
        order = self.order[: len(tokens)]
        lanes = order[order >= 0].long()
        self.lanes[POSITION, lanes] += 1
        self.lanes[OUTPUT_POSITION, lanes] += 1
        self.replace_tokens(tokens[order >= 0])

    def replace_tokens(self, tokens: torch.Tensor) -> None:
        """Put other tokens [num_rows] in the place of those that the rows were advanced by."""
        self.lanes[INPUT_ID, self.order[: len(tokens)].long()] = tokens.int()
        self.last_tokens[: len(tokens)] = tokens
