"""The naive decoder: equal to the published implementation on its fixture, lossless by enumeration, counted exactly."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from spd_jax.config.model import LayerConfig, ModelConfig
from spd_jax.metrics import expected_cycles
from spd_jax.models.decoder import Decoder
from spd_jax.plan import StagePlan, make_plan
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.weights.random_model import dense_layer
from tests.fixtures import Fixture, load_fixture
from tests.naive import CycleInput, Draft, Filters, NaiveDecoder, NaiveResult, ScriptedDraft, probabilities

LAYER = dense_layer(32, 48, 4, 2, 8, 1e-6)
P5 = [5, 6, 7, 8, 9]


def make_target(num_layers: int = 8, vocab_size: int = 64, layer: LayerConfig = LAYER, scale: float = 10.0) -> Decoder:
    """A random target; at the default scale its greedy text has many distinct tokens."""
    config = ModelConfig("llama", vocab_size, (layer,) * num_layers, 256, tie_embeddings=False)
    target = Decoder(config, rngs=nnx.Rngs(0))
    state = nnx.state(target)
    scaled = [(path, param.replace(param[...] * scale)) for path, param in nnx.to_flat_state(state)]
    nnx.update(target, nnx.from_flat_state(scaled))
    return target


@pytest.fixture(scope="module")
def target() -> Decoder:
    return make_target()


def scripted(target: Decoder, num_stages: int, bits: str) -> NaiveDecoder:
    plan = make_plan(target.config.num_layers, num_stages, num_draft_layers=1)
    return NaiveDecoder(target, plan, ScriptedDraft(bits, target.config.vocab_size), length=48)


def greedy(decoder: NaiveDecoder, prompt: list[int], count: int) -> list[int]:
    """The target's own greedy text, by the plain forward."""
    tokens = list(prompt)
    for _ in range(count):
        _, logits = decoder._run(tokens, [0] * len(tokens))
        tokens.append(int(logits[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def assert_counts(result: NaiveResult, num_stages: int) -> None:
    inner = result.verdicts[1:-1]  # generated tokens 2..N-1
    expected = expected_cycles(len(result.ids), num_stages, inner.count("accepted"), inner.count("rejected"))
    assert result.cycles == expected == len(result.draft_logits)
    assert result.num_accepted + result.num_rejected + result.num_undrafted == max(len(result.ids) - 1, 0)
    assert list(result.verified_in) == sorted(result.verified_in)
    if result.ids:
        assert result.verified_in[0] == 0
        assert result.verified_in[-1] == result.cycles


# Against the published implementation


@pytest.fixture(scope="module")
def tiny_llama() -> Fixture:
    return load_fixture("tiny_llama")


@pytest.fixture(scope="module")
def published(tiny_llama: Fixture) -> NaiveDecoder:
    return NaiveDecoder(tiny_llama.target, tiny_llama.plan, tiny_llama.head, length=144)


@pytest.mark.parametrize("prompt", [0, 4, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 5))])
def test_equals_the_published_implementation(tiny_llama: Fixture, published: NaiveDecoder, prompt: int):
    golden = tiny_llama.prompts[prompt]
    ends = tiny_llama.target.config.eos_token_ids
    result = published.generate(golden["prompt_ids"], max_new_tokens=80, eos_token_ids=ends)
    assert list(result.ids) == golden["generated_ids"] == golden["autoregressive_ids"]
    assert list(result.accepted) == golden["accepted"]
    assert result.cycles == golden["cycles"]
    assert_counts(result, num_stages=4)
    difference = np.abs(result.draft_logits - tiny_llama.draft_logits(prompt))
    # Logits reach 9.4, where float32 steps by 1e-6. On a Xeon one logit of all six prompts is off by 5.2e-6, the others
    # by less; on an EPYC, whose products add in another order, three of prompt 4 and one of prompt 1.
    assert np.quantile(difference, 0.999) < 4e-6
    assert np.sum(difference > 5e-6) <= 3
    assert difference.max() < 6e-6


def test_target_is_the_published_one(tiny_llama: Fixture, published: NaiveDecoder):
    ids = tiny_llama.golden["train"]["input_ids"][0]
    _, logits = published._run(ids, [4] * len(ids))
    np.testing.assert_allclose(logits[: len(ids)], tiny_llama.arrays["target_logits_batch0"], atol=2e-5)


# Scripted drafts: right tokens and exact counts


def test_oracle_is_never_rejected(target: Decoder):
    result = scripted(target, 4, "1").generate(P5, max_new_tokens=16)
    assert (result.num_accepted, result.num_rejected, result.cycles) == (15, 0, 18)  # G03: K = N + n - 2
    assert result.verified_in == (0, *range(4, 19))


def test_anti_is_never_accepted(target: Decoder):
    result = scripted(target, 4, "0").generate(P5, max_new_tokens=16)
    assert (result.num_accepted, result.num_rejected, result.cycles) == (0, 15, 60)  # G04: K = n (N - 1)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("bits", ["0", "1101", "0010111"])
def test_text_is_the_targets_whatever_the_draft_says(target: Decoder, num_stages: int, bits: str):
    decoder = scripted(target, num_stages, bits)
    result = decoder.generate(P5, max_new_tokens=16)
    text = greedy(decoder, P5, 16)
    assert list(result.ids) == text
    assert len(set(text)) > 6, "the reference text says too little"
    assert_counts(result, num_stages)
    if num_stages == 1:
        assert set(result.verdicts[1:]) == {"undrafted"}
    else:
        assert list(result.accepted[1:]) == [bit == "1" for bit, _ in zip(itertools.cycle(bits), range(15))]


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5, 6, 7]])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_short_prompts_and_short_answers(target: Decoder, prompt: list[int], count: int):
    decoder = scripted(target, 4, "110")
    result = decoder.generate(prompt, max_new_tokens=count)
    assert list(result.ids) == greedy(decoder, prompt, count)
    assert_counts(result, 4)


@pytest.mark.parametrize("bits", ["1", "0", "01"])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_stops_at_an_end_token_in_flight(target: Decoder, bits: str, place: int):
    decoder = scripted(target, 4, bits)
    text = greedy(decoder, P5, 16)
    result = decoder.generate(P5, max_new_tokens=16, eos_token_ids=(text[place], 63))
    assert list(result.ids) == text[: text.index(text[place]) + 1]
    assert_counts(result, 4)


def test_a_drafted_end_token_that_is_rejected_ends_nothing(target: Decoder):
    decoder = scripted(target, 4, "0")
    text = greedy(decoder, P5, 8)
    ends = sorted({(token + 1) % 64 for token in text} - set(text))
    assert list(decoder.generate(P5, max_new_tokens=8, eos_token_ids=ends).ids) == text  # I04


def test_what_cannot_be_decoded_is_refused(target: Decoder):
    decoder = scripted(target, 4, "1")
    with pytest.raises(ValueError, match="found 0 prompt tokens"):
        decoder.generate([], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens -1"):
        decoder.generate(P5, max_new_tokens=-1)
    with pytest.raises(ValueError, match=r"5 \+ 40 \+ 4 in flight exceed 48"):
        decoder.generate(P5, max_new_tokens=40)
    with pytest.raises(ValueError, match="the plan has 4 layers, the target 8"):
        NaiveDecoder(target, make_plan(4, 2, num_draft_layers=1), ScriptedDraft("1", 64), length=48)
    with pytest.raises(ValueError, match="a script is a text of 0 and 1, found '12'"):
        ScriptedDraft("12", 64)


# A speculation module as the draft


def make_head(target: Decoder, plan: StagePlan, **changes: Any) -> SpeculationModule:
    values: dict[str, Any] = {"layer": target.config.layers[0], "anchors": plan.anchors}
    values |= {"num_layers": plan.num_draft_layers, "vocab_size": target.config.vocab_size, **changes}
    return SpeculationModule(HeadConfig(**values), rngs=nnx.Rngs(7))


@pytest.mark.parametrize("anchors", [(0, 2, 6, 7), (0, 2, 6, 8), (0,)])
def test_a_module_reads_only_what_has_been_computed(target: Decoder, anchors: tuple[int, ...]):
    plan = StagePlan((2, 2, 2, 2), 2, "separate", anchors)
    decoder = NaiveDecoder(target, plan, make_head(target, plan, draft_ids=(3, 9, 40)), length=32)
    result = decoder.generate(P5, max_new_tokens=8)  # states that are not there are NaN, which would raise
    assert list(result.ids) == greedy(decoder, P5, 8)
    assert result.draft_logits.shape == (result.cycles, 3)
    assert_counts(result, 4)


def test_reading_ahead_of_the_pipeline_is_caught(target: Decoder):
    plan = StagePlan((2, 2, 2, 2), 1, "separate", (0, 2, 6, 7))
    decoder = NaiveDecoder(target, plan, make_head(target, plan), length=32)
    decoder.draft._anchor_type = np.asarray([1, 1, 1, 2, 3])  # a new token's feature with layer 2 in it
    with pytest.raises(FloatingPointError, match="no stage has computed yet"):
        decoder.generate(P5, max_new_tokens=4)


def test_a_head_without_rows_uses_the_targets(target: Decoder):
    plan = StagePlan((4, 4), 1, "separate", (0, 4, 8))
    own, borrowed = (
        make_head(target, plan, draft_ids=(1, 5)),
        make_head(target, plan, draft_ids=(1, 5), lm_head="target"),
    )
    own.lm_head[...] = target.head[...][jnp.asarray([1, 5])]
    logits = [
        NaiveDecoder(target, plan, h, length=16).generate(P5, max_new_tokens=5).draft_logits for h in (own, borrowed)
    ]
    np.testing.assert_array_equal(*logits)


# Sampling


class CachedDecoder(NaiveDecoder):
    """Thousands of runs over few contexts: the same forward is not computed twice."""

    def __init__(self, target: Decoder, plan: StagePlan, draft: SpeculationModule | Draft, *, length: int):
        super().__init__(target, plan, draft, length=length)
        inner = self.draft
        memory: dict[Any, np.ndarray] = {}

        class Remembering:
            token_ids = inner.token_ids

            def __call__(self, cycle: CycleInput) -> np.ndarray:
                key = (cycle.tokens, tuple(cycle.depths))
                if key not in memory:
                    memory[key] = inner(cycle)
                return memory[key]

        self.draft = Remembering()
        self._memory = functools.cache(super()._run)

    def _run(self, tokens, depths):
        return self._memory(tuple(tokens), tuple(depths))


@pytest.mark.parametrize(
    "filters", [pytest.param(Filters(), marks=pytest.mark.slow), Filters(temperature=0.7, top_k=4, top_p=0.9)], ids=str
)
def test_sampled_text_has_exactly_the_targets_distribution(filters: Filters):
    target = make_target(num_layers=2, vocab_size=6, layer=dataclasses.replace(LAYER, hidden_size=16), scale=3.0)
    plan = StagePlan((1, 1), 1, "separate", (0, 1, 2))
    head = make_head(target, plan, draft_ids=(0, 1, 3, 4))
    decoder = CachedDecoder(target, plan, head, length=8)
    prompt, count, draws = [1, 2], 3, 1000

    texts = list(itertools.product(range(6), repeat=count))
    expected = np.ones(len(texts))
    for i, text in enumerate(texts):
        for t in range(count):
            _, logits = decoder._run([*prompt, *text[:t]], [2] * (2 + t))
            expected[i] *= probabilities(logits[1 + t], filters)[text[t]]
    assert expected.sum() == pytest.approx(1)

    results = [decoder.generate(prompt, max_new_tokens=count, filters=filters, seed=seed) for seed in range(draws)]
    counts = np.zeros(len(texts))
    for result in results:
        counts[texts.index(result.ids)] += 1
    assert counts[expected == 0].sum() == 0
    large = expected * draws >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum()) * draws
    used = wanted > 0
    assert large.sum() > 10
    assert stats.chisquare(observed[used], wanted[used] * observed[used].sum() / wanted[used].sum()).pvalue > 0.001
    rejected = sum(result.num_rejected for result in results)
    assert 0.05 < rejected / (2 * draws) < 0.95, "drafts must be both accepted and rejected for this to say anything"


def test_filters_come_in_the_order_of_hugging_face():
    np.testing.assert_array_equal(probabilities(np.asarray([2.0, 1.0, 0.0]), Filters(0.5, top_p=0.8)), [1, 0, 0])  # H16
    halves = probabilities(np.log([0.5, 0.3, 0.2]), Filters(top_k=2))
    np.testing.assert_allclose(halves, [0.625, 0.375, 0.0])  # H05
    np.testing.assert_allclose(probabilities(np.zeros(4), Filters(top_k=2)), [0.5, 0.5, 0, 0])  # ties: lower ids
