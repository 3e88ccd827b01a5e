"""The lanes of decode steps in three small kernels; twin and explanation: `nanovllm/engine/decode_state.py`."""

import torch
import triton
import triton.language as tl

from nanovllm.engine.decode_state import NUM_FIELDS, DecodeRows, DecodeState
from nanovllm.engine.step import DecodeInput
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.utils.context import Context

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


@triton.jit
def _lay_out_kernel(order, lanes, block_tables, input_ids, positions, slots, context_lens, tables, temperatures, keys,
                    output_positions, sample_indices, NUM_LANES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, PAD_BLOCKS: tl.constexpr):  # fmt: skip
    """One program a row; fields of a lane in the order of `nanovllm/engine/decode_state.py`."""
    row = tl.program_id(0)
    lane = tl.load(order + row)
    is_live = lane >= 0
    lane = tl.maximum(lane, 0).to(tl.int64)
    fields = lanes + lane
    position = tl.load(fields + NUM_LANES, mask=is_live, other=0)
    block = tl.load(block_tables + lane * MAX_BLOCKS + position // BLOCK_SIZE, mask=is_live, other=0).to(tl.int64)
    tl.store(input_ids + row, tl.load(fields, mask=is_live, other=0).to(tl.int64))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(slots + row, tl.where(is_live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(context_lens + row, tl.where(is_live, position + 1, 0))
    tl.store(temperatures + row, tl.load(fields + 2 * NUM_LANES))
    tl.store(keys + 2 * row, tl.load(fields + 3 * NUM_LANES).to(tl.uint32).to(tl.int64))
    tl.store(keys + 2 * row + 1, tl.load(fields + 4 * NUM_LANES).to(tl.uint32).to(tl.int64))
    tl.store(output_positions + row, tl.load(fields + 5 * NUM_LANES).to(tl.int64))
    tl.store(sample_indices + row, tl.load(fields + 6 * NUM_LANES).to(tl.int64))
    for start in tl.static_range(0, MAX_BLOCKS, PAD_BLOCKS):
        indices = start + tl.arange(0, PAD_BLOCKS)
        table = tl.load(block_tables + lane * MAX_BLOCKS + indices, mask=indices < MAX_BLOCKS, other=0)
        tl.store(tables + row.to(tl.int64) * MAX_BLOCKS + indices, table, mask=indices < MAX_BLOCKS)


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
        """See `DecodeState.lay_out`."""
        max_blocks = self.block_tables.size(1)
        device = self.order.device
        # Whole rows of 16 bytes, so that any number of rows runs in the same compiled kernels.
        width = -(-num_rows // 4) * 4
        longs, ints = (torch.empty(5, width, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        ids, positions, slots, output_positions, samples = longs[:, :num_rows]
        lens, temperatures = ints[:2, :num_rows]
        keys = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
        tables = torch.empty(num_rows, max_blocks, dtype=torch.int32, device=device)
        _lay_out_kernel[(num_rows,)](
            self.order, self.lanes, self.block_tables, ids, positions, slots, lens, tables, temperatures, keys,
            output_positions, samples, NUM_LANES=len(self.order), MAX_BLOCKS=max_blocks, BLOCK_SIZE=self.block_size,
            PAD_BLOCKS=min(1024, triton.next_power_of_2(max_blocks)), num_warps=4)  # fmt: skip
        context = Context(slot_mapping=slots, context_lens=lens, block_tables=tables)
        sampling = SamplingInputs(temperatures.view(torch.float32), keys, output_positions, samples)
        return DecodeRows(ids, positions, context, sampling)

    def advance(self, tokens: torch.Tensor) -> None:
        """See `DecodeState.advance`."""
        _advance_kernel[(triton.cdiv(len(tokens), _CHUNK),)](
            self.order, self.lanes, tokens, self.last_tokens, len(tokens), NUM_LANES=len(self.order),
            CHUNK=_CHUNK, num_warps=4)  # fmt: skip
