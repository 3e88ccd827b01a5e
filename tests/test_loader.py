"""Checkpoint folders: what is wrong with them is said by name, and what is right is read whole."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, TinyConfig, assert_greedy, load_reference

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import fill_with_random_weights, find_checkpoint, load_model
from nanovllm.utils.tokenizer import end_token_ids

UNTIED, TIED = SHAPES["plain"], SHAPES["tied"]
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def build(folder: Path) -> Qwen3ForCausalLM:
    """Return the folder's model on a CPU, its weights loaded over NaN."""
    with torch.inference_mode():
        model = Qwen3ForCausalLM(ModelConfig.from_folder(folder), 64)
        for param in model.parameters():
            param.fill_(float("nan"))
        load_model(model, folder)
    return model


def save_changed(folder: Path, shape: TinyConfig, change: Callable[[dict[str, Any]], Any]) -> Path:
    tensors = shape.tensors()
    change(tensors)
    return shape.save(folder, tensors)


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def shard_weights(folder: Path, num_shards: int) -> list[str]:
    """Replace a folder's weights by shards with an index; return the shards' names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {name: names[i % num_shards] for i, name in enumerate(tensors)}
    for shard in names:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


# Weights


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_filled_with_the_checkpoint_s_tensors(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model, tensors = build(shape.save(tmp_path)), shape.tensors()
    params = dict(model.named_parameters())
    assert not any(param.isnan().any() for param in params.values())
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        for kind in ("weight", "bias") if shape.bias else ("weight",):
            qkv = [tensors[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            assert torch.equal(params[f"{layer}self_attn.qkv_proj.{kind}"], torch.cat(qkv))
        gate_up = [tensors[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(params[f"{layer}mlp.gate_up_proj.weight"], torch.cat(gate_up))
    fused = ("qkv_proj", "gate_up_proj")
    plain = {name: param for name, param in params.items() if not any(part in name for part in fused)}
    split = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert plain.keys() == {name for name in tensors if not any(part in name for part in split)}
    assert all(torch.equal(param, tensors[name]) for name, param in plain.items())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.pop(DOWN_PROJ))
    with pytest.raises(ValueError, match=rf"Missing \(1\): {DOWN_PROJ}\. Unexpected \(0\): none\.") as error:
        LLM(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_part_of_a_fused_layer_that_is_missing_is_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"Missing \(1\): {name}\."):
        build(tmp_path)


def test_a_missing_head_of_an_untied_model_is_named(tmp_path: Path) -> None:
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"Missing \(1\): lm_head\.weight\."):
        build(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.update({bias: torch.zeros(24), "extra.w": torch.zeros(1)}))
    with pytest.raises(ValueError, match=rf"Missing \(0\): none\. Unexpected \(2\): extra\.w, {bias}\."):
        build(tmp_path)


def test_a_checkpoint_of_fewer_layers_lists_what_is_missing_and_counts_the_rest(tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"Missing \(22\): model\.layers\.2\..* and 14 more\."):
        build(tmp_path)


def test_a_checkpoint_of_more_layers_lists_what_is_unexpected(tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"Missing \(0\): none\. Unexpected \(11\): model\.layers\.1\."):
        build(tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        (DOWN_PROJ, [24, 39], [24, 40]),
        ("model.layers.0.self_attn.v_proj.weight", [12, 24], [24, 24]),
        ("model.layers.1.self_attn.q_norm.weight", [24], [12]),
        ("model.norm.weight", [1, 24], [24]),
        ("model.embed_tokens.weight", [102, 24], [101, 24]),
        ("lm_head.weight", [100, 24], [101, 24]),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(
    name: str, wrong: list[int], right: list[int], tmp_path: Path
) -> None:
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        build(tmp_path)
    assert str(error.value) == f"Tensor {name!r} in {str(tmp_path)!r} has shape {wrong}, expected {right}."


@pytest.mark.parametrize(
    ("dtype", "spelled"),
    [
        (torch.int8, "I8"),
        (torch.int32, "I32"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.complex64, "C64"),
    ],
)
@pytest.mark.parametrize("name", [DOWN_PROJ, "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_tensor_that_holds_no_plain_floats_is_refused_and_not_cast(
    name: str, dtype: torch.dtype, spelled: str, tmp_path: Path
) -> None:
    """Quantized weights without their scales loaded in silence, as other numbers than they stand for."""
    save_changed(tmp_path, UNTIED, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"Tensor '{name}' .* has type {spelled}; use a checkpoint that is not quant"):
        LLM(str(tmp_path))


def test_a_tensor_in_two_files_is_refused_since_one_of_them_would_win_in_silence(tmp_path: Path) -> None:
    UNTIED.save(tmp_path)
    save_file({DOWN_PROJ: torch.zeros(24, 40)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=rf"tensors that another file has too: {DOWN_PROJ}\. Remove one\.") as error:
        build(tmp_path)
    assert str(tmp_path / "other.safetensors") in str(error.value)


def test_inverse_frequencies_that_old_checkpoints_carry_are_no_fault(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    build(save_changed(tmp_path, UNTIED, lambda tensors: tensors.update({name: torch.zeros(6)})))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    UNTIED.save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors files; .* converted to safetensors") as error:
        LLM(str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", "half"])
def test_a_broken_weight_file_is_named(content: bytes | str, tmp_path: Path) -> None:
    path = UNTIED.save(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(ValueError, match="cannot be read as safetensors") as error:
        LLM(str(tmp_path))
    assert str(path) in str(error.value)


def test_a_sharded_checkpoint_is_that_of_one_file(tmp_path: Path) -> None:
    one = build(UNTIED.save(tmp_path / "one"))
    shards = UNTIED.save(tmp_path / "three")
    assert len(shard_weights(shards, 3)) == 3
    save_file({"stray": torch.zeros(1)}, shards / "consolidated.safetensors")  # not in the index, so not looked at
    three = build(shards)
    for a, b in zip(one.parameters(), three.parameters(), strict=True):
        assert torch.equal(a, b)


def test_shards_without_an_index_are_read_together(tmp_path: Path) -> None:
    shard_weights(UNTIED.save(tmp_path), 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    build(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    names = shard_weights(UNTIED.save(tmp_path), 3)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {names[1]};"):
        LLM(str(tmp_path))


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    (UNTIED.save(tmp_path) / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json' cannot be read as JSON"):
        build(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": ""}, {"a": "."}, {"a": "pytorch_model.bin"}])
def test_an_index_without_a_map_of_names_to_files_is_named(weight_map: Any, tmp_path: Path) -> None:
    index = UNTIED.save(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json .* lacks a weight_map to \*\.safetensors"):
        build(tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors"], ids=["dead", "loop"])
def test_a_weight_file_that_is_a_broken_link_is_named(target: str, tmp_path: Path) -> None:
    path = UNTIED.save(tmp_path) / "model.safetensors"
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors;"):
        build(tmp_path)


def test_a_folder_of_links_is_read_like_the_files_that_they_lead_to(tmp_path: Path) -> None:
    blobs, folder = UNTIED.save(tmp_path / "blobs"), tmp_path / "snapshot"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    (tmp_path / "link").symlink_to(folder)
    for a, b in zip(build(blobs).parameters(), build(tmp_path / "link").parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_model_loads_with_and_without_its_head_in_the_file(has_head: bool, tmp_path: Path) -> None:
    def add_head(tensors: dict[str, Any]) -> None:
        if has_head:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = save_changed(tmp_path, TIED, add_head)
    model = build(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with LLM(str(folder), num_kvcache_blocks=20, max_model_len=64) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert_greedy(load_reference(folder), outputs)


def test_weights_are_cast_to_the_engine_s_dtype(tmp_path: Path) -> None:
    def halve(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()

    folder = save_changed(tmp_path, UNTIED, halve)
    with LLM(str(folder), num_kvcache_blocks=4, max_model_len=64) as llm:
        weight = llm.engine.model_runner.model.model.norm.weight
        assert weight.dtype == torch.float32
        assert torch.equal(weight, UNTIED.tensors()["model.norm.weight"].bfloat16().float())
    with LLM(str(folder), dtype="float16", num_kvcache_blocks=4, max_model_len=64) as llm:
        assert {param.dtype for param in llm.engine.model_runner.model.parameters()} == {torch.float16}


# config.json


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    (UNTIED.save(tmp_path) / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is no model folder: it has no config\.json") as error:
        LLM(str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"), [('{"a": ', "cannot be read as JSON"), ("[1]", "must hold a JSON object")]
)
def test_broken_json_is_named(file: str, text: str, message: str, tmp_path: Path) -> None:
    (UNTIED.save(tmp_path) / file).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        LLM(str(tmp_path))
    assert str(tmp_path / file) in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["folder", "dead link", "link to itself"])
def test_a_file_that_is_there_but_cannot_be_read_is_named_and_not_passed_over(
    kind: str, file: str, tmp_path: Path
) -> None:
    path = UNTIED.save(tmp_path) / file
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if kind == "dead link" else path)
    with pytest.raises(ValueError, match="cannot be read as JSON") as error:
        LLM(str(tmp_path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def test_another_architecture_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), architectures=[architecture])
    with pytest.raises(ValueError, match=rf"architectures=\['{architecture}'\] is not supported; use \['Qwen3"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("value", [None, [], "Qwen3ForCausalLM", {"Qwen3ForCausalLM": 1}, [["Qwen3ForCausalLM"]], [5]])
def test_architectures_that_are_no_list_of_names_are_refused_as_they_stand(value: Any, tmp_path: Path) -> None:
    """A bare name was read as a list of letters: "Architecture 'Q' is not supported"."""
    change_config(UNTIED.save(tmp_path), architectures=value)
    with pytest.raises(ValueError, match=r"is not supported; use \['Qwen3ForCausalLM'\]") as error:
        LLM(str(tmp_path))
    assert f"{str(tmp_path / 'config.json')!r}: architectures={value!r} " in str(error.value)


@pytest.mark.parametrize("rope_type", ["yarn", "llama3", "linear", "dynamic", "longrope"])
@pytest.mark.parametrize(
    "spell",
    [
        lambda kind: {"rope_scaling": {"type": kind, "factor": 4.0}},
        lambda kind: {"rope_scaling": {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32}},
        lambda kind: {"rope_parameters": {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0}, "rope_theta": None},
    ],
    ids=["type", "rope_type", "rope_parameters"],
)
def test_other_kinds_of_rope_are_refused_by_name(
    rope_type: str, spell: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    change_config(UNTIED.save(tmp_path), **spell(rope_type))
    with pytest.raises(ValueError, match=f"RoPE type '{rope_type}' is not supported; supported: 'default'"):
        LLM(str(tmp_path))


def test_rope_theta_is_read_from_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    raw = {key: value for key, value in UNTIED.config_json().items() if not key.startswith("rope")}
    new = {"rope_theta": 7e5, "rope_type": "default"}
    assert ModelConfig.from_dict(raw).rope_theta == 10000.0
    assert ModelConfig.from_dict(raw | {"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert ModelConfig.from_dict(raw | {"rope_parameters": new}).rope_theta == 7e5
    assert ModelConfig.from_dict(raw | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 9}).rope_theta == 9.0


def test_a_folder_saved_by_the_installed_transformers_is_read_rightly(tmp_path: Path) -> None:
    shape = dataclasses.replace(TIED, rope_theta=123.0)
    reference = load_reference(shape.save(tmp_path / "ours"))
    reference.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink()  # made up from the class's defaults
    ours, theirs = (ModelConfig.from_folder(tmp_path / name) for name in ("ours", "theirs"))
    assert theirs == ours
    assert (ours.rope_theta, ours.rms_norm_eps, ours.tie_word_embeddings, ours.head_dim) == (123.0, 1e-5, True, 8)
    for a, b in zip(build(tmp_path / "ours").parameters(), build(tmp_path / "theirs").parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_quantized_checkpoints_are_refused_naming_the_method(method: str, tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ValueError, match=f"Quantized checkpoints .*'{method}'.* not supported"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 32},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["chunked_attention"] * 2},
        {"layer_types": "full_attention"},
        {"layer_types": 5},
    ],
)
def test_layers_of_other_than_full_attention_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), **changes)
    with pytest.raises(ValueError, match="Sliding-window or linear attention is not supported"):
        LLM(str(tmp_path))


def test_a_window_that_is_switched_off_is_no_fault() -> None:
    off = {"use_sliding_window": False, "sliding_window": 32, "layer_types": ["full_attention"] * 2}
    assert ModelConfig.from_dict(UNTIED.config_json() | off) == ModelConfig.from_dict(UNTIED.config_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads=2 is no multiple of num_key_value_heads=3"),
        ({"hidden_size": 0}, "hidden_size=0 is out of range: it must be at least 1"),
        ({"intermediate_size": -4}, "intermediate_size=-4 is out of range"),
        ({"vocab_size": None}, "vocab_size must be an int, not None"),
        ({"vocab_size": True}, "vocab_size must be an int, not True"),
        ({"vocab_size": 101.0}, "vocab_size must be an int, not 101.0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an int, not '2'"),
        ({"num_attention_heads": []}, r"num_attention_heads must be an int, not \[\]"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be an int, not '2'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is out of range"),
        ({"head_dim": "x"}, "head_dim must be an int, not 'x'"),
        ({"head_dim": 0}, "head_dim=0 is out of range"),
        ({"rope_theta": None}, "rope_theta must be a number, not None"),
        ({"rope_theta": "x"}, "rope_theta must be a number, not 'x'"),
        ({"rope_theta": 0}, "rope_theta=0 is out of range: it must be finite, above 0"),
        ({"rope_theta": -5.0}, "rope_theta=-5.0 is out of range"),
        ({"rope_parameters": {"rope_theta": float("nan"), "rope_type": "default"}}, "rope_theta=nan is out of range"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number, not '1e-6'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, not None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 is out of range: it must be finite, above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 is out of range"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be an int, not None"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings must be an int, not '4096'"),
        ({"max_position_embeddings": 64.0}, "max_position_embeddings must be an int, not 64.0"),
        ({"max_position_embeddings": 1}, "max_position_embeddings=1 is out of range: it must be at least 2"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn' is unknown"),
        ({"torch_dtype": ["float32"]}, "torch_dtype=.*float32.* is unknown"),
        ({"dtype": "int8"}, "^[^ ]+ dtype='int8' is unknown. Known: 'float32', 'bfloat16', 'float16'"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be True or False, not 'true'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be True or False, not None"),
        ({"attention_bias": 1}, "attention_bias must be True or False, not 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_scaling": {"factor": 4.0}}, "RoPE type"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "RoPE with factor=4.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "RoPE with partial_rotary"),
        ({"partial_rotary_factor": 0.25}, "RoPE with partial_rotary_factor=0.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 5.0}}}, "RoPE type"),
        ({"quantization_config": "fp8"}, "Quantized checkpoints .*'fp8'"),
    ],
)
def test_fields_that_are_wrong_or_cannot_be_run_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    change_config(UNTIED.save(tmp_path), **changes)
    with pytest.raises(ValueError, match=message) as error:
        LLM(str(tmp_path))
    assert str(error.value).startswith(f"{str(tmp_path / 'config.json')!r}: ")


def test_fields_that_may_be_left_out_have_the_architecture_s_defaults() -> None:
    raw = {
        key: value for key, value in UNTIED.config_json().items() if not key.endswith(("dtype", "eps", "embeddings"))
    }
    config = ModelConfig.from_dict(raw | {"num_key_value_heads": None, "head_dim": None})
    assert (config.num_key_value_heads, config.head_dim, config.dtype) == (2, 128, "bfloat16")
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-6, 32768, False)
    both = {"torch_dtype": "float32", "dtype": "torch.float16"}  # transformers 5 writes the second name
    assert ModelConfig.from_dict(raw | both).dtype == "float16"


def test_end_tokens_of_config_and_generation_config_are_united(tmp_path: Path) -> None:
    change_config(UNTIED.save(tmp_path), eos_token_id=5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    with LLM(str(tmp_path), num_kvcache_blocks=4, max_model_len=64) as llm:
        assert llm.engine.end_token_ids == {5, 7, 9}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["5", True, 5.0, {"id": 5}, [5, "7"], [[5]], [None]])
def test_end_tokens_that_are_no_ints_are_refused_before_the_weights_are_read(
    value: Any, file: str, tmp_path: Path
) -> None:
    (UNTIED.save(tmp_path) / "model.safetensors").unlink()
    path = tmp_path / file
    path.write_text(json.dumps(UNTIED.config_json() | {"eos_token_id": value}))
    with pytest.raises(ValueError, match="must be an int or a list of ints") as error:
        LLM(str(tmp_path))
    assert f"{str(path)!r}: eos_token_id={value!r} " in str(error.value)


def test_end_tokens_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They can never come, so they harm nothing but `min_tokens`, which held back a logit that is not there."""
    change_config(UNTIED.save(tmp_path), eos_token_id=[101, 100, -1])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1000000000000000000000000000000}')
    params = SamplingParams(temperature=0, max_tokens=3, min_tokens=3, logit_bias={100: 100.0})
    with LLM(str(tmp_path), num_kvcache_blocks=4, max_model_len=64) as llm:
        assert llm.engine.end_token_ids == {100}
        (out,) = llm.generate([[1, 2]], params, use_tqdm=False)
    assert out.error is None and len(out.token_ids) == 3 and 100 not in out.token_ids
    assert [record.levelname for record in caplog.records if "outside the vocabulary of 101" in record.message] == [
        "WARNING",
        "WARNING",
    ]


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "0.7"}, "temperature must be a number, not '0.7'"),
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"top_p": 0}, "top_p=0 is out of range"),
        ({"top_k": 1.5}, "top_k must be an int, not 1.5"),
        ({"do_sample": "false"}, "do_sample must be True or False, not 'false'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range: it must be at least 1"),
        ({"max_new_tokens": "9"}, "max_new_tokens must be an int, not '9'"),
    ],
)
def test_wrong_defaults_in_generation_config_are_refused_before_the_weights_are_read(
    generation: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (UNTIED.save(tmp_path) / "model.safetensors").unlink()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=message) as error:
        LLM(str(tmp_path))
    assert str(error.value).startswith(f"{str(path)!r}: ")


# Tokenizers


EMBEDDED = Path(nanovllm.__file__).resolve().parent / "embedded"


def with_tokenizer(folder: Path) -> Path:
    """Add the embedded model's tokenizer to a folder, which need not hold a model."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"\xff", "folder", "dead link"])
def test_a_broken_tokenizer_file_is_named_and_not_passed_over(content: bytes | str, file: str, tmp_path: Path) -> None:
    path = with_tokenizer(UNTIED.save(tmp_path)) / file
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"cannot be read as JSON|must hold a JSON object") as error:
        LLM(str(tmp_path))
    assert str(path) in str(error.value)


def test_a_tokenizer_of_sound_json_that_is_none_is_refused_naming_its_folder(tmp_path: Path) -> None:
    (with_tokenizer(UNTIED.save(tmp_path)) / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"The tokenizer in '{tmp_path}' cannot be loaded"):
        LLM(str(tmp_path))


def test_a_tokenizer_of_another_folder_needs_no_model_there(tmp_path: Path) -> None:
    model, tokenizer = UNTIED.save(tmp_path / "model"), with_tokenizer(tmp_path / "tokenizer")
    with LLM(str(model), tokenizer=str(tokenizer), num_kvcache_blocks=4, max_model_len=64) as llm:
        assert llm.tokenizer.decode(llm.tokenizer("1 + 1")["input_ids"]) == "1 + 1"
        assert llm.engine.end_token_ids == {2}
        # A model of too few tokens for this tokenizer's end token can never give it.
        assert end_token_ids(llm.tokenizer, dataclasses.replace(llm.engine.model_config, vocab_size=2)) == set()


def test_a_tokenizer_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    """The engine started without a tokenizer, and texts were refused as if the model had none."""
    folder = UNTIED.save(tmp_path)
    (folder / "model.safetensors").unlink()  # so it is not the weights that are read first
    with pytest.raises(ValueError, match=f"^tokenizer='{folder}' has no tokenizer files, such as tokenizer.json"):
        LLM(str(folder), tokenizer=str(folder))


def test_a_tokenizer_that_is_no_folder_is_refused_as_the_tokenizer_and_not_as_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(tmp_path, monkeypatch)
    folder = str(UNTIED.save(tmp_path / "model"))
    hint = r"Give a folder with tokenizer\.json, a hub id, or 'embedded' for the tokenizer in this package"
    for name in ("./no-such-folder", f"{folder}/config.json"):
        with pytest.raises(ValueError, match=f"^tokenizer='{name}' is no folder.*{hint}"):
            LLM(folder, tokenizer=name)
    with pytest.raises(OSError, match=f"^tokenizer='some-owner/none' is no folder here and could not.*{hint}"):
        LLM(folder, tokenizer="some-owner/none")


# Dummy weights


def test_dummy_load_needs_no_weights_and_no_tokenizer(tmp_path: Path) -> None:
    (TIED.save(tmp_path) / "model.safetensors").unlink()
    params = SamplingParams(max_tokens=5)

    def tokens(seed: int) -> list[int]:
        with LLM(str(tmp_path), load_format="dummy", seed=seed, num_kvcache_blocks=20, max_model_len=64) as llm:
            assert llm.tokenizer is None
            with pytest.raises(ValueError, match="has no tokenizer files: give prompts as token ids"):
                llm.generate(["some text"], params, use_tqdm=False)
            (out,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
            assert (out.text, out.finish_reason, len(out.token_ids)) == ("", "length", 5)
            return out.token_ids

    assert tokens(0) == tokens(0) != tokens(1)


def test_dummy_weights_are_the_seed_s_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(TIED.save(tmp_path))
    models = [Qwen3ForCausalLM(config, 64) for _ in range(3)]
    with torch.inference_mode():
        for model, seed in zip(models, (1, 1, 50), strict=True):
            fill_with_random_weights(model, seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    for name, param in first.items():
        assert torch.equal(param, same[name])
        if "norm" in name:
            assert (param == 1).all()
        else:
            assert not torch.equal(param, other[name])
            assert float(param.std()) == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(first["model.layers.0.mlp.down_proj.weight"], first["model.layers.1.mlp.down_proj.weight"])


# Names of models


def go_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@pytest.mark.parametrize("model", ["embeded", "Embedded", "embedding"])
def test_a_name_near_embedded_is_answered_with_it(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        OSError, match=rf"^model='{model}' is no folder here .* Did you mean 'embedded'\? Give a folder"
    ):
        LLM(model)


def test_a_hub_id_that_cannot_be_fetched_is_an_oserror_that_offers_the_embedded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(tmp_path, monkeypatch)
    for model in ("some-owner/no-such-model", "gpt-none"):
        with pytest.raises(OSError, match=f"'{model}' is no folder here and could not be fetched.*'embedded'"):
            LLM(model)
        with pytest.raises(OSError, match="could not be fetched") as error:
            LLM(model)
        assert "Did you mean" not in str(error.value)


def test_revision_and_wanted_files_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls = []

    def fake_download(model: str, **settings: Any) -> str:
        calls.append((model, settings["revision"], settings["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    assert find_checkpoint("owner/name", "v2") == tmp_path
    ((model, revision, patterns),) = calls
    assert (model, revision) == ("owner/name", "v2")
    assert {"*.json", "*.safetensors"} <= set(patterns) and "*.bin" not in patterns


def test_weights_that_nobody_reads_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of the hub brought its model's weights along, and so did random weights."""
    import huggingface_hub

    folders = {"owner/model": TIED.save(tmp_path / "model"), "owner/tokenizer": with_tokenizer(tmp_path / "tokenizer")}
    fetched: list[tuple[str, bool]] = []

    def fake_download(model: str, **settings: Any) -> str:
        assert {"*.json", "*.jinja", "*.model"} <= set(settings["allow_patterns"])
        fetched.append((model, "*.safetensors" in settings["allow_patterns"]))
        return str(folders[model])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    for load_format in ("auto", "dummy"):
        knobs = {"load_format": load_format, "num_kvcache_blocks": 4, "max_model_len": 64}
        LLM("owner/model", tokenizer="owner/tokenizer", **knobs).close()
    assert fetched == [
        ("owner/model", True),
        ("owner/tokenizer", False),
        ("owner/model", False),
        ("owner/tokenizer", False),
    ]


@pytest.mark.parametrize(
    "model", ["./no-such-folder", "/no/such/folder", "~/models/qwen3", "models/qwen/3", "../qwen3"]
)
def test_a_path_that_is_no_folder_is_a_valueerror(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is no folder\. Give a folder with config\.json.*'embedded'") as error:
        LLM(model)
    assert repr(model) in str(error.value)


def test_a_file_or_a_broken_link_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    for name, kind in (("weights.safetensors", "a file"), ("link", "a broken link")):
        for model in (name, str(tmp_path / name)):
            with pytest.raises(ValueError, match=rf"^model='{model}' is no folder but {kind}\. Give a folder"):
                LLM(model)


def test_embedded_is_the_model_in_the_package_unless_a_model_s_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("embedded") == Path(nanovllm.__file__).resolve().parent / "embedded"
    (tmp_path / "embedded").mkdir()  # the outputs of a job, say
    assert find_checkpoint("embedded") == Path(nanovllm.__file__).resolve().parent / "embedded"
    assert find_checkpoint("embedded", what="tokenizer") == Path(nanovllm.__file__).resolve().parent / "embedded"
    with pytest.raises(ValueError, match=r"'embedded' is no model folder: it has no config\.json"):
        LLM("./embedded")
    UNTIED.save(tmp_path / "embedded")
    assert find_checkpoint("embedded") == Path("embedded")


def test_a_folder_is_found_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("owner/name") == Path("owner/name")  # before the hub is asked
    assert find_checkpoint(str(tmp_path)) == tmp_path
