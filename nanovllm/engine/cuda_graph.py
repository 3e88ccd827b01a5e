"""Captured decode: one CUDA graph a batch size, from the lanes of `DecodeState` to sampled tokens and advanced lanes.

Sampling of plain rows is inside. Rows with extras read the logits that the graph leaves and are sampled anew behind it,
so one captured variant a size serves both.
"""

import bisect
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.engine.decode_state import DecodeRows
from nanovllm.utils.forks import keep_in_forks

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, the largest batch last.

    The smallest is 8, since cuBLAS takes twice as long for the 1 to 3 rows of some shapes as for 8. Larger batches
    mind a few rows of padding less: 16 rows apart up to 256, 32 apart up to 512, then 64.
    """
    sizes = [8, *range(16, 256, 16), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Captures decode steps of a runner, largest first into one memory pool, and replays them.

    Args:
        runner: Its model, KV cache and decode state are captured.
        sizes: Batch sizes, ascending.
    """

    def __init__(self, runner: "ModelRunner", sizes: list[int]) -> None:
        keep_in_forks(self)
        self.sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[DecodeRows, torch.Tensor, torch.Tensor]]] = {}
        # One buffer for all sizes: what a graph leaves in its own memory, no other graph of the pool may use.
        width = len(runner.model.lm_head.weight)  # this rank's part of the vocabulary
        all_logits = torch.empty(sizes[-1], width, dtype=runner.dtype, device=runner.device)
        pool = None
        for size in reversed(sizes):
            runner.decode_rows(size, out=all_logits[:size])  # compiles and settles libraries outside of the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": NCCL's own thread may ask after earlier collectives meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                rows, logits, tokens, _ = runner.decode_rows(size, out=all_logits[:size])
            pool = pool or graph.pool()
            self._graphs[size] = graph, (rows, logits, tokens)
        torch.cuda.synchronize()

    def replay(
        self, num_rows: int, events: list[tuple[Any, Any]] | None
    ) -> tuple[DecodeRows, torch.Tensor, torch.Tensor]:
        """Run a decode step in the smallest graph that holds it; returns its rows, their logits and tokens.

        They are valid until the next replay. If there is a list of ``events``, start and end of the replay join it.
        """
        graph, (rows, logits, tokens) = self._graphs[self.sizes[bisect.bisect_left(self.sizes, num_rows)]]
        if events is None:
            graph.replay()
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        return rows.first(num_rows), logits[:num_rows], tokens[:num_rows]
