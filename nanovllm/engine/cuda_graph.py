"""Captured decode: one CUDA graph a batch size, from a flat packet of integers to logits and sampled tokens.

Sampling of plain rows is inside. Rows with extras read the logits that the graph leaves and are sampled anew behind it,
so one captured variant a size serves both.
"""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.engine.step import StepInput

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Fields of a row in the packet, each an int32 (temperatures as their bits), before the block tables.
_ROW_FIELDS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "context_lens",
    "temperatures",
    "output_positions",
    "sample_indices",
)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, multiples of 16, and the largest batch itself."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, max_num_seqs, 16)) if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class _Graph:
    """One captured size: its input packet, its logits and its tokens."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        self.size = size
        self.packet = torch.zeros(size * (len(_ROW_FIELDS) + 2 + max_blocks), dtype=torch.int32, device=device)
        self.graph = torch.cuda.CUDAGraph()
        self.logits = self.tokens = self.packet


class DecodeGraphs:
    """Captures decode steps of a runner, largest first into one memory pool, and replays them.

    Args:
        runner: Its model, KV cache and last samples are captured.
        sizes: Batch sizes, ascending.
    """

    def __init__(self, runner: "ModelRunner", sizes: list[int]) -> None:
        start = time.perf_counter()
        self._sizes = sizes
        self._max_blocks = runner.max_blocks
        self._graphs: dict[int, _Graph] = {}
        pool = None
        for size in reversed(sizes):
            graph = _Graph(size, self._max_blocks, runner.device)
            self._fill(graph, runner.idle_step(np.ones(size, np.int64), is_prefill=False))
            inputs = self._unpack(graph)
            runner.decode_packet(*inputs)  # compiles and settles libraries outside of the capture
            torch.cuda.synchronize()
            with torch.cuda.graph(graph.graph, pool=pool):
                graph.logits, graph.tokens = runner.decode_packet(*inputs)
            pool = pool or graph.graph.pool()
            self._graphs[size] = graph
        torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - start

    def replay(self, step: StepInput, events: list[tuple[Any, Any]] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a decode step in the smallest graph that holds it; returns its rows' logits and tokens.

        They are valid until the next replay. If there is a list of ``events``, start and end of the replay join it.
        """
        num_rows = len(step.input_ids)
        graph = self._graphs[next(size for size in self._sizes if size >= num_rows)]
        self._fill(graph, step)
        start, end = (torch.cuda.Event(enable_timing=events is not None) for _ in range(2))
        start.record()
        graph.graph.replay()
        end.record()
        if events is not None:
            events.append((start, end))
        return graph.logits[:num_rows], graph.tokens[:num_rows]

    def _fill(self, graph: _Graph, step: StepInput) -> None:
        """Send a step's arrays to the device as one packet; padding rows have slot -1 and length 0."""
        size, num_rows = graph.size, len(step.input_ids)
        host = torch.zeros(
            graph.packet.shape, dtype=torch.int32, device="cpu", pin_memory=True
        )  # kept until the copy is done
        packet = host.numpy()
        rows = packet[: len(_ROW_FIELDS) * size].reshape(len(_ROW_FIELDS), size)
        for row, name in zip(rows, _ROW_FIELDS, strict=True):
            values = getattr(step, name)
            row[:num_rows] = values.view(np.int32) if name == "temperatures" else values
        rows[_ROW_FIELDS.index("slot_mapping"), num_rows:] = -1
        rest = packet[rows.size :]
        rest[: 2 * num_rows] = step.keys.astype(np.uint32).view(np.int32).ravel()
        tables = rest[2 * size :].reshape(size, self._max_blocks)
        assert step.block_tables is not None
        tables[:num_rows, : step.block_tables.shape[1]] = step.block_tables
        graph.packet.copy_(host, non_blocking=True)

    def _unpack(self, graph: _Graph) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        size = graph.size
        rows = graph.packet[: len(_ROW_FIELDS) * size].view(len(_ROW_FIELDS), size)
        fields = dict(zip(_ROW_FIELDS, rows, strict=True))
        fields["temperatures"] = fields["temperatures"].view(torch.float32)
        rest = graph.packet[rows.numel() :]
        return fields, rest[: 2 * size].view(size, 2), rest[2 * size :].view(size, self._max_blocks)
