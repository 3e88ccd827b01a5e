"""The lanes of decode steps in three small kernels; twin and explanation: `nanovllm/engine/decode_state.py`."""

import torch
import triton
import triton.language as tl

from nanovllm.engine.decode_state import NUM_FIELDS, DecodeRows, DecodeState
from nanovllm.engine.step import DecodeInput
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.utils.context import Context

# Rows of the output of `_lay_out_kernel`; the first NUM_FIELDS are those of the lanes.
_SLOT, _CONTEXT_LEN = NUM_FIELDS, NUM_FIELDS + 1
_CHUNK = 128


@triton.jit(do_not_specialize=["order_len", "num_new", "width", "num_blocks"])
def _apply_kernel(packet, order, lanes, block_tables, last_tokens, order_len, num_new, width, num_blocks,
                  NUM_LANES: tl.constexpr, MAX_BLOCKS: tl.constexpr, FIELDS: tl.constexpr,
                  CHUNK: tl.constexpr):  # fmt: skip
    """Programs 0..num_new - 1 take a new row each, further ones a chunk of the order and of the appended blocks."""
    program = tl.program_id(0)
    columns = tl.arange(0, CHUNK)
    new_rows = packet + order_len
    new_tables = new_rows + num_new * (FIELDS + 1)
    if program < num_new:
        row = new_rows + program * (FIELDS + 1)
        lane = tl.load(row).to(tl.int64)
        fields = tl.load(row + 1 + columns, mask=columns < FIELDS, other=0)
        input_id = tl.load(row + 1)
        pending = tl.load(last_tokens + tl.maximum(-1 - input_id, 0)).to(tl.int32)
        fields = tl.where((columns == 0) & (fields < 0), pending, fields)
        tl.store(lanes + columns * NUM_LANES + lane, fields, mask=columns < FIELDS)
        for start in range(0, width, CHUNK):
            indices = start + columns
            blocks = tl.load(new_tables + program * width + indices, mask=indices < width, other=0)
            tl.store(block_tables + lane * MAX_BLOCKS + indices, blocks, mask=indices < width)
    else:
        at = (program - num_new) * CHUNK + columns
        tl.store(order + at, tl.load(packet + at, mask=at < order_len, other=-1),
                 mask=at < tl.where(order_len > 0, NUM_LANES, 0))  # fmt: skip
        triples = new_tables + num_new * width + at * 3
        mask = at < num_blocks
        targets = block_tables + tl.load(triples, mask=mask, other=0).to(tl.int64) * MAX_BLOCKS
        targets += tl.load(triples + 1, mask=mask, other=0)
        tl.store(targets, tl.load(triples + 2, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _lay_out_kernel(order, lanes, block_tables, fields_out, keys_out, tables_out, num_rows, NUM_LANES: tl.constexpr,
                    MAX_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIELDS: tl.constexpr,
                    PAD_BLOCKS: tl.constexpr):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    lane = tl.load(order + row)
    is_live = lane >= 0
    lane = tl.maximum(lane, 0).to(tl.int64)
    columns = tl.arange(0, 8)
    fields = tl.load(lanes + columns * NUM_LANES + lane, mask=columns < FIELDS, other=0)
    fields = tl.where((columns < 2) & (columns >= tl.where(is_live, 2, 0)), 0, fields)  # token and position of no row
    tl.store(fields_out + columns * num_rows + row, fields, mask=columns < FIELDS)
    tl.store(keys_out + row * 2 + columns - 3, fields, mask=(columns == 3) | (columns == 4))
    position = tl.load(lanes + NUM_LANES + lane)
    block = tl.load(block_tables + lane * MAX_BLOCKS + position // BLOCK_SIZE, mask=is_live, other=0)
    tl.store(fields_out + FIELDS * num_rows + row, tl.where(is_live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(fields_out + (FIELDS + 1) * num_rows + row, tl.where(is_live, position + 1, 0))
    for at in tl.static_range(0, MAX_BLOCKS, PAD_BLOCKS):
        blocks = at + tl.arange(0, PAD_BLOCKS)
        mask = blocks < MAX_BLOCKS
        table = tl.load(block_tables + lane * MAX_BLOCKS + blocks, mask=mask, other=0)
        tl.store(tables_out + row.to(tl.int64) * MAX_BLOCKS + blocks, table, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(order, lanes, tokens, last_tokens, num_rows, NUM_LANES: tl.constexpr, CHUNK: tl.constexpr):
    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(tokens + rows, mask=rows < num_rows, other=0)
    lane = tl.load(order + rows, mask=rows < num_rows, other=-1)
    is_live = lane >= 0
    tl.store(last_tokens + rows, token, mask=is_live)
    tl.store(lanes + lane, token.to(tl.int32), mask=is_live)
    position = lanes + NUM_LANES + lane
    tl.store(position, tl.load(position, mask=is_live, other=0) + 1, mask=is_live)
    output_position = lanes + 5 * NUM_LANES + lane
    tl.store(output_position, tl.load(output_position, mask=is_live, other=0) + 1, mask=is_live)


class TritonDecodeState(DecodeState):
    """`DecodeState` with its device side in kernels, each of which a CUDA graph can capture."""

    def apply(self, packet: torch.Tensor, step: DecodeInput) -> None:
        """See `DecodeState.apply`."""
        order_len = 0 if step.order is None else len(step.order)
        chunks = triton.cdiv(max(len(self.order) if order_len else 0, len(step.new_blocks)), _CHUNK)
        _apply_kernel[(len(step.new_rows) + chunks,)](
            packet, self.order, self.lanes, self.block_tables, self.last_tokens, order_len, len(step.new_rows),
            step.new_tables.shape[1], len(step.new_blocks), NUM_LANES=len(self.order),
            MAX_BLOCKS=self.block_tables.size(1), FIELDS=NUM_FIELDS, CHUNK=_CHUNK, num_warps=4)  # fmt: skip

    def lay_out(self, num_rows: int) -> DecodeRows:
        """See `DecodeState.lay_out`; all integers are int32, and keys the bits of their halves."""
        max_blocks = self.block_tables.size(1)
        fields = self.lanes.new_empty(NUM_FIELDS + 2, num_rows)
        keys, tables = self.lanes.new_empty(num_rows, 2), self.lanes.new_empty(num_rows, max_blocks)
        _lay_out_kernel[(num_rows,)](
            self.order, self.lanes, self.block_tables, fields, keys, tables, num_rows,
            NUM_LANES=len(self.order), MAX_BLOCKS=max_blocks, BLOCK_SIZE=self.block_size, FIELDS=NUM_FIELDS,
            PAD_BLOCKS=min(1024, triton.next_power_of_2(max_blocks)), num_warps=4)  # fmt: skip
        input_ids, positions, temperatures, _, _, output_positions, sample_indices, slots, context_lens = fields
        context = Context(slot_mapping=slots, context_lens=context_lens, block_tables=tables)
        sampling = SamplingInputs(temperatures.view(torch.float32), keys, output_positions, sample_indices)
        return DecodeRows(input_ids, positions, context, sampling)

    def advance(self, tokens: torch.Tensor) -> None:
        """See `DecodeState.advance`."""
        _advance_kernel[(triton.cdiv(len(tokens), _CHUNK),)](
            self.order, self.lanes, tokens, self.last_tokens, len(tokens), NUM_LANES=len(self.order),
            CHUNK=_CHUNK, num_warps=4)  # fmt: skip
