"""All-reduce inside one kernel, through memory of the other ranks' GPUs that this rank's kernels can write.

Every rank sends its rows to all ranks and adds up, in order of ranks, what arrives in its own memory, so that all have
the same bits. There is neither flag nor barrier: a place that holds the pattern of -0.0 was not written yet, and 0.0 is
sent for -0.0 (the idea of TensorRT-LLM's "Lamport" kernels, and before them of NCCL's LL protocol).

A row has three places, used in turn. Turn t empties the place of turn t - 1, which is used again at t + 2: another rank
writes there when it has this rank's part of t + 1, which is sent by a later kernel than the one that emptied the place.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import dependent_launch, wait_for_inputs, warps_for

_TURNS = tl.constexpr(3)
_POLLS = tl.constexpr(32)  # between two looks at whether all is over
_HOST_POLLS = tl.constexpr(8192)  # and at the host's memory: some milliseconds
_LANES = 32  # a row has at least a column for each, since lanes that stand for one column might not see the same
_PICK_ROWS = 32  # of one program


@triton.jit
def _send(bits, at, mask, pointers, first_byte, EMPTY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
          STRIDE: tl.constexpr):  # fmt: skip
    """Write ``bits`` to place ``at`` of this rank in the memory of all ranks, its own last."""
    bits = tl.where(bits == EMPTY, 0, bits).to(bits.dtype)
    for step in tl.static_range(1, RANKS + 1):
        base = (tl.load(pointers + (RANK + step) % RANKS) + first_byte).to(tl.pointer_type(bits.dtype))
        tl.store(tl.multiple_of(base, 16) + at + RANK * STRIDE, bits, mask=mask)


@triton.jit
def _receive(at, mask, stop, stopped, EMPTY: tl.constexpr):
    """Load what a rank sends as soon as all of it is there, or what there is of it once ``stop`` is set."""
    bits = tl.load(at, mask=mask, other=0, volatile=True)
    state = tl.max((bits == EMPTY).to(tl.int32), 0)
    lanes = tl.arange(0, bits.shape[0])
    polls = 0
    while state == 1:
        polls += 1
        # The host's memory is far: were it read more often, that would keep the other ranks waiting, who would then
        # read it too. What one program finds there, others find on the device. By one lane, every so many polls.
        known = tl.load(stopped + lanes, mask=lanes + polls % _POLLS == 0, other=0, volatile=True)
        known |= tl.load(stop + lanes, mask=lanes + polls % _HOST_POLLS == 0, other=0, volatile=True)
        bits = tl.load(at, mask=mask, other=0, volatile=True)
        state = tl.max((bits == EMPTY).to(tl.int32) + 2 * (known != 0).to(tl.int32), 0)
    if state > 1:
        tl.store(stopped, 1)
    return bits


@triton.jit
def all_reduce_row(value, row, columns, mask, pointers, turns, stop, stopped, DTYPE: tl.constexpr,
                   SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr):  # fmt: skip
    """Return the sum over ranks of one row, [PAD] float32; each rank's part is rounded to DTYPE before."""
    EMPTY: tl.constexpr = -(2**15) if DTYPE.primitive_bitwidth == 16 else -(2**31)
    STRIDE: tl.constexpr = MAX_ROWS * SIZE
    turn = tl.load(turns + row)
    at = row.to(tl.int64) * SIZE + columns
    bits = value.to(DTYPE).to(tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32, bitcast=True)
    _send(bits, at + turn.to(tl.int64) * RANKS * STRIDE, mask, pointers, 0, EMPTY, RANK, RANKS, STRIDE)
    own = tl.multiple_of(tl.load(pointers + RANK).to(tl.pointer_type(bits.dtype)), 16) + at
    used = own + ((turn + _TURNS - 1) % _TURNS).to(tl.int64) * RANKS * STRIDE
    own += turn.to(tl.int64) * RANKS * STRIDE
    total = tl.zeros(value.shape, tl.float32)
    for source in tl.static_range(RANKS):
        tl.store(used + source * STRIDE, tl.full(bits.shape, EMPTY, bits.dtype), mask=mask)
    for source in tl.static_range(RANKS):
        total += _receive(own + source * STRIDE, mask, stop, stopped, EMPTY).to(DTYPE, bitcast=True).to(tl.float32)
    tl.store(turns + row, (turn + 1) % _TURNS)
    return total


@triton.jit
def _all_reduce_kernel(x, out, pointers, turns, stop, stopped, SIZE: tl.constexpr, PAD: tl.constexpr,
                       RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, PAD)
    mask = columns < SIZE
    wait_for_inputs(PDL)
    at = row.to(tl.int64) * SIZE + columns
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = out.dtype.element_ty
    total = all_reduce_row(value, row, columns, mask, pointers, turns, stop, stopped, DTYPE, SIZE, RANK, RANKS,
                           MAX_ROWS)  # fmt: skip
    tl.store(out + at, total.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "first_byte"])
def _pick_kernel(tokens, scores, out, num_rows, pointers, first_byte, turns, stop, stopped, RANK: tl.constexpr,
                 RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A score and its token travel as one word of 64 bits; no token makes it -1."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    wait_for_inputs(PDL)
    turn = tl.load(turns + rows, mask=mask, other=0)
    score = tl.load(scores + rows, mask=mask, other=0.0)
    draw = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tl.load(tokens + rows, mask=mask, other=0)
    _send(draw, turn * RANKS * MAX_ROWS + rows, mask, pointers, first_byte, -1, RANK, RANKS, MAX_ROWS)
    own = (tl.load(pointers + RANK) + first_byte).to(tl.pointer_type(tl.int64)) + rows
    used = own + (turn + _TURNS - 1) % _TURNS * RANKS * MAX_ROWS
    own += turn * RANKS * MAX_ROWS
    for source in tl.static_range(RANKS):
        tl.store(used + source * MAX_ROWS, tl.full((BLOCK,), -1, tl.int64), mask=mask)
    draw = _receive(own, mask, stop, stopped, -1)
    best = (draw >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    for source in tl.static_range(1, RANKS):
        other = _receive(own + source * MAX_ROWS, mask, stop, stopped, -1)
        score = (other >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        draw = tl.where(score > best, other, draw)
        best = tl.where(score > best, score, best)
    tl.store(turns + rows, (turn + 1) % _TURNS, mask=mask)
    tl.store(out + rows, draw & 0x7FFFFFFF, mask=mask)


def padded(width: int) -> int:
    """Return the columns that a program takes for a row."""
    return max(_LANES, triton.next_power_of_2(width))


class PeerBuffers:
    """Where the ranks of one engine meet; every rank calls the same methods in the same order.

    Args:
        rank: This one.
        addresses: Of each rank's memory, filled as `patterns` says.
        width: Columns of the rows that are added up.
        max_rows: Rows that one launch adds up; what has more takes several.
        max_draws: Rows of one pick.
        dtype: Of rows.
        device: Of this rank.
    """

    def __init__(self, rank: int, addresses: list[int], width: int, max_rows: int, max_draws: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.rank, self.width, self.max_rows, self.max_draws, self.dtype = rank, width, max_rows, max_draws, dtype
        # In the host's memory, where it can be set while a kernel waits. Through numpy, since torch lets nobody write
        # to what was made in inference mode.
        self._stop = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._stop_word = self._stop.numpy()
        self._stopped = torch.zeros(1, dtype=torch.int32, device=device)  # what kernels know of it
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._row_turns = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._draw_turns = torch.zeros(max_draws, dtype=torch.int32, device=device)
        self._first_draw = self.patterns(len(addresses), width, max_rows, max_draws, dtype)[0][0]

    @staticmethod
    def patterns(
        num_ranks: int, width: int, max_rows: int, max_draws: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """Return how many bytes of memory a rank needs for rows, how many for draws, and which 32 bits fill them."""
        sizes = [3 * num_ranks * max_rows * width * dtype.itemsize, 3 * num_ranks * max_draws * 8]
        return [(-(-sizes[0] // 16) * 16, 0x80008000 if dtype.itemsize == 2 else 0x80000000),
                (-(-sizes[1] // 16) * 16, 0xFFFFFFFF)]  # fmt: skip

    def abort(self) -> None:
        """End all waiting, for good; from any thread. What is returned from then on means nothing."""
        self._stop_word[0] = 1

    def arguments(self) -> dict[str, Any]:
        """Return what a kernel passes on to `all_reduce_row`."""
        return {
            "pointers": self.pointers,
            "turns": self._row_turns,
            "stop": self._stop,
            "stopped": self._stopped,
            "RANK": self.rank,
            "RANKS": len(self.pointers),
            "MAX_ROWS": self.max_rows,
        }

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` [num_rows, width] over all ranks."""
        assert x.is_contiguous() and x.size(1) == self.width and x.dtype == self.dtype
        out = torch.empty_like(x)
        pad = padded(self.width)
        for first in range(0, len(x), self.max_rows):
            rows = slice(first, first + self.max_rows)
            _all_reduce_kernel[(len(x[rows]),)](
                x[rows], out[rows], **self.arguments(), SIZE=self.width, PAD=pad,
                num_warps=warps_for(pad), **dependent_launch(x))  # fmt: skip
        return out

    def pick(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel.pick`; at most ``max_draws`` rows."""
        out = torch.empty_like(tokens)
        _pick_kernel[(triton.cdiv(len(tokens), _PICK_ROWS),)](
            tokens, scores, out, len(tokens), self.pointers, self._first_draw, self._draw_turns, self._stop,
            self._stopped, RANK=self.rank, RANKS=len(self.pointers), MAX_ROWS=self.max_draws, BLOCK=_PICK_ROWS,
            num_warps=1, **dependent_launch(tokens))  # fmt: skip
        return out
