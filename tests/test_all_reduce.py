"""The exchange inside kernels: ranks are streams of one card, or without one, processes that interpret the kernels."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_reduce
from nanovllm.kernels.all_reduce import PeerBuffers
from nanovllm.kernels.pointwise import TritonRMSNorm
from nanovllm.utils.parallel import TensorParallel

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
WIDTH, MAX_ROWS, MAX_DRAWS, EPS = 200, 5, 40, 1e-6
ROWS = [1, 5, 3, 12, 5, 1, 2, 5, 4, 13]  # of each turn; some are more than one launch takes
DRAWS = [1, 40, 33, 7, 40, 2, 39, 40, 40, 1]


def make_memory(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return each rank's memory as it is before any rank has written there."""
    patterns = PeerBuffers.patterns(size, WIDTH, MAX_ROWS, MAX_DRAWS, dtype)
    fill = [np.full(num_bytes // 4, pattern, np.uint32) for num_bytes, pattern in patterns]
    return [torch.from_numpy(np.concatenate(fill).view(np.int32)).to(DEVICE) for _ in range(size)]


def make_peers(rank: int, memory: list[torch.Tensor], dtype: torch.dtype) -> PeerBuffers:
    return PeerBuffers(rank, [part.data_ptr() for part in memory], WIDTH, MAX_ROWS, MAX_DRAWS, dtype, DEVICE)


def make_rows(turn: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's rows of a turn, with zeros of both signs."""
    num_rows = ROWS[turn] if size == 2 else min(ROWS[turn], MAX_ROWS)
    rows = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)
    rows[:, ::7] = -0.0 if rank % 2 else 0.0
    rows[:, 3] = -0.0
    return rows


def make_draws(turn: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and scores; many are equal on several ranks, some are zeros of both signs, or -inf on all."""
    scores = torch.randint(-3, 4, (DRAWS[turn],), generator=torch.Generator().manual_seed(100 * turn + rank)).float()
    scores[::5] = float("-inf")
    scores[1::5] *= 0.0
    return torch.arange(DRAWS[turn]) * 3001 + rank * 1000, scores


def prepare(tp: TensorParallel, dtype: torch.dtype, turn: int) -> Callable[[], list[torch.Tensor]]:
    """Return what takes part in a turn, and gives a sum, a norm behind a sum with its residual, and picked tokens."""
    rows, residual = (make_rows(turn, rank, tp.size, dtype).to(DEVICE) for rank in (tp.rank, 99))
    norm = TritonRMSNorm(WIDTH, EPS).to(DEVICE, dtype)
    norm.weight.copy_(torch.linspace(0.5, 2, WIDTH))
    norm.tp = tp
    share = rows
    if len(rows) <= MAX_ROWS:  # a share of few rows comes in parts
        share = torch.stack((rows.float() / 4, rows.float() / 2, rows.float() / 4))
    special = rows.clone()
    special[0, 1], special[-1, 2], special[0, 8] = float("inf"), float("nan"), tp.rank * 1e4
    draws = [x.to(DEVICE) for x in make_draws(turn, tp.rank)]
    return lambda: [tp.all_reduce(special), *norm(share, residual), tp.pick(*draws)]


def assert_right(results: list[Any], size: int, dtype: torch.dtype, turn: int) -> None:
    """Compare with float64 twins, and bit by bit with the sum in order of ranks."""
    total, normed, residual, picked = (torch.as_tensor(result).cpu() for result in results)
    parts = [make_rows(turn, rank, size, dtype).float() for rank in range(size)]
    exact = torch.zeros_like(parts[0])
    for part in parts:
        exact = exact + part
    expected = exact.clone()
    expected[0, 1], expected[-1, 2], expected[0, 8] = float("inf"), float("nan"), 1e4 * size * (size - 1) / 2
    assert torch.equal(total.nan_to_num(-7), expected.to(dtype).float().nan_to_num(-7))
    before = make_rows(turn, 99, size, dtype).float()
    assert torch.equal(residual, (exact + before).to(dtype).float())
    exact = exact.double() + before.double()
    expected = exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt()
    expected = expected * torch.linspace(0.5, 2, WIDTH).to(dtype).double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
    draws = [make_draws(turn, rank) for rank in range(size)]
    for row, token in enumerate(picked.tolist()):
        best = max(range(size), key=lambda rank: (float(draws[rank][1][row]), -rank))
        assert token == draws[best][0][row]


def be_rank(rank: int, memory: list[torch.Tensor], dtype: torch.dtype, results: Any) -> None:
    torch.set_num_threads(1)
    tp = TensorParallel(rank, len(memory), peers=make_peers(rank, memory, dtype))
    results.put((rank, [[x.float().tolist() for x in prepare(tp, dtype, turn)()] for turn in range(len(ROWS))]))


@pytest.mark.skipif(IS_GPU, reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float16), (3, torch.float32)])  # it cuts bfloat16 off
def test_processes_add_up_and_pick(size: int, dtype: torch.dtype) -> None:
    memory = [part.share_memory_() for part in make_memory(size, dtype)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=be_rank, args=(rank, memory, dtype, results)) for rank in range(size)]
    try:
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=120) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    for rank in range(size):
        for turn in range(len(ROWS)):
            assert_right([torch.tensor(x) for x in found[rank][turn]], size, dtype, turn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_streams_add_up_and_pick(size: int, dtype: torch.dtype) -> None:
    for rank in range(size):  # loading a kernel may wait for those that run, so none is loaded while another waits
        peers = make_peers(rank, make_memory(size, dtype), dtype)
        peers.abort()
        for turn in (0, 3):
            prepare(TensorParallel(rank, size, peers=peers), dtype, turn)()
    memory = make_memory(size, dtype)
    ranks = [TensorParallel(rank, size, peers=make_peers(rank, memory, dtype)) for rank in range(size)]
    streams = [torch.cuda.Stream() for _ in ranks]
    turns = [[prepare(tp, dtype, turn % len(ROWS)) for tp in ranks] for turn in range(len(ROWS) * 5)]
    found: list[list[list[torch.Tensor]]] = [[] for _ in turns]
    torch.cuda.synchronize()  # a copy from the host would wait for ranks that have yet to start
    for turn, parts in enumerate(turns):
        for part, stream in zip(parts, streams, strict=True):
            with torch.cuda.stream(stream):
                found[turn].append(part())
    torch.cuda.synchronize()
    for turn, results in enumerate(found):
        for rank in range(size):
            assert_right([x.float() for x in results[rank]], size, dtype, turn % len(ROWS))


def run_within(seconds: float, run: Callable[[], Any], peers: PeerBuffers) -> list[Any]:
    """Return what ``run`` gives, in a list that is empty if it waits for too long."""
    results: list[Any] = []

    def work() -> None:
        result = run()
        if IS_GPU:
            torch.cuda.synchronize()
        results.append(result)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    found = list(results)
    if thread.is_alive():
        peers.abort()
        thread.join(20)
        assert not thread.is_alive(), "waiting does not end"
    return found


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_GPU:  # a poll takes the interpreter long
        monkeypatch.setattr(all_reduce, "_POLLS", type(all_reduce._POLLS)(2))
        monkeypatch.setattr(all_reduce, "_HOST_POLLS", type(all_reduce._HOST_POLLS)(4))


@pytest.mark.usefixtures("_short_waits")
def test_nothing_is_lost_of_a_rank_that_is_a_turn_ahead() -> None:
    """Rank 1, written by hand, has sent the next turn's part before rank 0 takes this one's: the most that can be."""
    memory = make_memory(2, torch.float32)
    peers = make_peers(0, memory, torch.float32)
    num_words = 3 * 2 * MAX_ROWS * WIDTH
    rows = memory[0][:num_words].view(torch.float32).view(3, 2, MAX_ROWS, WIDTH)
    draws = memory[0][num_words:].view(torch.int64).view(3, 2, MAX_DRAWS)
    tokens, scores = torch.tensor([5, 6], device=DEVICE), torch.tensor([1.0, 2.0], device=DEVICE)

    def send(turn: int) -> None:
        rows[turn % 3, 1, :2] = 10.0 * turn + 1
        score = 1.5 if turn % 2 else 2.5
        draws[turn % 3, 1, :2] = (int(np.float32(score).view(np.int32)) << 32) + 100 + turn

    send(0)
    for turn in range(8):
        send(turn + 1)
        part = torch.full((2, WIDTH), float(turn), device=DEVICE)
        ((total, picked),) = run_within(20, lambda x=part: (peers.all_reduce(x), peers.pick(tokens, scores)), peers)
        assert torch.equal(total, torch.full_like(total, 11.0 * turn + 1))
        assert picked.tolist() == ([100 + turn, 6] if turn % 2 else [100 + turn] * 2)


@pytest.mark.usefixtures("_short_waits")
def test_waiting_ends_when_another_thread_says_so() -> None:
    tokens, scores = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, device=DEVICE)
    part = torch.ones(2, WIDTH, device=DEVICE)
    for name, args in ("all_reduce", (part,)), ("pick", (tokens, scores)):
        memory = make_memory(2, torch.float32)
        peers = make_peers(0, memory, torch.float32)
        run = getattr(peers, name)
        assert not run_within(1, lambda run=run, args=args: run(*args), peers)  # rank 1 never comes
        begin = time.monotonic()
        assert run_within(20, lambda run=run, args=args: [run(*args) for _ in range(1000 if IS_GPU else 3)], peers)
        assert time.monotonic() - begin < 1  # all over at once, also where many steps were under way


def test_few_rows_meet_in_memory_and_of_many_ranks_no_more() -> None:
    memory = make_memory(3, torch.float32)
    two, three = (TensorParallel(0, size, peers=make_peers(0, memory[:size], torch.float32)) for size in (2, 3))
    assert two.sums_in_norm(1) and two.sums_in_norm(MAX_ROWS + 1)
    assert three.sums_in_norm(MAX_ROWS) and not three.sums_in_norm(MAX_ROWS + 1)
    assert not TensorParallel(0, 2).sums_in_norm(1)


def test_peers_met_after_the_end_wait_for_nobody() -> None:
    tp, peers = TensorParallel(0, 2), make_peers(0, make_memory(2, torch.float32), torch.float32)
    tp.meet(peers)
    assert not peers._stop.item()
    tp.peers = None
    tp.close()
    tp.meet(peers)
    assert peers._stop.item()
