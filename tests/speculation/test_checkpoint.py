"""Head folders: what is written comes back bit by bit, and whatever does not fit is refused by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spd_jax.config.model import MlpConfig, ModelConfig, NormConfig, RopeConfig
from spd_jax.nn.rope import inverse_frequencies
from spd_jax.plan import StagePlan
from spd_jax.speculation import checkpoint
from spd_jax.speculation.checkpoint import file_digest, load_head, named_tensors, save_head
from spd_jax.speculation.manifest import read_manifest
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.weights.random_model import dense_layer

LLAMA3 = RopeConfig(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
LAYER = dense_layer(32, 48, 4, 2, 8, 1e-6, LLAMA3)
TARGET = ModelConfig("llama", 64, (LAYER,) * 8, 256, tie_embeddings=False, eos_token_ids=(2,))
PLAN = StagePlan((2, 2, 2, 2), 2, "separate", (0, 2, 6, 7))
DIGESTS: dict[str, Any] = {"target_digest": "a" * 64, "tokenizer_digest": "b" * 64}


def make_head(dtype: Any = jnp.float32, **changes: Any) -> SpeculationModule:
    values: dict[str, Any] = {"layer": LAYER, "num_layers": 2, "anchors": PLAN.anchors}
    values |= {"vocab_size": 64, "draft_ids": (0, 1, 2, 7), **changes}
    return SpeculationModule(HeadConfig(**values), dtype=dtype, rngs=nnx.Rngs(3))


def save(path: Path, module: SpeculationModule, **changes: Any) -> Path:
    return save_head(path, module, PLAN, **{**DIGESTS, "target_name": "tiny", **changes})


def load(path: Path, *, target_config: ModelConfig = TARGET, dtype: Any = jnp.float32, **changes: Any):
    return load_head(path, target_config=target_config, dtype=dtype, **{**DIGESTS, **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("heads") / "head", make_head(), training={"steps": 3})


@pytest.fixture
def head(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(saved, tmp_path / "head")


def assert_same(one: SpeculationModule, other: SpeculationModule) -> None:
    a, b = named_tensors(one), named_tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


# What comes back


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"draft_ids": None}, {"lm_head": "target"}, {"num_layers": 2}], ids=str)
def test_round_trip_is_exact(tmp_path: Path, dtype: Any, changes: dict[str, Any]):
    module = make_head(dtype, **changes)
    save(tmp_path / "head", module, training={"tokens": 12, "note": "ä"})
    loaded, manifest = load(tmp_path / "head", dtype=dtype)
    assert_same(module, loaded)
    assert manifest.head == module.config == loaded.config
    assert manifest.plan == PLAN
    assert (manifest.target_name, manifest.target_digest) == ("tiny", "a" * 64)
    assert manifest.training == {"tokens": 12, "note": "ä"}
    assert manifest.dtype == jnp.dtype(dtype).name


def test_every_kind_of_draft_layer_comes_back(tmp_path: Path):
    changes = {"qk_norm": True, "qkv_bias": True, "output_bias": True, "gated": True, "score_cap": 2.0, "scale": 0.5}
    layer = LAYER.with_attention(**changes)
    norm = NormConfig(1e-6, zero_centred=True)
    layer = dataclasses.replace(layer, norm=norm, mlp=MlpConfig(48, "gelu", bias=True), post_norms=True)
    module = make_head(layer=layer)
    save(tmp_path / "head", module)
    loaded, _ = load(tmp_path / "head")
    assert_same(module, loaded)
    assert "layers.1.attention.q_norm.weight" in named_tensors(loaded)


def test_dtype_of_loading_may_differ_from_the_stored_one(saved: Path, tmp_path: Path):
    as_bfloat16, manifest = load(saved, dtype="bfloat16")
    assert manifest.dtype == "float32"
    save(tmp_path / "head", as_bfloat16)
    back, _ = load(tmp_path / "head", dtype=jnp.float32)
    for name, value in named_tensors(make_head()).items():
        expected = value.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(named_tensors(back)[name], expected)


def test_tensor_names_are_the_module_paths(saved: Path):
    stored = safetensors.numpy.load_file(saved / "head.safetensors")
    assert {"projections.3.weight", "layers.0.attention.qkv.weight", "layers.1.mlp.down.weight", "lm_head"} <= set(
        stored
    )
    assert stored["projections.3.weight"].shape == (32, 4 * 32)


def test_head_that_borrows_the_targets_rows_stores_none(tmp_path: Path):
    save(tmp_path / "head", make_head(lm_head="target"))
    assert "lm_head" not in safetensors.numpy.load_file(tmp_path / "head" / "head.safetensors")


def test_others_may_read_a_head(saved: Path):
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in saved.iterdir())


def test_file_names_its_conventions(saved: Path):
    tree = json.loads((saved / "config.json").read_text())
    assert tree["anchors"]["convention"] == "hidden state index, output of that many layers, before the final norm"
    assert tree["anchors"]["indices"] == [0, 2, 6, 7]
    assert tree["draft_vocabulary"]["ids"] == [0, 1, 2, 7]  # absolute ids, not the offsets [0, 0, 0, 4] (C06)
    assert "absolute target token ids" in tree["draft_vocabulary"]["convention"]


def test_rope_of_the_head_is_kept_whole(saved: Path):
    _, manifest = load(saved)  # E01: the scaling is not dropped
    frequencies, _ = inverse_frequencies(manifest.head.layer.attention.rope, LAYER.attention.head_dim)
    np.testing.assert_array_equal(frequencies, inverse_frequencies(LLAMA3, LAYER.attention.head_dim)[0])


def test_rope_of_the_head_is_its_own(tmp_path: Path):
    own = RopeConfig(theta=1e4)  # E06
    save(tmp_path / "head", make_head(layer=LAYER.with_attention(rope=own)))
    _, manifest = load(tmp_path / "head")
    assert manifest.head.layer.attention.rope == own != LAYER.attention.rope


def test_without_a_tokenizer_at_hand_it_is_not_compared(tmp_path: Path, saved: Path):
    load(saved, tokenizer_digest=None)
    save(tmp_path / "head", make_head(), tokenizer_digest=None)
    assert load(tmp_path / "head", tokenizer_digest=None)[1].tokenizer_digest is None
    with pytest.raises(ValueError, match=r"digest of the tokenizer None, expected bbbb"):
        load(tmp_path / "head")


def test_digest_of_a_file(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "config.json") == expected


def test_whole_numbers_may_stand_for_floats(head: Path):
    put("head", "layer", "mixer", "rope", "theta", 10000)(head)
    assert read_manifest(head).head.layer.attention.rope == LLAMA3


# Saving is all or nothing


def test_a_new_head_replaces_the_old(tmp_path: Path):
    save(tmp_path / "head", make_head())
    newer = make_head(draft_ids=None)
    save(tmp_path / "head", newer)
    assert_same(load(tmp_path / "head")[0], newer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("name", ["head.safetensors", "config.json"])
def test_interrupted_save_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    old = make_head()
    save(tmp_path / "head", old)
    flush = checkpoint._flush_to_disk

    def fail(path: Path) -> None:
        if path.name == name:
            raise OSError("disk full")
        flush(path)

    monkeypatch.setattr(checkpoint, "_flush_to_disk", fail)
    for where in ("head", "elsewhere"):
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path / where, make_head(draft_ids=None))
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]
    assert_same(load(tmp_path / "head")[0], old)


def test_failed_rename_puts_the_old_head_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = make_head()
    save(tmp_path / "head", old)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("no rename")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no rename"):
        save(tmp_path / "head", make_head(draft_ids=None))
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]
    assert_same(load(tmp_path / "head")[0], old)


@pytest.mark.parametrize("occupant", ["model.safetensors", "config.json", None])
def test_saving_never_replaces_something_else(tmp_path: Path, occupant: str | None):
    place = tmp_path / "place"
    if occupant is None:
        place.write_text("a file")
    else:
        place.mkdir()
        (place / occupant).write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="exists and is no speculation head"):
        save(place, make_head())
    assert place.is_file() or (place / str(occupant)).read_text() == '{"model_type": "llama"}'


def test_saving_refuses_what_could_not_be_loaded(tmp_path: Path):
    module = make_head()
    with pytest.raises(ValueError, match=r"anchors \[0, 2, 6, 7\] and 2 draft layers, the plan \[0, 2, 4\] and 2"):
        save_head(tmp_path / "head", module, StagePlan((4, 4), 2, "separate", (0, 2, 4)), target_name="t", **DIGESTS)
    with pytest.raises(ValueError, match="Out of range float"):
        save(tmp_path / "head", module, training={"loss": float("nan")})
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path / "head", module, training={"loss": object()})
    with pytest.raises(ValueError, match=r"float32.*bfloat16.*found \['float16'\]"):
        save(tmp_path / "head", make_head(jnp.float16))
    module.layers[1].mlp.down.weight[...] = jnp.full((32, 48), jnp.nan)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down.weight holds 1536 values that are not finite"):
        save(tmp_path / "head", module)
    assert not list(tmp_path.iterdir())


# Refusals: each names the path, what was found and what was expected


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(head: Path) -> None:
        tree = json.loads((head / "config.json").read_text())
        change(tree)
        (head / "config.json").write_text(json.dumps(tree))

    return apply


def put(*keys_and_value: Any) -> Callable[[Path], None]:
    *keys, last, value = keys_and_value

    def change(tree: dict[str, Any]) -> None:
        for key in keys:
            tree = tree[key]
        tree[last] = value

    return edit(change)


def drop(*keys: str) -> Callable[[Path], None]:
    *parents, last = keys

    def change(tree: dict[str, Any]) -> None:
        for key in parents:
            tree = tree[key]
        del tree[last]

    return edit(change)


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def apply(head: Path) -> None:
        stored = safetensors.numpy.load_file(head / "head.safetensors")
        change(stored)
        safetensors.numpy.save_file(stored, head / "head.safetensors")

    return apply


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda head: (head / name).write_bytes((head / name).read_bytes()[:length]) and None


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (put("target", "config_sha256", "c" * 64), "digest of the target's config cccc.*, expected aaaa"),
    (put("target", "tokenizer_sha256", "c" * 64), "digest of the tokenizer cccc.*, expected bbbb"),  # C09
    (put("head", "vocab_size", 128), "vocabulary size 128, expected 64"),
    (put("head", "layer", "hidden_size", 64), "hidden size 64, expected 32"),
    (put("plan", "stage_layers", [2, 2, 2, 3]), "number of target layers 9, expected 8"),
    (put("draft_vocabulary", "ids", [3, 3, 99]), r"draft ids must lie in 0..63, found 3..99"),  # C07
    (put("draft_vocabulary", "ids", [3, 3, 9, 12]), "without duplicates, found 3 before 3"),
    (put("draft_vocabulary", "ids", [3, 9, 5, 12]), "sorted without duplicates, found 9 before 5"),
    (put("draft_vocabulary", "ids", [-1, 3, 5, 12]), r"draft ids must lie in 0..63, found -1..12"),
    (put("draft_vocabulary", "ids", []), "found none"),
    (put("draft_vocabulary", "ids", ["1", 2]), r"draft_vocabulary.ids is \['1', 2\], expected"),
    (put("draft_vocabulary", "ids", [1, 2, 5]), r"tensor lm_head has shape \(4, 32\), expected \(3, 32\)"),
    (put("draft_vocabulary", "convention", "offsets"), "draft_vocabulary.convention is 'offsets', expected 'absolute"),
    (drop("draft_vocabulary"), r"missing keys \['draft_vocabulary'\]"),
    (drop("anchors"), r"missing keys \['anchors'\] \(nothing is guessed\)"),  # F03
    (drop("anchors", "indices"), r"anchors: missing keys \['indices'\]"),
    (drop("anchors", "convention"), r"anchors: missing keys \['convention'\]"),
    (put("anchors", "convention", "input of that layer"), "anchors.convention is 'input of that layer', expected"),
    (put("anchors", "indices", [2, 6, 7]), r"anchors must start at 0 and increase strictly, found \[2, 6, 7\]"),
    (put("anchors", "indices", [0, 2, 6, 9]), "anchor 9 is beyond the last hidden state index 8"),
    (put("anchors", "indices", [0, 2, 6]), r"unexpected tensors \['projections.3.weight'\]"),
    (put("anchors", []), r"anchors is \[\], expected an object"),
    (put("head", "num_layers", 3), r"missing tensors \['layers.2"),
    (put("head", "num_layers", True), "head.num_layers is True, expected int"),
    (put("head", "layer", "norm", "eps", "1e-6"), "head.layer.norm.eps is '1e-6', expected float"),
    (
        put("head", "layer", "mixer", "num_heads", 3),
        "num_attention_heads 3 is not a multiple of",
    ),
    (put("head", "layer", "extra", True), r"head.layer: missing keys \[\].*unknown keys \['extra'\]"),
    (put("head", "layer", "mixer", "rope", "kind", "ntk"), "head.layer.mixer.rope.kind is 'ntk'"),
    (put("head", "layer", "mixer", "class", "Mamba"), r"head.layer.mixer.class is 'Mamba', expected one of \['Attent"),
    (drop("head", "layer", "mlp", "class"), "head.layer.mlp.class is None, expected one of"),
    (drop("head", "layer", "mixer", "rope", "theta"), r"head.layer.mixer.rope: missing keys \['theta'\]"),
    (put("head", "lm_head", "shared"), r"head.lm_head is 'shared', expected one of \['own', 'target'\]"),
    (put("head", "lm_head", "target"), r"unexpected tensors \['lm_head'\]"),
    (put("head", "dtype", "float16"), "head.dtype is 'float16', expected one of"),
    (put("head", "dtype", "bfloat16"), "has dtype F32, expected BF16 as config.json says bfloat16"),
    (put("plan", "layout", "ring"), r"plan.layout is 'ring', expected one of \['separate', 'beside'\]"),
    (put("plan", "stage_layers", [4, 0, 4]), r"at least one layer, found stage_layers \[4, 0, 4\]"),
    (put("training", [1]), r"training is \[1\], expected an object"),
    (put("surprise", 1), r"unknown keys \['surprise'\]"),
    (put("format", "other"), "format is 'other', expected 'spd_jax speculation head'"),
    (put("format_version", 1), "format_version is 1, this program reads 2"),
    (drop("format_version"), "format_version is None, this program reads 2"),
    (cut("config.json", 100), "config.json: not valid JSON"),
    (lambda head: (head / "config.json").write_text("[]"), r"format is \[\], expected"),
    (lambda head: (head / "config.json").unlink(), "config.json is missing"),
    (lambda head: (head / "head.safetensors").unlink(), "head.safetensors is missing"),
    (cut("head.safetensors", 0), "cut short or no safetensors file"),
    (cut("head.safetensors", 500), "cut short or no safetensors file"),
    (cut("head.safetensors", -1), "cut short or no safetensors file"),
    (tensors(lambda t: t.pop("layers.0.mlp.down.weight")), r"missing tensors \['layers.0.mlp.down.weight'\]"),
    (tensors(lambda t: t.update(fc=np.ones(2, np.float32))), r"unexpected tensors \['fc'\]"),
    (tensors(lambda t: t.update(lm_head=np.ones((5, 32), np.float32))), r"shape \(5, 32\), expected \(4, 32\)"),
    (tensors(lambda t: t.update(lm_head=np.ones((4, 32), np.float16))), "lm_head has dtype F16, expected F32"),
    (tensors(lambda t: t["lm_head"].__setitem__((1, 2), np.nan)), "lm_head holds 1 values that are not finite"),
    (tensors(lambda t: t["lm_head"].__setitem__((1, 2), -np.inf)), "lm_head holds 1 values that are not finite"),
]


@pytest.mark.parametrize(("breakage", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_refusals_say_what_is_wrong_and_where(head: Path, breakage: Callable[[Path], Any], message: str):
    breakage(head)
    with pytest.raises(ValueError, match=message) as caught:
        load(head)
    assert str(head) in str(caught.value)


def test_a_head_for_another_target_is_refused(saved: Path):
    with pytest.raises(
        ValueError, match=r"made for 'tiny', not for this target: found digest of the target's config a"
    ):
        load(saved, target_digest="c" * 64)
    with pytest.raises(ValueError, match=r"digest of the tokenizer bbbb.*, expected cccc"):
        load(saved, tokenizer_digest="c" * 64)
    other = ModelConfig("llama", 65, (dense_layer(64, 48, 4, 2, 8, 1e-6, LLAMA3),) * 9, 256, tie_embeddings=False)
    with pytest.raises(ValueError, match="hidden size 32, expected 64; vocabulary size 64, expected 65; number of"):
        load(saved, target_config=other)


def test_only_the_two_dtypes_can_be_loaded(saved: Path):
    with pytest.raises(ValueError, match=r"\['float32', 'bfloat16'\], found dtype float16"):
        load(saved, dtype=jnp.float16)


def test_a_place_without_a_head_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is missing: .* is no speculation head"):
        read_manifest(tmp_path / "nothing")
