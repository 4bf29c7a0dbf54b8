"""What is compiled, how often, and what autoregressive decoding is compiled to."""

import re

import jax

from spd_jax.decode.batch import make_batch
from spd_jax.decode.loop import mode_of
from spd_jax.decode.options import Options
from tests.decode.engine import (
    CHUNK,
    CYCLES,
    autoregressive,
    make_pipeline,
    model_config,
    plan_of,
    random_head,
    weights,
)
from tests.lowerings import lowerings


def test_prompts_of_all_lengths_share_their_programs() -> None:
    """Q06: after a first prompt, prompts of 5 to 9 tokens and of two chunks compile nothing, whatever the ends and the
    number of tokens to come."""
    plan = plan_of(8, 2)
    decoder = make_pipeline(weights(8), random_head(model_config(8), plan), plan)
    with lowerings() as compiled:
        decoder.generate([[5, 6, 7]], Options(max_new_tokens=2 * CYCLES))
        assert len(compiled) >= 2
        compiled.clear()
        for length in (5, 6, 7, 9, 2 * CHUNK, 5, 6, 7, 9):
            for ends in ((2, 7), (2,) * (length % 4)):
                decoder.generate([list(range(3, 3 + length))], Options(max_new_tokens=length, eos_ids=ends))
        assert compiled == []


def test_heads_are_exchanged_and_the_cache_grows_without_compiling() -> None:
    """A trainer evaluates the head as trained so far again and again; nothing is compiled after the warm-up."""
    plan = plan_of(3, 2)
    first, second = (random_head(model_config(3), plan, seed=seed) for seed in (7, 8))
    decoder = make_pipeline(weights(3), first, plan, cycles_per_dispatch=64)
    prompts, options = [list(range(3, 60))], Options(max_new_tokens=150, ignore_eos=True, eos_ids=(2,))
    with lowerings() as compiled:
        decoder.warm_up(prompts, options)
        assert len(compiled) >= 3
        compiled.clear()
        before = decoder.generate(prompts, options).results[0]
        changed = decoder.with_head(second)
        changed.warm_up([[5] * 40], options)
        found = changed.generate(prompts, options).results[0]
        again = changed.with_head(first).generate(prompts, options).results[0]
        assert compiled == []
    assert len(found.ids) == 150  # and 57 before them, and 64 cycles and 3 columns ahead: not within 256 positions
    assert found.ids == before.ids
    assert [record.draft for record in found.records] != [record.draft for record in before.records]
    assert (again.tokens, again.records) == (before.tokens, before.records)
    assert decoder.params.slots is not changed.params.slots


def test_autoregressive_decoding_compiles_nothing_after_a_warm_up() -> None:
    decoder = autoregressive(3)
    prompts, options = [list(range(3, 60))] * 2, Options(max_new_tokens=220, ignore_eos=True, eos_ids=(2,))
    with lowerings() as compiled:
        decoder.warm_up(prompts, options)
        assert len(compiled) >= 3
        compiled.clear()
        results = decoder.generate(prompts, options).results
        decoder.warm_up([[5] * 40] * 2, options)
        assert compiled == []
    assert [len(result.ids) for result in results] == [220, 220]


def test_a_head_of_another_make_brings_its_own_programs() -> None:
    plan, mode = plan_of(3, 2), mode_of(Options())
    decoder = make_pipeline(weights(3), random_head(model_config(3), plan), plan)
    alike = decoder.with_head(random_head(model_config(3), plan, seed=8))
    other = decoder.with_head(random_head(model_config(3), plan, draft_ids=(1, 5, 9, 33, 60)))
    assert alike.dispatch(mode) is decoder.dispatch(mode)
    assert other.dispatch(mode) is not decoder.dispatch(mode)


def test_autoregressive_decoding_copies_no_cache() -> None:
    """The baseline of every speed claim must not carry work that it could do without."""
    decoder = autoregressive(8)
    batch = make_batch([[5, 6, 7]], Options(max_new_tokens=8), decoder.config.vocab_size, decoder.max_length)
    prefill, dispatch = decoder.compiled(batch.options.sampling.mode, False)
    request = decoder.request(batch)
    # Shapes are enough to compile a dispatch for: the prefill is only traced.
    state, _, _ = jax.eval_shape(prefill, decoder.weights, request, *decoder.prompt_arrays(batch))
    text = dispatch.lower(decoder.weights, request, state).compile().as_text()
    caches = {"f32[" + ",".join(map(str, x.shape)) + "]" for x in (state.caches.k[0], state.caches.v[0])}
    loop = text.split("\nENTRY ")[0]
    assert all(cache in loop for cache in caches)
    assert not caches & set(re.findall(r"= (f32\[[\d,]*\])\S* copy\(", loop))
