"""Heads of the published code: read and written bit by bit, and whatever is missing, unknown or wrong is named."""

import collections
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from spd_jax.config.model import LayerConfig, MlpConfig, ModelConfig, RopeConfig
from spd_jax.plan import StagePlan
from spd_jax.published.convert import (
    ImportedHead,
    PublishedHead,
    from_published,
    published_layer,
    to_published,
)
from spd_jax.published.torch_file import read_torch_file, write_torch_file
from spd_jax.speculation.checkpoint import named_tensors
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.weights.load import open_target
from spd_jax.weights.random_model import dense_layer
from tests.fixtures import DATA
from tests.heads import random_module

FILE = DATA / "tiny_llama" / "head_v11.pt"


@functools.cache
def target() -> ModelConfig:
    return open_target(DATA / "tiny_llama" / "target").config


def with_layer(layer: LayerConfig) -> ModelConfig:
    """The target with other layers."""
    return dataclasses.replace(target(), layers=(layer,) * target().num_layers)


@functools.cache
def published() -> PublishedHead:
    return read_torch_file(FILE)


@functools.cache
def imported() -> ImportedHead:
    return from_published(published(), target())


def export(head: ImportedHead, **changes: Any) -> PublishedHead:
    given: dict[str, Any] = {"target_name": "tiny", "origin": "head", "remembered": head.remembered}
    return to_published(head.module, head.plan, target(), **(given | changes))


def own_head(plan: StagePlan | None = None, **changes: Any) -> ImportedHead:
    """A random head that was not imported."""
    plan = plan or StagePlan((4, 4), 1, "separate", (0, 4))
    fields: dict[str, Any] = {"layer": published_layer(target()), "anchors": plan.anchors}
    fields |= {"num_layers": plan.num_draft_layers, "vocab_size": target().vocab_size} | changes
    return ImportedHead(random_module(HeadConfig(**fields)), plan, {})


def assert_same_module(one: SpeculationModule, other: SpeculationModule) -> None:
    assert one.config == other.config
    a, b = named_tensors(one), named_tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


# What is read


def test_config_becomes_head_and_plan():
    head = imported().module.config
    assert imported().plan == StagePlan((2, 2, 2, 2), 2, "separate", (0, 2, 4, 6, 7))
    assert head.layer == target().layers[0].with_attention(qk_norm=True)  # Qwen3's layer on a llama target
    assert head.layer.attention.rope == target().layers[0].attention.rope  # E01: the target's, with its scaling
    assert head.draft_ids == tuple(published().config["draft_token_ids"])
    assert (head.num_layers, head.vocab_size, head.lm_head) == (2, 260, "own")


def test_every_tensor_has_its_place():
    tensors, values = published().tensors, named_tensors(imported().module)
    size, group = target().layers[0].attention.head_dim, 2
    q, k, v = (tensors[f"spec_layers.1.self_attn.{name}_proj.weight"].reshape(-1, size, 64) for name in "qkv")
    blocks = np.asarray(values["layers.1.attention.qkv.weight"]).reshape(2, group + 2, size, 64)
    for head in range(2):
        expected = [*q[group * head : group * head + group], k[head], v[head]]
        np.testing.assert_array_equal(blocks[head], np.stack(expected))
    gate, up = (tensors[f"spec_layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(values["layers.0.mlp.gate_up.weight"], np.concatenate([gate, up]))
    for ours, theirs in {
        "projections.3.weight": "aggr_projs.3.weight",
        "lm_head": "lm_head.weight",
        "layers.1.input_norm.weight": "spec_layers.1.input_layernorm.weight",
        "layers.1.mlp_norm.weight": "spec_layers.1.post_attention_layernorm.weight",
        "layers.1.attention.q_norm.weight": "spec_layers.1.self_attn.q_norm.weight",
        "layers.1.attention.k_norm.weight": "spec_layers.1.self_attn.k_norm.weight",
        "layers.1.attention.output.weight": "spec_layers.1.self_attn.o_proj.weight",
        "layers.1.mlp.down.weight": "spec_layers.1.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(values[ours], tensors[theirs], err_msg=ours)


def test_what_older_files_lack_and_others_add_changes_nothing():
    added = {"spec_init_from_base_layers": [5, 7], "model_type": "llama"}
    config = {key: value for key, value in published().config.items() if key != "spec_intermediate_size_fallback"}
    head = from_published(dataclasses.replace(published(), config=config | added), target())
    assert_same_module(head.module, imported().module)
    assert head.remembered == {"trained_with_use_deepest": True, "base_model_path": "", **added}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_keeps_every_value(dtype: Any):
    """bfloat16 stays; float16, which heads here do not store, is widened; where both meet, both are."""
    halves = {name: value.astype(dtype) for name, value in published().tensors.items()}
    head = from_published(dataclasses.replace(published(), tensors=halves), target())
    stored = named_tensors(head.module)["lm_head"]
    assert stored.dtype == (jnp.bfloat16 if dtype == ml_dtypes.bfloat16 else jnp.float32)
    np.testing.assert_array_equal(np.asarray(stored, np.float32), halves["lm_head.weight"].astype(np.float32))
    mixed = halves | {"lm_head.weight": published().tensors["lm_head.weight"]}
    head = from_published(dataclasses.replace(published(), tensors=mixed), target())
    assert {value.dtype for value in named_tensors(head.module).values()} == {np.dtype(np.float32)}


# What is written


def test_an_export_is_the_published_file_again(tmp_path: Path):
    path = write_torch_file(tmp_path / "new" / "head.pt", export(imported()))
    assert [entry.name for entry in path.parent.iterdir()] == ["head.pt"]
    found, wanted = (torch.load(file, weights_only=True) for file in (path, FILE))
    assert list(found) == list(wanted)
    assert list(found["config"].items()) == list(wanted["config"].items())
    assert [type(value) for value in found["config"].values()] == [type(value) for value in wanted["config"].values()]
    assert type(found["state_dict"]) is collections.OrderedDict
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    for name, tensor in wanted["state_dict"].items():
        assert found["state_dict"][name].dtype == tensor.dtype
        assert torch.equal(found["state_dict"][name], tensor), name


def test_gated_attention_goes_out_as_it_came_in():
    """Qwen3.5: in the file each head is followed by its gate, here heads come first."""
    config = open_target(DATA / "tiny_qwen3_5" / "target").config
    file = read_torch_file(DATA / "tiny_qwen3_5" / "head_v11.pt")
    head = from_published(file, config)
    assert head.module.config.layer == config.layers[-1]
    back = to_published(head.module, head.plan, config, target_name="", origin="head", remembered=head.remembered)
    assert back.config == file.config
    assert list(back.tensors) == list(file.tensors)
    for name, value in file.tensors.items():
        np.testing.assert_array_equal(back.tensors[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_import_export_import_is_bit_exact(tmp_path: Path, dtype: Any):
    tensors = {name: value.astype(dtype) for name, value in published().tensors.items()}
    first = from_published(dataclasses.replace(published(), tensors=tensors), target())
    second = from_published(read_torch_file(write_torch_file(tmp_path / "head.pt", export(first))), target())
    assert_same_module(first.module, second.module)
    assert (first.plan, first.remembered) == (second.plan, second.remembered)
    assert named_tensors(second.module)["lm_head"].dtype == dtype


def test_a_head_made_here_is_written_as_the_release_would():
    """Biases where the target has them, all token ids, one draft layer; A09: with an anchor at L."""
    biased = with_layer(target().layers[0].with_attention(qkv_bias=True, output_bias=True))
    head = own_head(StagePlan((4, 4), 1, "beside", (0, 4, 8)), layer=published_layer(biased))
    made = to_published(head.module, head.plan, biased, target_name="org/tiny", origin="head")
    assert made.config == {
        "hidden_size": 64,
        "vocab_size": 260,
        "draft_vocab_size": 260,
        "num_stages": 2,
        "num_spec_layers": 1,
        "num_aggr_types": 3,
        "version": 11,
        "trained_with_use_deepest": True,
        "aggr_feature_bound": [0, 4, 8],
        "base_model_path": "org/tiny",
        "spec_intermediate_size_fallback": 9216,
    }
    attention = [f"{p}_proj.{leaf}" for p in "qkvo" for leaf in ("weight", "bias")] + ["q_norm.weight", "k_norm.weight"]
    names = [f"spec_layers.0.self_attn.{name}" for name in attention]
    assert [name for name in made.tensors if "self_attn" in name] == names
    back = from_published(made, biased, final_anchor="before_norm")
    assert_same_module(back.module, head.module)
    assert back.plan == dataclasses.replace(head.plan, layout="separate")


def test_a_borrowed_lm_head_is_written_out():
    head = own_head(draft_ids=(3, 9, 40), lm_head="target")
    rows = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    made = export(head, remembered=None, target_rows=rows)
    np.testing.assert_array_equal(made.tensors["lm_head.weight"], rows)
    assert from_published(made, target()).module.config.lm_head == "own"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (lambda: own_head(StagePlan((5, 3), 1, "beside", (0, 5))), r"stages have \[5, 3\] layers.*cuts evenly"),
        (
            lambda: own_head(layer=target().layers[0]),
            r"draft layers have mixer.qk_norm False, the published code builds them.*True",
        ),
        (
            lambda: own_head(layer=published_layer(target()).with_attention(rope=RopeConfig(theta=5e4))),
            "rotary embeddings are the head's own",
        ),  # E06
        (lambda: own_head(lm_head="target"), "borrows the target's rows"),
        (lambda: own_head(StagePlan((8,), 1, "separate", (0, 4, 7))), "num_aggr_types is 3.*at most 2"),
        (lambda: own_head(vocab_size=300), "vocab_size is 300, the target's is 260"),
    ],
)
def test_heads_that_the_published_code_could_not_run_are_refused(head: Callable[[], ImportedHead], message: str):
    with pytest.raises(ValueError, match=message):
        export(head(), remembered=None)


# Refusals


def put(**changes: Any) -> Callable[[], PublishedHead]:
    return lambda: dataclasses.replace(published(), config={**published().config, **changes})


def drop(*keys: str) -> Callable[[], PublishedHead]:
    left = {key: value for key, value in published().config.items() if key not in keys}
    return lambda: dataclasses.replace(published(), config=left)


def put_tensor(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[], PublishedHead]:
    def make() -> PublishedHead:
        changed = change(published().tensors.get(name, np.zeros(1, np.float32)).copy())
        others = {key: value for key, value in published().tensors.items() if key != name}
        return dataclasses.replace(published(), tensors=others | ({} if changed is None else {name: changed}))

    return make


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(tensor: np.ndarray) -> np.ndarray:
        tensor[0, 3] = value
        return tensor

    return change


IDS = list(read_torch_file(FILE).config["draft_token_ids"])
Q = "spec_layers.0.self_attn.q_proj.weight"
BROKEN: list[tuple[Callable[[], PublishedHead], str]] = [
    (put(version=10), "version is 10, only 11.*shallow_hidden_layer_indices.*only the embedding's row is a query"),
    (put(version=12), "version is 12, only 11.*stages are unequal"),
    (put(version=13), "version is 13, only 11 can be read$"),
    (put(version="11"), "version is '11', only 11"),
    (put(version=11.0), "version is 11.0, only 11"),
    (drop("version"), "version is None, only 11"),
    (drop("num_stages"), r"config lacks num_stages \(int\)"),
    (drop("aggr_feature_bound"), r"config lacks aggr_feature_bound \(list\[int\]\)"),  # F03
    (put(stage_layers=[2, 2, 2, 2]), "unknown keys: stage_layers"),
    (put(aggr_feature_convention="post-norm"), "unknown keys: aggr_feature_convention"),
    (put(aggr_feature_bound="0,2,4,6,7"), r"aggr_feature_bound '0,2,4,6,7', expected list\[int\]"),
    (put(num_stages=True), "num_stages True, expected int"),
    (put(trained_with_use_deepest=1), "trained_with_use_deepest 1, expected bool"),
    (put(draft_token_ids=[[1]]), r"draft_token_ids \[\[1\]\], expected list\[int\] | None"),
    (put(num_stages=3), "num_stages is 3, which does not cut the target's 8 layers evenly"),
    (put(num_stages=0), "num_stages is 0"),
    (put(num_stages=2), r"num_aggr_types is 5 .*at most 3, one more than stages"),
    (put(num_spec_layers=0), "num_draft_layers must be at least 1, found 0"),
    (put(num_spec_layers=3), r"missing spec_layers.2.input_layernorm.weight \[64\]"),
    (put(num_spec_layers=1), r"unexpected spec_layers.1.self_attn.q_proj.weight \[64, 64\]"),
    (put(num_spec_layers=10**12), "num_spec_layers is 1000000000000, state_dict holds 28 tensors in all"),
    (put(num_aggr_types=4), "num_aggr_types is 4 with aggr_feature_bound"),
    (put(aggr_feature_bound=[0, 2, 4, 6]), r"unexpected aggr_projs.4.weight \[64, 320\]"),
    (put(aggr_feature_bound=[]), r"anchors must start at 0 and increase strictly, found \[\]"),
    (put(aggr_feature_bound=[1, 2, 4, 6, 7]), r"anchors must start at 0 and increase strictly, found \[1, 2"),
    (put(aggr_feature_bound=[0, 2, 4, 6, 6]), r"increase strictly, found \[0, 2, 4, 6, 6\]"),
    (put(aggr_feature_bound=[0, 2, 4, 6, 9]), "anchor 9 is beyond the last hidden state index 8"),
    (put(draft_token_ids=[*IDS[:-1], IDS[-2]]), r"without duplicates, found \d+ before \d+"),  # C07
    (put(draft_token_ids=[IDS[1], IDS[0], *IDS[2:]]), "sorted without duplicates, found 10 before 9"),
    (put(draft_token_ids=[*IDS[:-1], 260]), "draft ids must lie in 0..259, found 9..260"),
    (put(draft_token_ids=IDS[:-1]), "draft_vocab_size is 96, draft_token_ids has 95 entries"),
    (drop("draft_token_ids"), "draft_vocab_size is 96 without draft_token_ids"),
    (put(hidden_size=128), "hidden_size is 128, the target's is 64"),
    (put(vocab_size=300), "vocab_size is 300, the target's is 260"),
    (put(model_type="qwen3"), "model_type is 'qwen3', the target's is 'llama'"),
    (put_tensor(Q, lambda value: None), r"missing spec_layers.0.self_attn.q_proj.weight \[64, 64\]"),
    (put_tensor("g0_proj.weight", lambda value: value), r"unexpected g0_proj.weight \[1\]"),
    (put_tensor(Q, lambda value: value[:32]), r"q_proj.weight has shape \[32, 64\], expected \[64, 64\]"),
    (put_tensor(Q, lambda value: np.concatenate([value, value])), r"twice the rows: gated attention"),
    (put_tensor(Q, with_value(np.nan)), r"q_proj.weight holds 1 NaN or infinite value\(s\), the first at \[0, 3\]"),
    (put_tensor(Q, with_value(-np.inf)), r"q_proj.weight holds 1 NaN or infinite"),
    (put_tensor(Q, lambda value: value.astype(np.int64)), "q_proj.weight has dtype int64, expected float32, bfloat16"),
    (put_tensor(Q, lambda value: value.astype(np.float64)), "q_proj.weight has dtype float64"),
]


@pytest.mark.parametrize(("head", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_refusals_say_what_is_wrong_and_where(head: Callable[[], PublishedHead], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        from_published(head(), target())
    assert str(caught.value).startswith(str(FILE))


def test_everything_that_is_wrong_is_said_at_once():
    tensors = dict(published().tensors)
    del tensors["aggr_projs.1.weight"], tensors["spec_layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = np.full((96, 64), np.nan, np.float32)
    tensors["aggr_projs.0.weight"] = np.zeros((64, 65), np.float32)
    config = {**published().config, "extra": 1, "vocab_size": 261, "draft_token_ids": [*IDS[:-1], IDS[-2]]}
    with pytest.raises(ValueError, match="extra") as caught:
        from_published(PublishedHead(config, tensors, "head.pt"), target())
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(set(lines)) == 7
    for said in ("vocab_size is 261", "duplicates", "missing aggr_projs.1", "missing spec_layers.1.mlp.up", "6144 NaN"):
        assert any(said in line for line in lines), said


def test_an_anchor_at_the_last_hidden_state_is_never_guessed():
    """A09: the published trainer and decoder differ there, and older trainers from both."""
    last = put(aggr_feature_bound=[0, 2, 4, 6, 8])()
    with pytest.raises(
        ValueError, match=r"anchor 8 is the target's last.*This file has spec_intermediate.*before_norm$"
    ):
        from_published(last, target())
    older = {key: value for key, value in last.config.items() if key != "spec_intermediate_size_fallback"}
    with pytest.raises(ValueError, match="This file lacks spec_intermediate_size_fallback"):
        from_published(dataclasses.replace(last, config=older), target())
    with pytest.raises(
        ValueError, match="trained on the hidden state after the final norm; here it is taken before it"
    ):
        from_published(last, target(), final_anchor="after_norm")
    assert from_published(last, target(), final_anchor="before_norm").plan.anchors == (0, 2, 4, 6, 8)


def test_a_type_that_no_depth_maps_to_is_kept():
    """The published default for 8 layers in 2 stages: anchor 7 is passed by anchor 8 at every depth."""
    head = from_published(put(aggr_feature_bound=[0, 2, 4, 7, 8])(), target(), final_anchor="before_norm")
    assert head.plan.types == (0, 1, 2, 4)
    np.testing.assert_array_equal(
        named_tensors(head.module)["projections.3.weight"], published().tensors["aggr_projs.3.weight"]
    )


def test_a_head_for_another_target():
    """C09: sizes that the file tells; it does not hold the number of layers, but the cut must be even."""
    layer = dataclasses.replace(target().layers[0], hidden_size=96)
    wider = dataclasses.replace(target(), layers=(layer,) * 6, vocab_size=999)
    with pytest.raises(ValueError, match="hidden_size is 64, the target's is 96") as caught:
        from_published(published(), wider)
    assert "vocab_size is 260, the target's is 999" in str(caught.value)
    assert "does not cut the target's 6 layers evenly" in str(caught.value)
    assert "anchor 7 is beyond the last hidden state index 6" in str(caught.value)
    assert "shape" not in str(caught.value)  # every tensor would be wrong, which says no more
    thicker = with_layer(dataclasses.replace(target().layers[0], mlp=MlpConfig(192)))
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight has shape \[176, 64\], expected \[192, 64\]"):
        from_published(published(), thicker)


# The other families' files, by their names, shapes and configs


def other(name: str) -> PublishedHead:
    return read_torch_file(DATA / name / "head_v11.pt")


def family(name: str) -> ModelConfig:
    layer = dense_layer(64, 176, 4, 2, 16, 1e-6)
    return ModelConfig(name, 260, (layer,) * 8, 512, tie_embeddings=False)


def test_gated_draft_layers_of_qwen3_5_are_named():
    with pytest.raises(ValueError, match="cannot be this target's head in the published format") as caught:
        from_published(other("tiny_qwen3_5"), family("qwen3"))
    for index in range(2):
        assert f"spec_layers.{index}.self_attn.q_proj.weight has shape [128, 64], expected [64, 64]" in str(
            caught.value
        )
    assert "gated attention (Qwen3.5)" in str(caught.value)


def test_draft_layers_of_a_mixture_of_experts_are_dense():
    head = from_published(other("tiny_qwen3_moe"), family("qwen3_moe"))
    assert head.plan == StagePlan((4, 4), 2, "separate", (0, 4, 7))
    assert head.module.config.draft_ids is None
    with pytest.raises(
        ValueError, match="family 'qwen2'; published draft layers are known for llama, qwen3, qwen3_5, qwen3_moe"
    ):
        from_published(other("tiny_qwen3_moe"), family("qwen2"))


# Files


class Unsafe:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def stored(**state: Any) -> dict[str, Any]:
    return {"state_dict": state, "config": {}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: save(path, stored() | {"config": Unsafe()}),
            r"refused: it holds an object of posix.system.*any code",
        ),
        (
            lambda path: save(path, {"config": {"x": np.float64(1)}, "state_dict": {}}),
            "refused: it holds an object of numpy",
        ),
        (lambda path: path.write_text("not a head"), "no file of torch.save, or cut short"),
        (lambda path: path.write_bytes(b""), "no file of torch.save, or cut short"),
        (lambda path: path.write_bytes(FILE.read_bytes()[:-200]), "no file of torch.save, or cut short"),
        (lambda path: path.write_bytes(b"PK" + FILE.read_bytes()[200:]), "damaged, or no file of torch.save"),
        (lambda path: torch.jit.save(torch.jit.script(torch.nn.ReLU()), path), "damaged, or no file.*TorchScript"),
        (lambda path: save(path, [1]), "expected a dict with state_dict and config, each a dict; found list"),
        (lambda path: save(path, {"lm_head.weight": torch.ones(1)}), "found entries lm_head.weight"),
        (lambda path: save(path, {"state_dict": {}, "config": 11}), "each a dict; found entries config, state_dict"),
        (
            lambda path: save(path, stored(a=torch.ones(2), b=3.0, c=torch.eye(2).to_sparse())),
            r"found b \(float\), c \(t",
        ),
        (lambda path: save(path, stored(a=torch.ones(2, dtype=torch.float8_e5m2))), r"found a \(torch.float8_e5m2\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*[Ss]parse")
def test_files_that_are_no_heads(tmp_path: Path, make: Callable[[Path], Any], message: str):
    path = tmp_path / "head.pt"
    make(path)
    with pytest.raises(ValueError, match=message) as caught:
        read_torch_file(path)
    assert str(caught.value).startswith(str(path))
    assert "weights_only" not in str(caught.value).replace("weights_only=True", "")  # no advice to load it unsafely


def test_files_keep_their_dtypes(tmp_path: Path):
    values = {str(dtype): torch.tensor([1.5, -2.25], dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    head = read_torch_file(save(tmp_path / "head.pt", stored(**values)))
    for name, value in head.tensors.items():
        assert f"torch.{value.dtype}" == name
        np.testing.assert_array_equal(value.astype(np.float32), [1.5, -2.25])


def test_nothing_is_replaced(tmp_path: Path):
    (tmp_path / "head.pt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not replaced"):
        write_torch_file(tmp_path / "head.pt", published())
    assert (tmp_path / "head.pt").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_torch_file(tmp_path / "nothing.pt")


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(value: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_torch_file(tmp_path / "head.pt", published())
    assert not list(tmp_path.iterdir())


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for act in (lambda: read_torch_file(FILE), lambda: write_torch_file(tmp_path / "head.pt", published())):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'spd-jax\[import\]'"):
            act()


def test_an_imported_head_does_not_share_the_files_memory():
    tensors = {name: value.copy() for name, value in published().tensors.items()}
    head = from_published(dataclasses.replace(published(), tensors=tensors), target())
    for value in tensors.values():
        value[...] = 0.0
    jax.block_until_ready(named_tensors(head.module))
    assert_same_module(head.module, imported().module)
