"""Throughput of a batch: nano-vLLM's draw on the shapes of Qwen3 (random weights), or a checkpoint of yours.

    python bench.py                                # 256 sequences, 0.6B shapes; without a GPU the embedded model
    python bench.py --model 8B --num-seqs 64 --attention-backend flash_attn
    python bench.py --model path/to/Qwen3-0.6B --enforce-eager
    python bench.py --profile traces               # traces of prefill and decode for chrome://tracing or Perfetto
    python bench.py --vs-transformers              # on a CPU, against transformers' generate, in one process

The last line is one JSON object. Every figure is also put in relation to the floor: the time that the card needs to
read the KV of each token's context and the weights of each step, and to multiply, at ceilings measured in this run.
"""

import argparse
import functools
import importlib.metadata
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

_START = time.perf_counter()  # start-up is counted from here, imports included

PRESETS = {  # hidden, intermediate, layers, query heads, KV heads, tied
    "180M": (640, 1920, 14, 10, 5, True),
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
}

EXCHANGE = ("all_reduce", "_pick_kernel", "nccl")  # in the names of kernels that wait for other ranks


def parse_args(default_model: str) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=default_model, help="180M, 0.6B, 4B, 8B (random weights), a folder or a hub id"
    )
    parser.add_argument("--num-seqs", type=int, default=None, help="sequences (256; 32 for the embedded model)")
    parser.add_argument("--input-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="runs, each with fresh prompts")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write traces there, and a table by kernel")
    parser.add_argument("--vs-transformers", action="store_true", help="a batch of 16 on the CPU, ours and theirs")
    return parser.parse_args()


def write_preset(name: str, folder: Path) -> None:
    """Write the config.json of a Qwen3 shape."""
    hidden, intermediate, layers, heads, kv_heads, tied = PRESETS[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure_ceilings(device: str) -> tuple[float, float]:
    """Return the device's copy bandwidth in bytes/s (read plus written) and its bf16 matrix rate in flop/s."""
    import torch

    if device == "cpu":
        return float("nan"), float("nan")

    def best_s(run: Any, rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    source = torch.ones(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / best_s(functools.partial(torch.add, source, 1, out=target), 10)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    rate = 2 * 8192**3 / best_s(functools.partial(torch.matmul, matrix, matrix), 20)
    del source, target, matrix
    torch.cuda.empty_cache()
    return bandwidth, rate


def floor_s(model: Any, lens: list[tuple[int, int]], max_num_seqs: int, bandwidth: float, rate: float) -> float:
    """Return the least time for prompts and completions of these lengths.

    Each generated token reads the KV of its whole context, each decode step reads the weights or computes with them,
    whichever takes longer, and prefill computes two operations a weight and token. 16-bit weights and KV.
    """
    per_layer = model.hidden_size * model.head_dim * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    per_layer += 3 * model.hidden_size * model.intermediate_size
    body = model.num_hidden_layers * per_layer
    weights = body + model.vocab_size * model.hidden_size
    kv_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 2
    kv_tokens = sum(out * prompt + out * (out - 1) // 2 for prompt, out in lens)
    seconds = kv_tokens * kv_bytes / bandwidth + sum(prompt for prompt, _ in lens) * 2 * body / rate
    waiting = [out - 1 for _, out in reversed(lens)]  # the first token comes from prefill
    alive: list[int] = []
    while waiting or alive:  # decode with as many rows as may be alive
        while waiting and len(alive) < max_num_seqs:
            alive.append(waiting.pop())
        steps = max(1, min(alive))
        seconds += steps * max(2 * weights / bandwidth, 2 * weights * len(alive) / rate)
        alive = [left - steps for left in alive if left > steps]
    return seconds


def add_random_requests(llm: Any, num_rows: int, seed: int, max_tokens: int) -> None:
    """Queue prompts of 100 to 850 random tokens that all run to ``max_tokens``."""
    from nanovllm import SamplingParams

    rng, most = random.Random(seed), min(9999, llm.engine.model_config.vocab_size - 1)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    for _ in range(num_rows):
        llm.add_request([rng.randint(0, most) for _ in range(rng.randint(100, 850))], params)


def steady_decode(llm: Any, num_rows: int, num_steps: int = 200) -> dict[str, float]:
    """Decode ``num_rows`` rows for a while; return the step's time, and the share of it in which the GPU idles."""
    import torch

    device = llm.engine.model_runner.device_ops
    add_random_requests(llm, num_rows, seed=1, max_tokens=num_steps + 40)
    while llm.engine.stats()["num_decode_steps"] < 10 or llm.engine.scheduler.waiting or llm.step()[1] > 0:
        llm.step()
    for _ in range(10):
        llm.step()
    torch.cuda.synchronize()
    before, device.replay_events = llm.stats(), []
    start = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    elapsed, after = time.perf_counter() - start, llm.stats()
    torch.cuda.synchronize()
    busy = sum(first.elapsed_time(last) for first, last in device.replay_events) / 1e3
    num_replays, device.replay_events = len(device.replay_events), None
    host_s = elapsed - after["wait_s"] + before["wait_s"]  # what the host does of a step, seen or hidden
    while not llm.is_finished():
        llm.step()
    return {
        "rows": num_rows,
        "step_ms": round(elapsed / num_steps * 1e3, 3),
        "replay_ms": round(busy / num_replays * 1e3, 3),
        "gpu_idle_share": round(1 - busy / num_replays / (elapsed / num_steps), 4),
        "host_ms_per_step": round(host_s / num_steps * 1e3, 3),
        "host_hidden_share": round(1 - max(0.0, elapsed - busy / num_replays * num_steps) / host_s, 3),
    }


def profile(llm: Any, num_rows: int, folder: Path) -> None:
    """Trace a prefill of ``num_rows`` prompts and then 20 decode steps; print each one's GPU time by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    num_steps = 20
    add_random_requests(llm, num_rows, seed=2, max_tokens=num_steps + 20)
    folder.mkdir(parents=True, exist_ok=True)
    for phase in ("prefill", "decode"):
        steps = 0
        with trace(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            while llm.engine.scheduler.waiting if phase == "prefill" else steps < num_steps:
                llm.step()
                steps += 1
        profiler.export_chrome_trace(str(folder / f"{phase}.json"))
        events = profiler.key_averages()
        kernels = [
            (e.self_device_time_total, e) for e in events if e.self_device_time_total and not e.self_cpu_time_total
        ]
        spent = sorted(kernels or [(e.self_cpu_time_total, e) for e in events], key=lambda pair: -pair[0])
        total_ms = sum(time_us for time_us, _ in spent) / steps / 1e3
        print(f"{phase}, {num_rows} rows: {steps} steps, {total_ms:.3f} ms each in kernels")
        for time_us, event in spent[:16]:
            print(f"  {time_us / steps / 1e3:8.3f} ms {event.count / steps:7.1f} calls  {event.key[:90]}")
        exchange_us = sum(time_us for time_us, event in spent if any(word in event.key for word in EXCHANGE))
        share = exchange_us / steps / 1e3 / total_ms
        print(f"  {exchange_us / steps / 1e3:8.3f} ms, {share:.1%}: kernels in which ranks exchange, waiting included")
    while not llm.is_finished():
        llm.step()


def compare_with_transformers() -> None:
    """Time a greedy batch of 16 in float32 on the CPU: equal lengths, then mixed ones with left padding for them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nanovllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_preset("180M", Path(folder))
        llm = LLM(folder, load_format="dummy", device="cpu", num_kvcache_blocks=4096)
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).float().eval()
    rng = random.Random(0)
    for name, (low, high) in {"equal": (64, 64), "mixed": (16, 128)}.items():
        ratios = []
        for _ in range(4):
            prompts = [[rng.randint(0, 9999) for _ in range(rng.randint(low, high))] for _ in range(16)]
            lens_out = [rng.randint(low, high) for _ in prompts]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens_out]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            ours = time.perf_counter() - start
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, max_new_tokens=max(lens_out), do_sample=False, pad_token_id=0)
            ratios.append((time.perf_counter() - start) / ours)
        ratios = sorted(ratios[1:])  # the first round warms up
        print(json.dumps({"lengths": name, "threads": torch.get_num_threads(), "transformers_over_ours": ratios}))


def main() -> None:
    """Run the benchmark and print its figures."""
    import torch

    import nanovllm
    from nanovllm import LLM, SamplingParams

    import_s = time.perf_counter() - _START
    has_gpu = torch.cuda.is_available()
    args = parse_args("0.6B" if has_gpu else "embedded")
    if args.vs_transformers:
        compare_with_transformers()
        return
    num_seqs = args.num_seqs or (32 if args.model == "embedded" else 256)
    knobs = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.max_model_len,
        "attention_backend": args.attention_backend,
        "enforce_eager": args.enforce_eager,
        "lookahead": args.lookahead,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in PRESETS:
            write_preset(model, Path(folder))
            model, knobs["load_format"] = folder, "dummy"
        llm = LLM(model, **knobs)
    startup_s = time.perf_counter() - _START
    bandwidth, rate = measure_ceilings("cuda" if has_gpu else "cpu")
    config = llm.engine.model_config
    most = min(10000, config.vocab_size - 1)
    rng = random.Random(args.seed)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)  # one tiny call first
    for _ in range(args.repeat):
        # nano-vLLM's draw: each prompt's length, then its ids; then all output lengths.
        prompts = [[rng.randint(0, most) for _ in range(rng.randint(*args.input_len))] for _ in range(num_seqs)]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(*args.output_len)) for _ in prompts
        ]
        before = llm.stats()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        stats = {name: value - before[name] for name, value in llm.stats().items()}
        tokens_in = sum(len(prompt) for prompt in prompts)
        tokens_out = sum(len(output.token_ids) for output in outputs)  # what was really generated
        lens = [(len(prompt), len(output.token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]
        floor = float("nan")
        if has_gpu:  # of all cards together
            floor = floor_s(config, lens, args.max_num_seqs, bandwidth, rate) / args.tensor_parallel_size
        steps = max(1, stats["num_decode_steps"] + stats["num_prefill_steps"])
        graphs = llm.engine.model_runner.device_ops.graphs
        steady = steady_decode(llm, min(num_seqs, args.max_num_seqs)) if graphs else {}
        result = {
            "model": args.model,
            "backend": llm.engine.model_runner.backend.name,
            "num_seqs": num_seqs,
            "prompt_tokens": tokens_in,
            "output_tokens": tokens_out,
            "elapsed_s": round(elapsed, 3),
            "tok_per_s": round(tokens_out / elapsed, 1),
            "floor_s": round(floor, 3) if has_gpu else None,
            "floor_share": round(floor / elapsed, 4) if has_gpu else None,
            "prefill_tok_per_s": round(tokens_in / max(stats["prefill_s"], 1e-9), 1),
            "decode_tok_per_s": round(tokens_out / max(stats["decode_s"], 1e-9), 1),
            "host_ms_per_step": round((elapsed - stats["wait_s"]) / steps * 1e3, 3),
            "gpu_idle_share": steady.get("gpu_idle_share"),
            "steady_decode": steady,
            "wait_ms_per_step": round(stats["wait_s"] / steps * 1e3, 3),
            "decode_steps": stats["num_decode_steps"],
            "prefill_steps": stats["num_prefill_steps"],
            "preemptions": stats["num_preemptions"],
            "prefix_hit_rate": round(stats["num_prefix_hit_tokens"] / tokens_in, 4),
            "startup_s": round(startup_s, 2),
            "num_cuda_graphs": len(graphs.sizes) if graphs else 0,
            "startup_parts_s": {
                part: round(seconds, 2) for part, seconds in {"imports": import_s, **llm.engine.startup_s}.items()
            },
            "copy_tb_per_s": round(bandwidth / 1e12, 3) if has_gpu else None,
            "matrix_tflop_per_s": round(rate / 1e12, 1) if has_gpu else None,
            "settings": {**knobs, "num_kvcache_blocks": llm.engine.config.num_kvcache_blocks},
            "device": torch.cuda.get_device_name() if has_gpu else platform.processor() or platform.machine(),
            "versions": {
                "nanovllm": nanovllm.__version__,
                "torch": torch.__version__,
                "transformers": importlib.metadata.version("transformers"),
                "python": platform.python_version(),
            },
        }
        print(f"Total: {tokens_out}tok, Time: {elapsed:.2f}s, Throughput: {tokens_out / elapsed:.2f}tok/s")
        for name in (
            "prefill_tok_per_s",
            "decode_tok_per_s",
            "floor_share",
            "host_ms_per_step",
            "gpu_idle_share",
            "startup_s",
            "preemptions",
            "prefix_hit_rate",
        ):
            print(f"  {name:20} {result[name]}")
        print(json.dumps(result))
    if args.profile:
        profile(llm, min(num_seqs, args.max_num_seqs), args.profile)
    llm.close()


if __name__ == "__main__":
    main()
