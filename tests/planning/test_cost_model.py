"""The cost model against arithmetic done by hand, and the orders that must hold whatever the figures are."""

import dataclasses
from pathlib import Path

import pytest

from spd_jax.config.model import DeltaNetConfig, ExpertsConfig, LayerConfig, ModelConfig
from spd_jax.models.shapes import num_parameters
from spd_jax.plan import make_plan
from spd_jax.planning.cost_model import (
    autoregressive_seconds,
    forward_seconds,
    published_cycle_seconds,
    rank_memory,
    rank_seconds,
    serial_round_seconds,
    serial_tokens_per_second,
    spd_cycle,
)
from spd_jax.planning.costs import MachineCosts, Setting, Work, layer_work
from spd_jax.planning.machines import Machine, MachineError, known_machines, load_machine
from spd_jax.speculation.module import draft_layer_config
from spd_jax.weights.random_model import dense_layer

LAYER = dense_layer(64, 128, 4, 2, 16)
MODEL = ModelConfig("llama", 1000, (LAYER,) * 8, 4096, False, (2,))
MACHINE = Machine("by hand", 1e9, 1e12, 1e9, 1e8, 1e-5, 1e-6, memory_share=1.0, flops_share=1.0)
PLAN = make_plan(8, 4, num_draft_layers=2)
ONE = Setting(context=100)
COSTS = MachineCosts(ONE, MACHINE)


def test_a_layer_reads_its_weights_once_and_every_sequences_keys():
    work = layer_work(LAYER, 1, ONE)
    keys = 2 * 2 * 16 * 100  # K and V, two heads of sixteen, a hundred positions
    assert work.bytes == 2 * (num_parameters(LAYER) + keys)
    assert work.flops == 2 * num_parameters(LAYER) + 4 * 4 * 16 * 100
    many = layer_work(LAYER, 5, dataclasses.replace(ONE, batch=3))
    assert many.bytes == 2 * (num_parameters(LAYER) + 3 * keys)
    assert many.flops == 15 * work.flops
    near = LAYER.with_attention(window=10)
    assert layer_work(near, 1, ONE).bytes == 2 * (num_parameters(LAYER) + keys / 10)


def test_a_delta_net_reads_and_writes_a_memory_for_each_row():
    kind = dataclasses.replace(LAYER, mixer=DeltaNetConfig(2, 4, 8, 8, 4))
    one, four = (layer_work(kind, rows, ONE).bytes for rows in (1, 4))
    assert four - one == 3 * 2 * 4 * (4 * 8 * 8)
    assert layer_work(kind, 1, dataclasses.replace(ONE, context=9999)).bytes == one


def test_experts_that_no_row_chose_are_not_read():
    sparse = LayerConfig(64, LAYER.norm, LAYER.mixer, ExpertsConfig(16, 2, 32))
    each = 3 * 32 * 64
    one = layer_work(sparse, 1, ONE)
    assert one.bytes == pytest.approx(layer_work(sparse, 10**6, ONE).bytes - 2 * 14 * each)
    assert layer_work(sparse, 2, ONE).bytes - one.bytes == pytest.approx(2 * each * 2 * 14 / 16)
    assert layer_work(sparse, 2, ONE).flops == 2 * one.flops


def test_the_longer_of_memory_and_arithmetic_counts_and_what_is_fixed_comes_on_top():
    machine = dataclasses.replace(MACHINE, launch=1e-3, start=1e-2, control=0.1, memory_share=0.5, flops_share=0.1)
    assert Work(5e8, 1e6).seconds(machine) == pytest.approx(1.0)
    assert Work(5e5, 2e11).seconds(machine) == pytest.approx(2.0)
    fixed, half = MachineCosts(ONE, machine), MachineCosts(ONE, dataclasses.replace(MACHINE, memory_share=0.5))
    assert fixed.layer(LAYER, 1) == pytest.approx(half.layer(LAYER, 1) + 1e-3)
    assert autoregressive_seconds(MODEL, fixed) == pytest.approx(autoregressive_seconds(MODEL, half) + 8e-3 + 1e-2)
    cycle, bare = spd_cycle(MODEL, PLAN, fixed), spd_cycle(MODEL, PLAN, half)
    assert cycle.parts["control"] == 0.1
    assert [a - b for a, b in zip(cycle.ranks, bare.ranks, strict=True)] == pytest.approx([1.2e-2] * 5)


def test_one_token_on_one_device_is_its_bytes_over_the_bandwidth():
    weights = 8 * layer_work(LAYER, 1, ONE).bytes + 2 * 1000 * 64
    assert autoregressive_seconds(MODEL, COSTS) == pytest.approx(weights / 1e9)
    split = autoregressive_seconds(MODEL, COSTS, devices=4)
    exchange = 16 * COSTS.collective(4, 2 * 64) + COSTS.collective(4, 32)
    assert split == pytest.approx(weights / 4e9 + exchange)
    assert COSTS.collective(4, 10**6) == pytest.approx(1e-5 + 3e-6 + 1e-2)
    assert COSTS.collective(1, 10**6) == 0.0


def test_the_parts_of_a_cycle():
    cycle = spd_cycle(MODEL, PLAN, COSTS)
    assert cycle.parts.keys() == {"compute", "exchange", "heads", "enter", "control"}
    assert cycle.seconds == sum(cycle.parts.values())
    assert cycle.ranks == tuple(rank_seconds(MODEL, PLAN, COSTS))
    assert cycle.parts["compute"] == max(cycle.ranks)
    stage = 2 * layer_work(LAYER, 1, ONE).bytes / 1e9
    assert cycle.ranks[1:] == pytest.approx((stage,) * 4)
    draft = (2 * layer_work(LAYER, 5, ONE).bytes + 2 * 64 * 64) / 1e9
    assert cycle.ranks[0] == pytest.approx(draft)
    heads = 2 * 1000 * 64 / 5 / 1e9  # one table for both
    assert cycle.parts["heads"] == pytest.approx(heads + COSTS.collective(5, 8 * 5))
    own = spd_cycle(MODEL, PLAN, MachineCosts(dataclasses.replace(ONE, draft_vocab=500), MACHINE))
    assert own.parts["heads"] == pytest.approx(1.5 * heads + COSTS.collective(5, 8 * 5))
    assert cycle.bottleneck == "the draft"
    assert cycle.idle_share == pytest.approx(4 * (draft - stage) / (5 * cycle.seconds))


def test_the_slowest_rank_is_named():
    free = MachineCosts(ONE, dataclasses.replace(MACHINE, collective_base=0.0, collective_hop=0.0, link_bandwidth=1e15))
    assert spd_cycle(MODEL, PLAN, free).bottleneck == "the draft"
    assert spd_cycle(MODEL, make_plan(8, 2, num_draft_layers=1), free).bottleneck == "stage 1"
    assert spd_cycle(MODEL, make_plan(8, 4, num_draft_layers=2, layout="beside"), free).bottleneck == (
        "stage 1 with the draft"
    )


def test_simulated_devices_add_up():
    alone = MachineCosts(ONE, dataclasses.replace(MACHINE, shared=True))
    cycle, parallel = spd_cycle(MODEL, PLAN, alone), spd_cycle(MODEL, PLAN, COSTS)
    assert cycle.parts["compute"] == pytest.approx(sum(parallel.ranks))
    assert cycle.parts["exchange"] == parallel.parts["exchange"]
    exchange = 16 * COSTS.collective(4, 2 * 64) + COSTS.collective(4, 32)
    split = autoregressive_seconds(MODEL, alone, devices=4) - exchange
    assert split == pytest.approx(autoregressive_seconds(MODEL, alone))


def test_tokens_a_second_follow_from_the_cycle_and_the_share_of_right_drafts():
    cycle = spd_cycle(MODEL, PLAN, COSTS)
    assert cycle.tokens_per_second(4, 1.0) == pytest.approx(1 / cycle.seconds)
    assert cycle.tokens_per_second(4, 0.0) == pytest.approx(1 / (4 * cycle.seconds))


def test_wider_trees_and_larger_draft_vocabularies_cost_more():
    base, wide, few, many = (
        spd_cycle(MODEL, PLAN, MachineCosts(dataclasses.replace(ONE, **changes), MACHINE)).seconds
        for changes in ({}, {"width": 4}, {"draft_vocab": 100}, {"draft_vocab": 900})
    )
    assert base < few < many
    assert base < wide


def test_whole_heads_on_one_rank_cost_more_than_shared_ones():
    big = dataclasses.replace(MODEL, vocab_size=200_000)
    fast = MachineCosts(
        ONE, dataclasses.replace(MACHINE, collective_base=1e-7, collective_hop=1e-8, link_bandwidth=1e10)
    )
    assert published_cycle_seconds(big, PLAN, fast) > 1.5 * spd_cycle(big, PLAN, fast).seconds


def test_a_serial_draft_that_is_always_wrong_gives_one_token_a_round():
    spent = serial_round_seconds(MODEL, COSTS, 4, 3)
    wrong, right = (serial_tokens_per_second(3, alpha, spent) for alpha in (0.0, 1.0))
    assert right == pytest.approx(4 * wrong)
    assert wrong == pytest.approx(1 / spent)
    step = (2 * num_parameters(draft_layer_config(MODEL)) + 2 * 2 * 2 * 16 * 100 + 2 * 1000 * 64) / 4e9
    assert spent == pytest.approx(3 * (step + 3 * COSTS.collective(4, 2 * 64)) + forward_seconds(MODEL, COSTS, 4, 4))


def test_memory_holds_padding_vocabulary_and_caches():
    found = rank_memory(MODEL, PLAN, ONE)
    assert len(set(found)) == 1
    slots = 2 * num_parameters(LAYER)  # draft layers use the slots of the stages' two layers
    vocabulary = 2 * 200 * 64  # embedding and head, a fifth each; the draft uses the head's rows
    caches = 2 * 2 * 2 * 2 * 16 * (100 + 5)
    assert found[0] == 2 * (slots + vocabulary) + caches
    own = rank_memory(MODEL, PLAN, dataclasses.replace(ONE, draft_vocab=50))
    assert own[0] - found[0] == 2 * 10 * 64


def test_the_machines_that_come_along():
    assert {"h100", "h200", "a100", "tpu-v5e", "tpu-v5p", "tpu-v6e"} <= set(known_machines())
    for name in known_machines():
        machine = load_machine(name)
        assert machine.name == name
        assert set(machine.sources) >= {"memory_bandwidth", "flops", "memory", "link_bandwidth"}
        if name != "cpu":
            assert 5e11 < machine.memory_bandwidth < 1e13
            assert 100 < machine.flops / machine.memory_bandwidth < 1000


def test_a_machine_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("memory_bandwidth: 1e11\nflops: 1e13\nmemory: 8e9\nlink_bandwidth: 1e10\nlaunch: 2e-5\n")
    machine = load_machine(str(path))
    assert (machine.name, machine.memory_bandwidth, machine.launch) == ("mine", 1e11, 2e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_bandwidth: 1e11\n", "flops, memory, link_bandwidth missing"),
        ("memory_bandwidth: fast\n", "memory_bandwidth must be a number, found 'fast'"),
        ("bandwidth: 1\n", "unknown field 'bandwidth'; a machine has name, memory_bandwidth"),
        (
            "memory_bandwidth: -1\nflops: 1\nmemory: 1\nlink_bandwidth: 1\n",
            "memory_bandwidth must be a positive number",
        ),
        ("- 1\n", "expected the fields of a machine"),
    ],
)
def test_files_that_describe_no_machine(text: str, message: str, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(MachineError, match=message):
        load_machine(str(path))


def test_an_unknown_machine_says_what_is_known():
    with pytest.raises(MachineError, match=r"no machine 'h900': known are h100, h200"):
        load_machine("h900")
