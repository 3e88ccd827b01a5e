"""The engine on a GPU: backends, CUDA graphs and memory against the CPU path and transformers."""

import dataclasses
import random

import pytest
import torch
import torch._dynamo.utils
from tiny_models import TinyConfig, assert_greedy

from nanovllm import LLM, SamplingParams

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from nanovllm.kernels.pointwise import TritonRMSNorm

pytestmark = pytest.mark.gpu
KNOBS = {"device": "cuda", "max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.2}
SHAPE = TinyConfig(hidden=40, heads=4, kv_heads=2, head_dim=24, vocab=301)


def random_prompts(num, vocab_size, seed=0, most=60):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, most))] for _ in range(num)]


@pytest.fixture(scope="module")
def reference(tiny_checkpoint, tiny_reference):
    return tiny_checkpoint(SHAPE), tiny_reference(SHAPE)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    "pressure",
    [{}, {"max_num_batched_tokens": 23}, {"num_kvcache_blocks": 9, "kvcache_block_size": 16, "greedy_admission": True}],
)
def test_float32_on_the_card_equals_transformers(reference, backend, enforce_eager, lookahead, pressure):
    folder, model = reference
    prompts = random_prompts(24, SHAPE.vocab)
    prompts += [prompts[0], prompts[1][:16] + prompts[2]]
    knobs = {**KNOBS, **pressure, "enforce_eager": enforce_eager, "lookahead": lookahead}
    with LLM(str(folder), dtype="float32", attention_backend=backend, **knobs) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        if "num_kvcache_blocks" in pressure:
            assert llm.stats()["num_preemptions"] > 0
    assert all(output.error is None and len(output.token_ids) == 24 for output in outputs)
    assert_greedy(model, outputs)


def test_graph_equals_eager_token_for_token_with_everything_mixed(reference):
    folder, _ = reference
    prompts = random_prompts(16, SHAPE.vocab, seed=1)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=7, seed=5),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, n=3),
        SamplingParams(temperature=1.0, logit_bias={3: 4.0}, min_tokens=5, allowed_token_ids=list(range(40))),
    ]
    params = [dataclasses.replace(kinds[i % len(kinds)], max_tokens=20 + i) for i in range(len(prompts))]
    results = []
    for knobs in ({"enforce_eager": False}, {"enforce_eager": True}, {"enforce_eager": False, "lookahead": 0}):
        with LLM(str(folder), dtype="float32", **{**KNOBS, **knobs}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[sample.token_ids for sample in output.outputs] for output in outputs])
    assert results[0] == results[1] == results[2]
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=256) as llm:
        on_cpu = [[s.token_ids for s in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    same = sum(a == b for a, b in zip(results[0], on_cpu, strict=True))
    assert same >= len(prompts) - 1  # the same noise, logits equal within rounding


@pytest.mark.parametrize("backend", ["triton", "flash_attn", "torch"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_embedded_model_answers_on_the_card_as_on_the_cpu(backend, enforce_eager):
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    questions = [f"What is {a} + {b}?" for a, b in [(23, 45), (12, 30), (9, 8), (58, 67), (71, 14), (5, 5)]]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    answers = []
    for knobs in ({"device": "cpu"}, {**KNOBS, "attention_backend": backend, "enforce_eager": enforce_eager}):
        with LLM("embedded", **knobs) as llm:
            params = SamplingParams(temperature=0)
            answers.append([output.text for output in llm.chat(conversations * 5, params, use_tqdm=False)])
    assert answers[0] == answers[1]
    assert answers[0][0] == "23 + 45 = 68, sixty-eight."


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_bfloat16_agrees_with_transformers_by_the_top_k_rule(tmp_path, backend):
    """A first differing token is fine only if each side has the other's token among its top few."""
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    shape = dataclasses.replace(
        SHAPE, hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=8001, std=0.02
    )
    folder = shape.save(tmp_path / "wide")
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    prompts = random_prompts(12, shape.vocab, most=300)
    prompts += [prompts[0], prompts[3][:256] + prompts[1]]
    knobs = {**KNOBS, "max_model_len": 1024, "max_num_batched_tokens": 300}
    with LLM(str(folder), attention_backend=backend, **knobs) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=10)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids], device="cuda")).logits[0, len(prompt) - 1 :]
        for i, token_id in enumerate(output.token_ids):
            theirs = logits[i].argmax().item()
            if theirs != token_id:
                assert theirs in output.logprobs[i]
                assert token_id in logits[i].topk(10).indices.tolist()


def test_memory_is_sized_as_asked_and_a_share_too_small_names_the_figures():
    with LLM("embedded", **{**KNOBS, "num_kvcache_blocks": 7}) as llm:
        assert llm.engine.config.num_kvcache_blocks == 7
    with LLM("embedded", **KNOBS) as llm:  # not a million blocks for a tiny model: 4 x what 16 sequences can hold
        assert llm.engine.config.num_kvcache_blocks == 4 * 16 * (256 // 64)
        assert llm.engine.model_runner.device_ops.graphs.sizes == [8, 16]
    with pytest.raises(ValueError, match=r"No KV block of .* MiB fits: .*gpu_memory_utilization=0.001"):
        LLM("embedded", **{**KNOBS, "gpu_memory_utilization": 0.001})


def wide_folder(tmp_path):
    """Return a folder with the config.json of a small model whose logits are large."""
    return TinyConfig(hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=151936, layers=2).save(tmp_path / "wide")


def test_out_of_memory_in_mid_run_names_the_knobs_and_leaves_a_usable_engine(tmp_path):
    prompts = random_prompts(300, 1000, seed=3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    hungry = dataclasses.replace(params, prompt_logprobs=20, frequency_penalty=0.5)  # more than the warm-up has seen
    knobs = {**KNOBS, "max_num_seqs": 512, "num_kvcache_blocks": 2000}
    with LLM(str(wide_folder(tmp_path)), **knobs) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        torch.cuda.empty_cache()
        ballast = torch.empty(torch.cuda.mem_get_info()[0] - (96 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match=r"Out of memory on cuda:0 in a prefill step .* max_num_batched_tokens"):
            llm.generate(prompts, hungry, use_tqdm=False)
        del ballast
        torch.cuda.empty_cache()
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        llm.generate(prompts, hungry, use_tqdm=False)


def test_steps_wait_for_nothing_but_the_oldest_result(reference):
    """Whatever made the host wait for the device in mid-step would raise here."""
    folder, _ = reference
    kinds = [
        SamplingParams(temperature=0, prompt_logprobs=1),
        SamplingParams(temperature=1.2, top_k=7, min_p=0.02),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        SamplingParams(temperature=1.0, n=2, logprobs=2, logit_bias={3: 4.0}, allowed_token_ids=list(range(40))),
    ]
    params = [dataclasses.replace(kind, max_tokens=30, ignore_eos=True) for kind in kinds]
    for knobs in ({}, {"enforce_eager": True}):
        with LLM(str(folder), dtype="float32", **{**KNOBS, **knobs}) as llm:
            prompts = random_prompts(4, SHAPE.vocab)
            expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert [output.token_ids for output in outputs][:1] == expected[:1]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_compiled_after_the_start(tmp_path, monkeypatch, num_ranks, dtype, enforce_eager):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip("needs two CUDA devices")
    shape = TinyConfig(hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=64, vocab=5003, max_positions=4096)
    folder = shape.save(tmp_path / "model")
    kinds = [
        SamplingParams(temperature=0, prompt_logprobs=1),
        SamplingParams(temperature=1.2, top_k=7, min_p=0.02, n=3),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, top_p=0.9),
        SamplingParams(temperature=1.0, logprobs=2, logit_bias={3: 4.0}, allowed_token_ids=list(range(40))),
        SamplingParams(temperature=0.6),
    ]
    knobs = {**KNOBS, "max_model_len": 4096, "max_num_seqs": 21, "max_num_batched_tokens": 3000}
    knobs |= {"tensor_parallel_size": num_ranks}
    with LLM(str(folder), dtype=dtype, enforce_eager=enforce_eager, **knobs) as llm:
        compiled = []
        compile_kernel = JITFunction._do_compile

        def counting(self, *args, **kwargs):
            compiled.append(self.__name__)
            return compile_kernel(self, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "_do_compile", counting)
        for size in (1, 2, 3, 5, 21, 40):
            prompts = random_prompts(size, shape.vocab, seed=size, most=(7, 60, 300)[size % 3])
            params = [dataclasses.replace(kinds[(i + size) % 5], max_tokens=3 + i % 9) for i in range(size)]
            llm.generate(prompts, params, use_tqdm=False)
        llm.generate([*random_prompts(1, shape.vocab, most=1), list(range(4000))], kinds[4], use_tqdm=False)
        assert compiled == []
        size = 9 + 4 * num_ranks + 2 * enforce_eager + (dtype == "float32")  # one that no other case has
        TritonRMSNorm(size).cuda()(torch.zeros(1, size, device="cuda"))
        assert compiled == ["_rms_norm_kernel"]  # it counts
    assert "unique_graphs" not in torch._dynamo.utils.counters["stats"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_embedded_model_answers_with_two_ranks():
    with LLM("embedded", **KNOBS, tensor_parallel_size=2) as llm:
        messages = [{"role": "user", "content": "What is 23 + 45?"}]
        (output,) = llm.chat([messages], SamplingParams(temperature=0), use_tqdm=False)
    assert output.text == "23 + 45 = 68, sixty-eight."


def test_closing_gives_the_memory_back():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    llm = LLM("embedded", **KNOBS)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert torch.cuda.memory_allocated() > before + (1 << 25)
    del llm
    assert torch.cuda.memory_allocated() <= before + (1 << 22)


def test_flash_attn_refuses_what_it_cannot_do():
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    with pytest.raises(ValueError, match="kvcache_block_size=64: flash_attn takes multiples of 256"):
        LLM("embedded", **{**KNOBS, "attention_backend": "flash_attn", "kvcache_block_size": 64})
    with pytest.raises(ValueError, match="needs a 16-bit dtype, not float32"):
        LLM("embedded", **{**KNOBS, "attention_backend": "flash_attn", "dtype": "float32"})
