"""What is compiled, how often, and what autoregressive decoding is compiled to."""

import re
from typing import Any

import jax

from spd_jax.decode.batch import make_batch
from spd_jax.decode.options import Options
from tests.decode.engine import autoregressive, make_pipeline, model_config, plan_of, random_head, weights

LOWERED = "jaxpr_to_mlir_module_duration"


def test_prompts_of_all_lengths_share_their_programs() -> None:
    """Q06: after the first prompt, prompts of 5, 6, 7 and 9 tokens compile nothing, nor does another set of ends."""
    plan = plan_of(8, 2)
    decoder = make_pipeline(weights(8), random_head(model_config(8), plan), plan)
    compiled: list[str] = []

    def listen(event: str, seconds: float, **facts: Any) -> None:
        if event.endswith(LOWERED):
            compiled.append(str(facts))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        decoder.generate([[5, 6, 7]], Options(max_new_tokens=4, eos_ids=(2,)))
        assert len(compiled) >= 2
        compiled.clear()
        for length in (5, 6, 7, 9, 5, 6, 7, 9):
            decoder.generate([list(range(3, 3 + length))], Options(max_new_tokens=4, eos_ids=(2, 7)))
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_autoregressive_decoding_copies_no_cache() -> None:
    """The baseline of every speed claim must not carry work that it could do without."""
    decoder = autoregressive(8)
    batch = make_batch([[5, 6, 7]], Options(max_new_tokens=8), decoder.config.vocab_size, decoder.max_length)
    prefill, dispatch, _ = decoder.compiled(batch.options.sampling.mode, False)
    request = decoder.request(batch)
    # Shapes are enough to compile a dispatch for: the prefill is only traced.
    state, _, _ = jax.eval_shape(prefill, decoder.weights, request, *decoder.prompt_arrays(batch))
    text = dispatch.lower(decoder.weights, request, state).compile().as_text()
    caches = {"f32[" + ",".join(map(str, x.shape)) + "]" for x in (state.k[0], state.v[0])}
    loop = text.split("\nENTRY ")[0]
    assert all(cache in loop for cache in caches)
    assert not caches & set(re.findall(r"= (f32\[[\d,]*\])\S* copy\(", loop))
