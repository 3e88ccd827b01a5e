"""What the package shows, what its import loads, which files know of GPUs, and how large it may grow."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The only files that may name these, relative to the package.
ALLOWED = {
    "torch.cuda": {
        "engine/llm_engine.py",
        "engine/cuda_device.py",
        "engine/cuda_graph.py",
        "kernels/launch.py",
        "kernels/peer_memory.py",
    },
    "triton": {
        "attention/triton_backend.py",
        "kernels/all_reduce.py",
        "kernels/decode_state.py",
        "kernels/launch.py",
        "kernels/pointwise.py",
        "kernels/small_batch.py",
        "kernels/sampler.py",
        "kernels/store_kvcache.py",
    },
    "flash_attn": {"attention/flash_attn_backend.py"},
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_public_names_are_those_of_all() -> None:
    assert nanovllm.__all__ == ["LLM", "RequestOutput", "SamplingParams"]
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__name__ == name
    modules = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    public = {name for name in vars(nanovllm) if not name.startswith("_")} - modules
    assert public <= {*nanovllm.__all__, "TYPE_CHECKING", "Any"}
    namespace: dict[str, object] = {}
    exec("from nanovllm import *", namespace)
    assert {name for name in namespace if name != "__builtins__"} == set(nanovllm.__all__)


def test_an_unknown_name_is_an_attributeerror() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LLMs'"):
        nanovllm.LLMs  # noqa: B018


def test_the_version_is_one_of_three_numbers() -> None:
    assert [part.isdigit() for part in nanovllm.__version__.split(".")] == [True] * 3


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_import_loads_no_heavy_package() -> None:
    heavy = ("torch", "transformers", "triton", "flash_attn", "numpy", "tqdm", "safetensors", "huggingface_hub")
    code = f"import sys, nanovllm; nanovllm.SamplingParams(); print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_the_engine_loads_neither_transformers_nor_kernels_before_it_needs_them() -> None:
    # torch itself looks for triton, so its name is no proof; transformers takes seconds.
    code = "import sys, nanovllm.llm; print([m for m in ('transformers', 'flash_attn') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"


def gpu_names(tree: ast.AST) -> set[str]:
    """Return which of the guarded names a module imports or reads."""
    dotted: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute | ast.Name):
            dotted.add(ast.unparse(node))
    return {name for name in ALLOWED if any(d == name or d.startswith(name + ".") for d in dotted)}


@pytest.mark.parametrize("name", ALLOWED)
def test_gpu_libraries_are_named_in_few_files(name: str) -> None:
    found = {name_of(path) for path in FILES if name in gpu_names(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == ALLOWED[name]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch.cuda", {"torch.cuda"}),
        ("from torch import cuda", {"torch.cuda"}),
        ("from torch.cuda import Event", {"torch.cuda"}),
        ("import torch\nx = torch.cuda.Event()", {"torch.cuda"}),
        ("import triton.language as tl", {"triton"}),
        ("def f():\n    from flash_attn import flash_attn_func", {"flash_attn"}),
        ("from nanovllm.attention.flash_attn import F\nname = 'triton'", set()),
        ("import tritonish\nx = a.torch.cudax", set()),
    ],
)
def test_the_search_for_gpu_names_finds_every_way_to_write_them(code: str, expected: set[str]) -> None:
    assert gpu_names(ast.parse(code)) == expected


def test_the_library_never_prints() -> None:
    for path in FILES:
        if not name_of(path).startswith("embedded/"):
            calls = [
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            printed = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
            assert not printed, name_of(path)


def test_every_module_opens_by_saying_what_it_is() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name_of(path)


def code_lines(source: str) -> int:
    """Return the lines that hold code: no blank ones, no comments, no docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_code_lines_leaves_out_blanks_comments_and_docstrings() -> None:
    head = '"""Module.\n\nMore.\n"""\n\n# comment\nx = """a\n\nb"""\n\n\n'
    source = head + 'def f():  # why\n    """Doc."""\n    return [\n        1,\n\n    ]\n'
    assert code_lines(source) == 3 + 1 + 3


# What a reader of one rank's engine can leave out: the processes of several.
RANKS = {"engine/channel.py", "engine/executor.py", "engine/parallel_runner.py"}


def test_the_core_can_be_read_in_an_afternoon() -> None:
    core = {
        name_of(path): code_lines(path.read_text(encoding="utf-8"))
        for path in FILES
        if name_of(path).split("/")[0] in ("engine", "layers", "models") or name_of(path) == "utils/loader.py"
    }
    assert core.keys() >= {"engine/scheduler.py", "layers/sampler.py", "models/qwen3.py", "utils/loader.py", *RANKS}
    assert sum(lines for name, lines in core.items() if name not in RANKS) <= 2500
    assert sum(core[name] for name in RANKS) <= 485


def test_the_whole_package_stays_small() -> None:
    """Kernels, attention backends and the embedded model's scripts have folders, and a bound, of their own."""
    lines = {True: 0, False: 0}
    for path in FILES:
        apart = name_of(path).split("/")[0] in ("attention", "embedded", "kernels")
        lines[apart] += len(path.read_text(encoding="utf-8").splitlines())
    assert lines[False] <= 5700
    assert lines[True] <= 1900
