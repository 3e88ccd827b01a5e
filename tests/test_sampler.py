"""Draws have the distribution that they should, and their noise depends on the request alone."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SHAPES, TinyConfig

from nanovllm import LLM, SamplingParams
from nanovllm.engine.llm_engine import request_key
from nanovllm.layers import sampler
from nanovllm.layers.sampler import (
    CHUNK_SIZE,
    Sampler,
    SamplingInputs,
    gumbel_from_bits,
    gumbel_noise,
    philox,
    sample_two_level,
)

Checkpoint = Callable[[TinyConfig], Path]


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Return the tokens, without their scores."""
    return Sampler()(logits, inputs)[0]


# The generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in words) == expected


def test_philox_broadcasts_as_if_each_counter_were_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    counter = [torch.randint(0, 2**32, (5, 3), generator=generator) for _ in range(4)]
    key = [torch.randint(0, 2**32, (5, 1), generator=generator) for _ in range(2)]
    together = philox(tuple(counter), tuple(key))
    for i, j in itertools.product(range(5), range(3)):
        alone = philox(tuple(c[i, j] for c in counter), tuple(k[i, 0] for k in key))
        assert [int(word[i, j]) for word in together] == [int(word) for word in alone]


def test_gumbel_noise_is_never_positive_infinity_nor_nan() -> None:
    edges = [0, 1, 2, 255, 256, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    noise = gumbel_from_bits(torch.tensor(edges))
    assert noise.dtype == torch.float32
    assert not noise.isnan().any()
    assert (noise < float("inf")).all()
    # Small bits are large noise: -log(-log(1 - 2**-33)) = 33 log 2 at the one end.
    assert float(noise[0]) == pytest.approx(22.8739, abs=1e-3)
    assert float(noise[6]) == pytest.approx(0.3665, abs=1e-3)
    assert (noise[1:] <= noise[:-1]).all()


def test_the_lowest_noise_makes_no_possible_token_lose_to_an_impossible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "philox", lambda counter, key: (torch.full_like(counter[0], 2**32 - 1),) * 4)
    logits = torch.full((1, 700), float("-inf"))
    logits[0, 431] = 0.0
    assert sample(logits, make_inputs()).tolist() == [431]


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    inputs = make_inputs(num_rows=400)
    noise = gumbel_noise(inputs, 1, torch.zeros(400, dtype=torch.int64), 256).flatten().double()
    euler, variance = 0.5772156649, torch.pi**2 / 6
    assert float(noise.mean()) == pytest.approx(euler, abs=5 * (variance / noise.numel()) ** 0.5)
    assert float(noise.var()) == pytest.approx(variance, rel=0.02)
    for quantile in (0.01, 0.25, 0.5, 0.9, 0.999):
        below = float((noise < -torch.log(-torch.log(torch.tensor(quantile)))).double().mean())
        assert below == pytest.approx(quantile, abs=5 * (quantile * (1 - quantile) / noise.numel()) ** 0.5)


def test_noise_of_an_id_is_the_same_whichever_range_it_is_drawn_in() -> None:
    inputs = make_inputs(num_rows=3)
    zeros = torch.zeros(3, dtype=torch.int64)
    whole = gumbel_noise(inputs, 0, zeros, 1001)
    assert whole.shape == (3, 1001)
    for start, size in ((0, 7), (256, 256), (512, 256), (996, 5)):
        assert torch.equal(gumbel_noise(inputs, 0, zeros + start, size), whole[:, start : start + size])
    assert whole[0].unique().numel() == 1001  # no two ids share their noise


# Draws


def make_inputs(num_rows: int = 1, temperature: float | torch.Tensor = 1.0, key: int = 12345, **fields: Any) -> Any:
    """Return inputs of one request's ``num_rows`` successive tokens, or with other ``fields``."""
    rows = torch.arange(num_rows)
    values: dict[str, Any] = {
        "temperatures": torch.zeros(num_rows) + temperature,
        "keys": torch.tensor([[key & 0xFFFFFFFF, key >> 32]]).repeat(num_rows, 1),
        "positions": rows,
        "sample_indices": torch.zeros_like(rows),
    } | fields
    return SamplingInputs(**values)


def chi_square_p(draws: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of draws under probabilities; rare outcomes are put together, impossible ones left out."""
    counts = torch.bincount(draws, minlength=len(probabilities)).double()[probabilities > 0]
    expected = probabilities[probabilities > 0].double() * len(draws)
    rare = expected < 10
    if rare.any():
        counts = torch.cat((counts[~rare], counts[rare].sum().unsqueeze(0)))
        expected = torch.cat((expected[~rare], expected[rare].sum().unsqueeze(0)))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def test_the_chi_square_p_value_is_that_of_the_tables() -> None:
    # 4 outcomes, statistic 7.815: the 5 % point of 3 degrees of freedom.
    draws = torch.repeat_interleave(torch.arange(4), torch.tensor([2500 + 98, 2500 - 98, 2500 + 14, 2500 - 14]))
    assert chi_square_p(draws, torch.full((4,), 0.25)) == pytest.approx(0.0497, abs=0.002)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("vocab", [7, 256, 700])
def test_draws_have_the_softmax_distribution(vocab: int, temperature: float) -> None:
    num_draws = 40_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    draws = sample(logits.expand(num_draws, -1), make_inputs(num_draws, temperature, key=vocab))
    assert draws.dtype == torch.int64
    probabilities = torch.softmax(logits.double() / temperature, 0)
    assert chi_square_p(draws, probabilities) > 1e-4
    # The test can tell: it rejects a temperature that is 10 % off.
    assert chi_square_p(draws, torch.softmax(logits.double() / (1.1 * temperature), 0)) < 1e-4


def test_draws_over_different_requests_have_the_softmax_distribution() -> None:
    num_draws = 40_000
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    keys = [request_key(None, 0, request_id, [1]) for request_id in range(num_draws)]
    inputs = make_inputs(
        num_draws,
        keys=torch.tensor([[key & 0xFFFFFFFF, key >> 32] for key in keys]),
        positions=torch.zeros(num_draws, dtype=torch.int64),
    )
    assert chi_square_p(sample(logits.expand(num_draws, -1), inputs), torch.softmax(logits, 0)) > 1e-4


@pytest.mark.parametrize("vocab", [50, 700])
def test_excluded_tokens_are_never_drawn(vocab: int) -> None:
    num_draws = 30_000
    logits = torch.zeros(vocab)
    allowed = torch.tensor([3, vocab // 2, vocab - 1])
    logits[:] = float("-inf")
    logits[allowed] = torch.tensor([0.0, 1.0, -2.0])
    draws = sample(logits.expand(num_draws, -1), make_inputs(num_draws, 0.7))
    assert torch.isin(draws, allowed).all()
    assert chi_square_p(draws, torch.softmax(logits.double() / 0.7, 0)) > 1e-4


def test_a_token_of_all_the_mass_is_always_drawn() -> None:
    logits = torch.full((700,), -1e30)
    logits[431] = 5.0
    assert (sample(logits.expand(5000, -1), make_inputs(5000, 2.0)) == 431).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_is_the_exact_argmax_beside_sampled_rows(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    temperatures = torch.tensor([0.0, 1.0, 1e-10, 0.3] * 16)
    sampled = sample(logits, make_inputs(64, temperatures))
    greedy = temperatures <= 1e-10
    assert torch.equal(sampled[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(sampled[~greedy], logits.argmax(-1)[~greedy])
    all_greedy = sample(logits, make_inputs(64, 0.0))
    assert torch.equal(all_greedy, logits.argmax(-1))
    # Greedy neighbours change no draw either.
    assert torch.equal(sampled[~greedy], sample(logits, make_inputs(64, temperatures.clamp(min=0.3)))[~greedy])


def test_a_low_temperature_is_nearly_greedy_and_overflows_nothing() -> None:
    logits = 30 * torch.randn(100, 700, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, make_inputs(100, 2e-10)), logits.argmax(-1))


def test_equal_logits_are_equally_likely_in_greedy_order_of_the_first() -> None:
    assert sample(torch.zeros(3, 700), make_inputs(3, 0.0)).tolist() == [0, 0, 0]


def test_neighbours_order_and_row_change_no_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows = 50
    logits = torch.randn(num_rows, 700, generator=generator)
    fields = {
        "temperatures": torch.rand(num_rows, generator=generator) + 0.5,
        "keys": torch.randint(0, 2**32, (num_rows, 2), generator=generator),
        "positions": torch.randint(0, 1000, (num_rows,), generator=generator),
        "sample_indices": torch.randint(0, 4, (num_rows,), generator=generator),
    }
    together = sample(logits, make_inputs(num_rows, **fields))
    order = torch.randperm(num_rows, generator=generator)
    shuffled = sample(logits[order], make_inputs(num_rows, **{name: x[order] for name, x in fields.items()}))
    assert torch.equal(shuffled, together[order])
    for i in range(num_rows):
        alone = sample(logits[i : i + 1], make_inputs(1, **{name: x[i : i + 1] for name, x in fields.items()}))
        assert int(alone) == int(together[i])


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


@pytest.mark.parametrize("vocab", [40, 700])
def test_noise_of_different_positions_keys_and_samples_is_uncorrelated(vocab: int) -> None:
    num_draws = 20_000
    logits = torch.zeros(num_draws, vocab)
    positions = torch.arange(num_draws)
    zeros = torch.zeros_like(positions)
    streams = {
        "base": make_inputs(num_draws, key=7),
        "next key": make_inputs(num_draws, key=8),
        "high half of the key": make_inputs(num_draws, key=7 + 2**32),
        "next position": make_inputs(num_draws, key=7, positions=positions + 1),
        "next sample": make_inputs(num_draws, key=7, sample_indices=zeros + 1),
        "sample and position swapped": make_inputs(num_draws, key=7, positions=zeros, sample_indices=positions),
    }
    draws = {name: sample(logits, inputs) for name, inputs in streams.items()}
    slack = 5 * (1 / vocab / num_draws) ** 0.5  # five standard deviations of the rate at which chance agrees
    for a, b in itertools.combinations(draws, 2):
        if {a, b} == {"base", "sample and position swapped"}:
            assert draws[a][0] == draws[b][0]  # the one counter that both share
        assert agreement(draws[a], draws[b]) == pytest.approx(1 / vocab, abs=slack), (a, b)
    assert torch.equal(sample(logits, streams["base"]), draws["base"])


def test_the_two_levels_draw_with_different_noise() -> None:
    inputs, zeros = make_inputs(2000), torch.zeros(2000, dtype=torch.int64)
    chunks, tokens = (gumbel_noise(inputs, level, zeros, 8).flatten() for level in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack((chunks, tokens)))[0, 1])) < 5 / 16000**0.5


def test_two_levels_choose_the_chunk_first_and_then_a_token_in_it() -> None:
    logits = torch.randn(200, 700, generator=torch.Generator().manual_seed(3))
    inputs = make_inputs(200)
    zeros = torch.zeros(200, dtype=torch.int64)
    chunk_noise = gumbel_noise(inputs, 0, zeros, 3)
    expected = []
    for row in range(200):
        masses = torch.stack([part.logsumexp(0) for part in logits[row].split(CHUNK_SIZE)])
        first = int((masses + chunk_noise[row]).argmax()) * CHUNK_SIZE
        noise = gumbel_noise(inputs, 1, zeros + first, CHUNK_SIZE)[row]
        part = logits[row, first : first + CHUNK_SIZE]
        expected.append(first + int((part + noise[: len(part)]).argmax()))
    assert sample_two_level(logits, inputs)[0].tolist() == expected


@pytest.mark.parametrize("vocab", [130, 256, 1000, 5000])
@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_the_part_with_the_highest_score_has_the_token_of_the_whole(vocab: int, num_parts: int) -> None:
    num_rows = 300
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, 7] = logits[:, vocab - 3] = 9.0  # greedy rows have equals in different parts
    logits[1::2, 7] = logits[1::2, vocab - 3] = 0.0
    temperatures = torch.where(torch.arange(num_rows) % 4 == 0, 0.0, 1.3)
    inputs = make_inputs(num_rows, temperatures)
    width = -(-vocab // (num_parts * CHUNK_SIZE)) * CHUNK_SIZE
    padded = torch.nn.functional.pad(logits, (0, num_parts * width - vocab), value=float("-inf"))
    draws = [Sampler()(part, inputs, i * width) for i, part in enumerate(padded.split(width, 1))]
    tokens, scores = (torch.stack(parts) for parts in zip(*draws, strict=True))
    winners = scores.argmax(0)
    assert torch.equal(tokens[winners, torch.arange(num_rows)], sample(logits, inputs))
    assert torch.equal(scores.amax(0), Sampler()(logits, inputs)[1])
    assert len(winners.unique()) == -(-vocab // width)  # each part wins some rows


# The engine


def draw(folder: Path, prompts: list[list[int]], params: Any, **knobs: Any) -> tuple[list[list[int]], int]:
    """Return each row's tokens, and how often a sequence was preempted."""
    with LLM(str(folder), max_model_len=256, **{"num_kvcache_blocks": 400} | knobs) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(out.error is None for out in outputs)
        return [out.token_ids for out in outputs], llm.engine.scheduler.num_preemptions


def random_prompts(num_prompts: int, vocab: int, most: int = 40) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, most))] for _ in range(num_prompts)]


@pytest.mark.parametrize("name", ["tied", "wide"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_seeded_request_draws_the_same_tokens_whatever_runs_beside_it(
    name: str, lookahead: int, tiny_checkpoint: Checkpoint
) -> None:
    shape = SHAPES[name]
    folder = tiny_checkpoint(shape)
    prompts = random_prompts(24, shape.vocab)
    seeded = SamplingParams(temperature=0.8, max_tokens=30, seed=11)
    (alone,), _ = draw(folder, prompts[7:8], seeded, lookahead=lookahead)
    others = SamplingParams(temperature=1.3, max_tokens=25)
    rows, num_preemptions = draw(
        folder, prompts, [seeded if i == 7 else others for i in range(24)], lookahead=lookahead
    )
    assert (rows[7], num_preemptions) == (alone, 0)
    # The youngest is preempted first, so put it last; chunks of 13 tokens, and another block size.
    last = [*prompts[:7], *prompts[8:], prompts[7]]
    knobs = {"lookahead": lookahead, "kvcache_block_size": 4, "num_kvcache_blocks": 40, "max_num_batched_tokens": 13}
    knobs["greedy_admission"] = True  # preempts
    rows, num_preemptions = draw(folder, last, [others] * 23 + [seeded], **knobs, seed=5)
    assert rows[23] == alone
    assert num_preemptions > 0
    assert draw(folder, prompts[7:8], seeded, lookahead=1 - lookahead)[0] == [alone]


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=25, seed=3), SamplingParams(max_tokens=25)])
def test_preemption_and_loop_mode_change_no_draw(params: SamplingParams, tiny_checkpoint: Checkpoint) -> None:
    shape = SHAPES["bias"]
    folder, prompts = tiny_checkpoint(shape), random_prompts(24, shape.vocab)
    ample, num_preemptions = draw(folder, prompts, params, lookahead=0)
    assert num_preemptions == 0
    for lookahead in (0, 1):
        tight, num_preemptions = draw(
            folder,
            prompts,
            params,
            lookahead=lookahead,
            kvcache_block_size=4,
            num_kvcache_blocks=18,
            greedy_admission=True,
        )
        assert tight == ample
        assert num_preemptions > 0
    assert len({tuple(row) for row in ample}) == 24


def test_one_seed_over_100_prompts_gives_each_its_own_noise(tiny_checkpoint: Checkpoint) -> None:
    # So hot that the model has no say: what rows have in common then is their noise.
    shape = SHAPES["one_kv_head"]
    prompts = [[i, 3] for i in range(shape.vocab)] + [[i, 4, 5] for i in range(3)]
    rows, _ = draw(tiny_checkpoint(shape), prompts, SamplingParams(temperature=1e6, max_tokens=8, seed=1))
    pairs = list(itertools.combinations(rows, 2))
    num_equal = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=True))
    expected = 8 * len(pairs) / shape.vocab
    assert abs(num_equal - expected) < 5 * expected**0.5
    assert len(pairs) == 4950


@pytest.mark.parametrize("seed", [None, 1])
def test_each_token_of_a_request_has_its_own_noise(seed: int | None, tiny_checkpoint: Checkpoint) -> None:
    shape = SHAPES["one_kv_head"]
    params = SamplingParams(temperature=1e6, max_tokens=200, seed=seed)
    ((row,), _) = draw(tiny_checkpoint(shape), [[5, 6, 7]], params)
    pairs = list(itertools.combinations(row, 2))
    expected = len(pairs) / shape.vocab
    assert abs(sum(a == b for a, b in pairs) - expected) < 5 * expected**0.5


def test_equal_prompts_with_equal_seeds_answer_alike_and_other_seeds_do_not(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint(SHAPES["tied"])
    params = [SamplingParams(max_tokens=20, seed=seed) for seed in (1, 1, 2, 2**64 - 1, -1)]
    (a, b, c, d, e), _ = draw(folder, [[5, 6, 7]] * 5, params)
    assert a == b and d == e  # a negative seed is its two's complement
    assert len({tuple(row) for row in (a, c, d)}) == 3


def test_equal_prompts_without_a_seed_differ(tiny_checkpoint: Checkpoint) -> None:
    rows, _ = draw(tiny_checkpoint(SHAPES["tied"]), [[5, 6, 7]] * 20, SamplingParams(max_tokens=20))
    assert len({tuple(row) for row in rows}) == 20


def test_the_engine_seed_repeats_a_run_and_another_changes_it(tiny_checkpoint: Checkpoint) -> None:
    shape = SHAPES["plain"]
    folder, prompts = tiny_checkpoint(shape), random_prompts(20, shape.vocab)
    params = [SamplingParams(max_tokens=20, seed=9 if i == 4 else None) for i in range(20)]
    first, _ = draw(folder, prompts, params)
    assert draw(folder, prompts, params)[0] == draw(folder, prompts, params, seed=0)[0] == first
    other, _ = draw(folder, prompts, params, seed=1)
    assert [i for i in range(20) if other[i] == first[i]] == [4]


def test_a_second_call_of_one_engine_draws_anew(tiny_checkpoint: Checkpoint) -> None:
    params = SamplingParams(max_tokens=20)
    with LLM(str(tiny_checkpoint(SHAPES["tied"])), num_kvcache_blocks=50, max_model_len=256) as llm:
        first, second = (llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].token_ids for _ in range(2))
    assert first != second


def test_greedy_rows_beside_sampled_ones_are_those_of_a_greedy_batch(tiny_checkpoint: Checkpoint) -> None:
    shape = SHAPES["bias_tied"]
    folder, prompts = tiny_checkpoint(shape), random_prompts(20, shape.vocab)
    greedy, drawn = SamplingParams(temperature=0, max_tokens=20), SamplingParams(max_tokens=20)
    all_greedy, _ = draw(folder, prompts, greedy)
    mixed, _ = draw(folder, prompts, [greedy, drawn] * 10)
    assert mixed[::2] == all_greedy[::2]
    assert all(a != b for a, b in zip(mixed[1::2], all_greedy[1::2], strict=True))


def test_request_keys_differ_by_seed_prompt_number_and_kind() -> None:
    keys = {request_key(seed, 0, 0, [token]) for seed in range(20) for token in range(20)}
    keys |= {request_key(None, seed, number, [1]) for seed in range(20) for number in range(20)}
    assert len(keys) == 800
    assert all(0 <= key < 2**64 for key in keys)
    assert request_key(3, 0, 0, [1, 2]) == request_key(3, 7, 9, [1, 2])  # neither engine seed nor number enter
    assert request_key(None, 3, 5, [1]) == request_key(None, 3, 5, [2])  # nor the prompt, without a seed
