"""Greedy float32 output on a CPU equals that of transformers, whatever scheduler, cache and pool are made to do."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SHAPES, TinyConfig, assert_greedy, reference_logits

from nanovllm import LLM, RequestOutput, SamplingParams

Checkpoint = Callable[[TinyConfig], Path]
Reference = Callable[..., Any]
Prompts = list[list[int]]

FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "block_size": (1, 16, 256),
    "budget": (7, 50, 16384),
    "pool": ("ample", "tight"),
    "workload": ("mixed", "shared_prefix", "equal", "whole_blocks"),
    "num_requests": (1, 6, 64),
    "lookahead": (0, 1),
    "max_num_seqs": (3, 512),
}


def pairwise(factors: dict[str, tuple[Any, ...]], is_legal: Callable[[dict[str, Any]], bool]) -> Iterator[dict]:
    """Yield settings until every legal pair of values of two factors has occurred; seeded, so always the same."""
    rng = random.Random(0)
    legal = [
        case
        for values in itertools.product(*factors.values())
        if is_legal(case := dict(zip(factors, values, strict=True)))
    ]
    pairs_of = [frozenset(itertools.combinations(case.items(), 2)) for case in legal]
    missing = set().union(*pairs_of)
    while missing:
        best = max(rng.sample(range(len(legal)), min(200, len(legal))), key=lambda i: len(pairs_of[i] & missing))
        if pairs_of[best] & missing:
            missing -= pairs_of[best]
            yield legal[best]


CASES = list(
    pairwise(FACTORS, lambda case: case["num_requests"] > 1 or (case["pool"], case["workload"]) == ("ample", "mixed"))
)


def make_prompts(workload: str, num_requests: int, block_size: int, vocab: int, rng: random.Random) -> Prompts:
    """Return prompts; with blocks of 256 they end shortly before a block does, so that completions need another."""

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(n)]

    is_large = block_size == 256
    unit = {1: 9, 16: 16, 256: 256}[block_size]
    if workload == "mixed":
        if is_large:
            lens = [
                rng.choice((rng.randint(1, 30), rng.randint(246, 256), rng.randint(502, 515)))
                for _ in range(num_requests)
            ]
        else:
            lens = [rng.randint(1, 60) for _ in range(num_requests)]
        return [tokens(n) for n in lens]
    if workload == "shared_prefix":
        head = tokens(500 if is_large else 2 * unit + unit // 2)
        return [head + tokens(rng.randint(1, 12)) for _ in range(num_requests)]
    if workload == "equal":
        return [tokens(505 if is_large else 3 * unit - 4)] * num_requests
    bases = [tokens(3 * unit) for _ in range(2)]
    return [rng.choice(bases)[: unit * rng.randint(1, 2 if is_large else 3)] for _ in range(num_requests)]


def run(folder: Path, prompts: Prompts, params: Any, **knobs: Any) -> tuple[list[RequestOutput], int]:
    """Return the outputs and how often a sequence was preempted."""
    knobs = {"greedy_admission": True, **knobs}  # so that tight pools lead to preemption
    with LLM(str(folder), max_model_len=1024, **knobs) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.is_finished() and llm.step() == ([], 0)
        llm.engine.scheduler.block_manager.check_invariants([])
        return outputs, llm.engine.scheduler.num_preemptions


def greedy(max_tokens: int | None, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **settings)


def assert_complete(outputs: list[RequestOutput], prompts: Prompts, max_tokens: list[int]) -> None:
    for i, (out, prompt, num_tokens) in enumerate(zip(outputs, prompts, max_tokens, strict=True)):
        assert (out.index, out.prompt_token_ids, out.error) == (i, prompt, None)
        assert (out.finish_reason, len(out.token_ids)) == ("length", num_tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_greedy_output_is_that_of_transformers(
    case: dict[str, Any], tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape, block_size = SHAPES[case["shape"]], case["block_size"]
    rng = random.Random(str(case))
    prompts = make_prompts(case["workload"], case["num_requests"], block_size, shape.vocab, rng)
    max_tokens = [rng.randint(14, 24) for _ in prompts]
    most_blocks = max(-(-(len(p) + n) // block_size) for p, n in zip(prompts, max_tokens, strict=True))
    outputs, num_preemptions = run(
        tiny_checkpoint(shape),
        prompts,
        [greedy(n) for n in max_tokens],
        kvcache_block_size=block_size,
        num_kvcache_blocks=most_blocks + 1 if case["pool"] == "tight" else 70 * most_blocks,
        max_num_batched_tokens=case["budget"],
        max_num_seqs=case["max_num_seqs"],
        lookahead=case["lookahead"],
    )
    assert (num_preemptions > 0) == (case["pool"] == "tight")
    assert_complete(outputs, prompts, max_tokens)
    assert_greedy(tiny_reference(shape), outputs)


def test_the_pairwise_sample_has_every_legal_pair() -> None:
    for (a, values_a), (b, values_b) in itertools.combinations(FACTORS.items(), 2):
        seen = {(case[a], case[b]) for case in CASES}
        for pair in itertools.product(values_a, values_b):
            named = dict(zip((a, b), pair, strict=True))
            is_lone = named.get("num_requests") == 1 and (
                named.get("pool") == "tight" or named.get("workload", "mixed") != "mixed"
            )
            assert is_lone != (pair in seen), named


def random_shape(seed: int) -> TinyConfig:
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 2, 3))
    return TinyConfig(
        hidden=rng.randint(11, 50),
        layers=rng.randint(1, 4),
        heads=kv_heads * (1, 2, 4)[seed % 3],
        kv_heads=kv_heads,
        head_dim=2 * rng.randint(2, 11),
        intermediate=rng.randint(10, 70),
        vocab=2 * rng.randint(25, 400) + 1,
        tied=seed % 2 == 0,
        bias=seed % 4 >= 2,
        rope_theta=rng.choice((10000.0, 300.0, 1e6)),
        eps=rng.choice((1e-6, 1e-2)),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_shape_of_model_is_computed_as_transformers_does(
    seed: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape, rng = random_shape(seed), random.Random(seed)
    prompts = make_prompts("mixed", 20, 16, shape.vocab, rng)
    outputs, _ = run(tiny_checkpoint(shape), prompts, greedy(20), max_num_batched_tokens=100, num_kvcache_blocks=500)
    assert_complete(outputs, prompts, [20] * 20)
    assert_greedy(tiny_reference(shape), outputs)


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_depend_on_the_first_token_of_the_prompt(name: str, tiny_checkpoint: Checkpoint) -> None:
    # Without this the golden tests prove little: a wrong prefix in the cache would go unnoticed.
    shape = SHAPES[name]
    prompts = make_prompts("mixed", 64, 16, shape.vocab, random.Random(1))
    others = [[(prompt[0] + 1) % shape.vocab, *prompt[1:]] for prompt in prompts]
    outputs, _ = run(tiny_checkpoint(shape), prompts + others, greedy(20), num_kvcache_blocks=1000)
    num_changed = sum(a.token_ids != b.token_ids for a, b in zip(outputs[:64], outputs[64:], strict=True))
    assert num_changed >= 62


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pool", [9, 500])
def test_both_loop_modes_give_the_same_tokens(name: str, pool: int, tiny_checkpoint: Checkpoint) -> None:
    shape = SHAPES[name]
    prompts = make_prompts("mixed", 24, 16, shape.vocab, random.Random(2))
    prompts += make_prompts("shared_prefix", 24, 16, shape.vocab, random.Random(3))
    params = [greedy(1 + i % 30) for i in range(48)]
    knobs = {"kvcache_block_size": 16, "num_kvcache_blocks": pool, "max_num_batched_tokens": 45}
    synchronous, num_preemptions = run(tiny_checkpoint(shape), prompts, params, lookahead=0, **knobs)
    overlapped, num_preemptions_overlapped = run(tiny_checkpoint(shape), prompts, params, lookahead=1, **knobs)
    assert (num_preemptions > 0) == (num_preemptions_overlapped > 0) == (pool == 9)
    assert_complete(synchronous, prompts, [1 + i % 30 for i in range(48)])
    assert [out.token_ids for out in overlapped] == [out.token_ids for out in synchronous]


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_of_whole_blocks_answers_alike_when_its_prefix_is_cached(
    block_size: int, lookahead: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape = SHAPES["tied"]
    rng = random.Random(block_size)
    prompt = [rng.randrange(shape.vocab) for _ in range(2 * block_size)]
    knobs = {"kvcache_block_size": block_size, "num_kvcache_blocks": 40, "lookahead": lookahead}
    with LLM(str(tiny_checkpoint(shape)), max_model_len=1024, **knobs) as llm:
        first = llm.generate([prompt], greedy(10), use_tqdm=False)
        second = llm.generate([prompt, [*prompt, 1]], greedy(10), use_tqdm=False)
    assert [out.num_cached_tokens for out in first + second] == [0, block_size, 2 * block_size]
    assert second[0].token_ids == first[0].token_ids
    assert_greedy(tiny_reference(shape), first + second)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_next_turn_of_a_dialog_finds_its_answer_in_the_cache(
    lookahead: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape = SHAPES["bias"]
    knobs = {"kvcache_block_size": 4, "num_kvcache_blocks": 40, "lookahead": lookahead}
    with LLM(str(tiny_checkpoint(shape)), max_model_len=1024, **knobs) as llm:
        (first,) = llm.generate([[5, 4, 3, 2, 1]], greedy(17), use_tqdm=False)
        turn = [*first.prompt_token_ids, *first.token_ids, 7, 8]
        (second,) = llm.generate([turn], greedy(16), use_tqdm=False)
    # 5 + 17 tokens; the last one was never computed, and 20 of the others stand in 5 full blocks.
    assert second.num_cached_tokens == 20
    assert_greedy(tiny_reference(shape), [first, second])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("pool", [8, 500])
def test_an_end_token_ends_its_row_where_it_first_occurs(
    lookahead: int, pool: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape = SHAPES["one_kv_head"]
    prompts = make_prompts("mixed", 32, 16, shape.vocab, random.Random(4))
    knobs = {"kvcache_block_size": 16, "num_kvcache_blocks": pool, "lookahead": lookahead}
    endless, _ = run(tiny_checkpoint(shape), prompts, greedy(30), **knobs)
    assert_greedy(tiny_reference(shape), endless)
    counts = sorted(range(shape.vocab), key=lambda token: sum(token in out.token_ids for out in endless))
    ends = tuple(counts[-4:])  # the tokens that end the most rows
    ending = dataclasses.replace(shape, eos_token_ids=ends)
    outputs, _ = run(tiny_checkpoint(ending), prompts, [greedy(30), greedy(30, ignore_eos=True)] * 16, **knobs)
    reasons = []
    for i, (out, whole) in enumerate(zip(outputs, endless, strict=True)):
        end = next((j for j, token in enumerate(whole.token_ids) if token in ends), None)
        if i % 2 or end is None:
            assert (out.token_ids, out.finish_reason) == (whole.token_ids, "length")
        else:
            assert (out.token_ids, out.finish_reason) == (whole.token_ids[: end + 1], "stop")
        reasons.append(out.finish_reason)
    assert reasons.count("stop") >= 8


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_rows_end_by_length_at_max_model_len(
    lookahead: int, block_size: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape = dataclasses.replace(SHAPES["tied"], max_positions=50)  # the model's own limit: no position lies behind it
    rng = random.Random(5)
    prompts = [[rng.randrange(shape.vocab) for _ in range(n)] for n in (1, 33, 48, 49, 50, 51)]
    with LLM(
        str(tiny_checkpoint(shape)),
        max_model_len=50,
        kvcache_block_size=block_size,
        num_kvcache_blocks=250,
        lookahead=lookahead,
    ) as llm:
        for max_tokens in (None, 100):
            outputs = llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
            assert [len(out.token_ids) for out in outputs] == [49, 17, 2, 1, 0, 0]
            assert [out.finish_reason for out in outputs] == ["length"] * 4 + ["error"] * 2
            assert "50 tokens" in outputs[4].error and "max_model_len=50" in outputs[4].error
            assert_greedy(tiny_reference(shape), outputs[:4])


@pytest.mark.parametrize("name", ["plain", "tied", "bias"])
def test_bfloat16_departs_from_transformers_only_between_likely_tokens(
    name: str, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    # A first differing token is fine only if each side has the other's token among its top 5.
    import torch

    shape = SHAPES[name]
    prompts = make_prompts("mixed", 12, 16, shape.vocab, random.Random(6))
    own_top: list[list[int]] = []
    num_equal = 0
    with LLM(str(tiny_checkpoint(shape)), max_model_len=1024, dtype="bfloat16", num_kvcache_blocks=100) as llm:
        runner = llm.engine.model_runner
        assert runner.kv_cache.dtype == torch.bfloat16
        compute_logits = runner.model.compute_logits

        def recording(hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            logits = compute_logits(hidden_states)
            own_top.extend(logits.topk(5).indices.tolist())
            return logits

        runner.model.compute_logits = recording
        for prompt in prompts:  # one by one, so that the recorded rows are this prompt's in order
            own_top.clear()
            (out,) = llm.generate([prompt], greedy(12), use_tqdm=False)
            assert len(out.token_ids) == len(own_top) == 12
            (logits,) = reference_logits(tiny_reference(shape, "bfloat16"), [prompt + out.token_ids])
            logits = logits[len(prompt) - 1 : -1]
            differing = (logits.argmax(-1) != torch.tensor(out.token_ids)).nonzero()
            if len(differing):
                i = int(differing[0])
                assert out.token_ids[i] in logits[i].topk(5).indices
                assert int(logits[i].argmax()) in own_top[i]
            num_equal += not len(differing)
    assert num_equal >= 6
