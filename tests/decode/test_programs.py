"""What the compiled programs do in a cycle: collectives, products with the heads, copies. Nothing is run here."""

import collections
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spd_jax.decode.batch import make_batch
from spd_jax.decode.loop import PipelineDecoder, mode_of
from spd_jax.decode.options import Options
from spd_jax.decode.programs import make_caches, make_dispatch, make_prefill
from spd_jax.decode.sampling import Sampling
from spd_jax.plan import Layout
from tests.decode import test_layer_kinds as kinds
from tests.decode.engine import CHUNK, CYCLES, OWN, make_pipeline, pipeline, plan_of, random_head, weights

CAPACITY = 256
COLLECTIVES = {"psum", "psum_invariant", "ppermute", "all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin"}


def trace_dispatch(decoder: PipelineDecoder, batch_size: int, sampling: Sampling) -> Any:
    """The traced dispatch, of abstract states: prefill is traced too, nothing is compiled."""
    program, mesh = decoder.program, decoder.mesh
    options = Options(sampling=sampling, forced_drafts=[OWN] * batch_size)
    mode = mode_of(options)
    request, banned = decoder.request(make_batch([[5]] * batch_size, options, program.target.vocab_size, 64))

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    dtype = jnp.dtype(jnp.float32)
    caches = jax.eval_shape(lambda: make_caches(program, mesh, batch_size, CAPACITY, 1, dtype))
    rows = array((batch_size,))
    arguments = (array((batch_size, CAPACITY)), rows, rows, array((batch_size,), jnp.uint32))
    prefill = make_prefill(program, mode, mesh, CHUNK)
    state, _, _ = jax.eval_shape(prefill, decoder.params, request, caches, *arguments, banned)
    return make_dispatch(program, mode, mesh, CYCLES).trace(decoder.params, request, state, banned)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def cycle_equations(traced: Any) -> list[Any]:
    """The equations of one cycle: the body of the dispatch's loop."""
    (loop,) = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "while"]
    return list(equations(loop.params["body_jaxpr"].jaxpr))


def names(found: list[Any]) -> collections.Counter[str]:
    return collections.Counter(equation.primitive.name for equation in found)


GREEDY, SAMPLED = Sampling(), Sampling(0.7, 5, 0.9)
CASES: list[Any] = [(1, "beside", SAMPLED), (2, "separate", GREEDY), (4, "beside", SAMPLED), (8, "separate", GREEDY)]
REST = [(1, "beside", GREEDY), (2, "separate", SAMPLED), (4, "beside", GREEDY), (8, "separate", SAMPLED)]


@pytest.mark.parametrize(
    ("num_stages", "layout", "sampling"),
    [*CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)],
    ids=str,
)
def test_programs_trace_with_replication_checks_on(num_stages: int, layout: Layout, sampling: Sampling):
    """Q02, Q03: shard_map checks what varies over ranks by default, the loop's carry and the argmax included."""
    found = names(cycle_equations(trace_dispatch(pipeline(8, num_stages, layout), 2, sampling)))
    collectives = sum(found[name] for name in COLLECTIVES)
    if sampling.mode.greedy:
        # hidden states to the next stage; one packet to all; the heads' best; embedding and features of what enters
        assert collectives == 4
        assert found["ppermute"] == 1
    else:
        assert collectives <= 6  # and the candidates of the filters
    assert found["cond"] == 1  # one switch over roles


def test_a_program_is_as_large_for_eight_sequences_as_for_two():
    """Nothing is unrolled over the batch: compiling takes as long for 64 sequences."""
    decoder = kinds.pipeline("delta nets", (2, 2, 2, 2), "separate")  # attention caches and memories
    two, eight = (names(list(equations(trace_dispatch(decoder, size, GREEDY).jaxpr.jaxpr))) for size in (2, 8))
    assert two == eight


@pytest.mark.parametrize("shared", [False, True])
def test_each_head_is_multiplied_once_a_cycle(shared: bool):
    """M04: one product for the target's head and one for the draft's, or one in all where they are the same rows."""
    plan = plan_of(3, 2)  # 3 ranks: a share is 21 rows, and nothing else has that size
    head = random_head(weights(3).config, plan, lm_head="target" if shared else "own")
    decoder = make_pipeline(weights(3), head, plan)
    share = decoder.params.allowed.shape[1]
    products = [e for e in cycle_equations(trace_dispatch(decoder, 2, Sampling())) if e.primitive.name == "dot_general"]
    shapes = [tuple(e.outvars[0].aval.shape) for e in products]
    assert sorted(shape for shape in shapes if shape[-1] == share) == ([(4, share)] if shared else [(2, share)] * 2)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_compiled_cycle_writes_caches_in_place_and_has_four_collectives(batch_size: int):
    """Whatever makes an array of a cache's shape is an update in place: no copy, no select, no scatter."""
    decoder = pipeline(3, 3)
    text = trace_dispatch(decoder, batch_size, Sampling()).lower().compile().as_text()
    attention = decoder.program.target.layers[0].attention
    heads, size = attention.num_kv_heads, attention.head_dim
    shape = rf"\[[\d,]*{heads},(?:{size},{CAPACITY}|{CAPACITY},{size})\]"
    made = collections.Counter(re.findall(rf"%([a-z_\-]+)[\d.]* = \w+{shape}\S* ([\w\-]+)\(", text))
    in_place = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice"}
    others = {(name, op) for name, op in made if op not in in_place and "dynamic-update-slice" not in name}
    assert not others
    assert sum(count for (name, _), count in made.items() if "dynamic-update-slice" in name) >= 4  # k and v, two slots
    body = [part for part in re.split(r"\n(?=\S)", text) if " collective-permute(" in part]
    assert len(body) == 1
    every = r" (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\("
    assert len(re.findall(every, body[0])) == len(re.findall(every, text)) == 4
