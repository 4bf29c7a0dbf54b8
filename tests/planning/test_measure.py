"""Measured costs: what is asked for is what is measured, and what stands in where devices are missing."""

import dataclasses

import pytest

from spd_jax.config.model import DeltaNetConfig, ModelConfig
from spd_jax.plan import make_plan
from spd_jax.planning.cost_model import autoregressive_seconds, spd_cycle
from spd_jax.planning.costs import MachineCosts, Setting
from spd_jax.planning.layer_costs import measure_layers, measure_products
from spd_jax.planning.machines import Machine
from spd_jax.planning.measure import SMALL, Asked, MeasuredCosts
from spd_jax.weights.random_model import dense_layer

LAYER = dense_layer(16, 32, 2, 1, 8)
MODEL = ModelConfig("llama", 40, (LAYER,) * 4, 4096, False, (2,))
PLAN = make_plan(4, 2, num_draft_layers=1)
MACHINE = Machine("by hand", 1e9, 1e12, 1e9, 1e8, 1e-5, 1e-6, control=7.0)
SETTING = Setting(4, context=32)
COSTS = MeasuredCosts(
    SETTING, MACHINE, {(LAYER, 1): 2.0, (LAYER, 3): 3.0}, {(14, 16, 2): 0.25}, {3: (0.5, 1e-3)}, {3: 1.0}, 0.125
)


def test_a_prediction_asks_for_its_pieces():
    asked = Asked(SETTING)
    spd_cycle(MODEL, PLAN, asked)
    assert asked.layers == {(LAYER, 1), (LAYER, 3)}
    assert asked.products >= {
        (14, 16, 2),
        (16, 16, 1),
    }  # a third of the vocabulary for both heads, the newest's projection
    assert asked.collectives.keys() == {3}
    assert asked.controls == {3}
    one = Asked(SETTING)
    autoregressive_seconds(MODEL, one)
    assert one.layers == {(LAYER, 1)}
    assert one.products == {(40, 16, 1)}
    assert not one.collectives


def test_measured_figures_count_and_the_machines_stand_in():
    assert COSTS.layer(LAYER, 3) == 3.0
    assert COSTS.layer(LAYER, 3, devices=4) == 0.75
    assert COSTS.collective(3, SMALL + 100) == pytest.approx(0.6)
    assert COSTS.collective(3, 8) == 0.5
    assert COSTS.collective(5, 8) == MachineCosts(SETTING, MACHINE).collective(5, 8)
    assert (COSTS.control(3), COSTS.control(5)) == (1.0, 7.0)
    assert COSTS.product(14, 16, 2) == 0.25
    assert COSTS.product(28, 16, 2) == 0.5  # was not asked for: twice the nearest, which is half as large
    slow = COSTS.with_latency(9.0)
    assert slow.collective(3, SMALL + 100) == pytest.approx(9.1)
    assert slow.collective(5, 0) == 9.0


def test_what_a_layer_of_a_pipeline_costs_more_counts_for_every_layer():
    products = dict.fromkeys([(14, 16, 2), (16, 16, 1), *((6, 16 * k, 1) for k in range(1, 6))], 0.25)
    costs = dataclasses.replace(COSTS, products=products)
    ranks = spd_cycle(MODEL, PLAN, costs).ranks
    assert ranks == pytest.approx((3.0 + 0.125 + 0.25, 2 * 2.125, 2 * 2.125))


def test_layers_of_every_kind_and_products_are_measured():
    delta = dataclasses.replace(LAYER, mixer=DeltaNetConfig(1, 2, 8, 8, 4))
    layers = measure_layers([(LAYER, 1), (delta, 1), (LAYER, 3)], SETTING, "float32")
    assert layers.keys() == {(LAYER, 1), (delta, 1), (LAYER, 3)}
    products = measure_products([(40, 16, 1), (14, 16, 2)], "float32")
    assert products.keys() == {(40, 16, 1), (14, 16, 2)}
    assert all(0 < spent < 1e4 for spent in (*layers.values(), *products.values()))
