"""Random workloads over tiny caches equal a plain loop, token for token, with the books checked within every step."""

import random
from collections import Counter

from fakes import (
    VOCAB_SIZE,
    FakeRunner,
    check_workload,
    draw_workload,
    naive_completion,
    random_workload,
    token_after,
    value_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.sampling_params import SamplingParams


@st.composite
def workloads(draw):
    return draw_workload(lambda low, high: draw(st.integers(low, high)))


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_random_workloads_equal_the_naive_loop(workload):
    check_workload(workload)


def test_seeded_workloads_equal_the_naive_loop_and_meet_every_mechanism():
    """The same check on fixed seeds; it counts what they meet, lest the generator stop reaching something."""
    met = Counter()
    for seed in range(400):
        workload = random_workload(seed)
        for run in check_workload(workload):
            met["preemption"] += run.engine.scheduler.num_preemptions > 0
            met["refused"] += bool(run.refused)
            met["abort"] += bool(run.aborted)
            for output in run.outputs.values():
                met[output.finish_reason] += 1
                met["prefix hit"] += output.num_cached_tokens > 0
            computed = Counter(
                seq_id for is_prefill, rows in run.engine.model_runner.log if is_prefill for seq_id, _, _ in rows
            )
            met["chunks or recomputation"] += max(computed.values(), default=0) > 1
        met["next turn"] += any(
            a is not b and len(b.prompt) > len(a.prompt) and b.prompt[: len(a.prompt)] == a.prompt
            for a in workload.requests
            for b in workload.requests
        )
        met["equal prompts"] += len({request.prompt for request in workload.requests}) < len(workload.requests)
        met["block size", workload.block_size] += 1
    rare = {name: count for name, count in met.items() if count < 40}
    assert not rare, rare
    assert len(met) == 15, met


def test_the_fake_tokens_depend_on_the_whole_prefix():
    """A fake that forgets its prefix would hide every wrong hit."""
    rng = random.Random(0)
    num_changed = 0
    for _ in range(300):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
        changed = list(prompt)
        changed[rng.randrange(12)] = VOCAB_SIZE  # a token that the prompt does not have
        params = SamplingParams(max_tokens=4)
        num_changed += naive_completion(prompt, params) != naive_completion(changed, params)
    assert num_changed == 300


def test_the_fake_tokens_use_the_whole_vocabulary():
    counts = Counter(token_after(value_of([], i)) for i in range(1100))
    assert set(counts) == set(range(VOCAB_SIZE))
    assert max(counts.values()) < 200


def test_the_fake_cache_starts_unwritten():
    assert FakeRunner(3, 4).kv == [None] * 12
