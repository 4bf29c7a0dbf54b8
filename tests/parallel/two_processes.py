"""One of several processes that decode together; run by test_processes.py, which reads the last line."""

from __future__ import annotations

import json
import sys

from flax import nnx

from spd_jax.config.model import ModelConfig
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.parallel.mesh import stage_mesh
from spd_jax.parallel.platform import set_up_platform
from spd_jax.parallel.stack import make_program, stack_params
from spd_jax.plan import make_plan
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.weights.random_model import RandomWeights, dense_layer


def main(process: int, processes: int, coordinator: str, devices: int) -> None:
    """Decode two prompts on a mesh over all processes and print ids and cycles."""
    group = {"coordinator": coordinator, "num_processes": processes, "process_id": process} if processes > 1 else {}
    set_up_platform(devices=devices, **group)
    layer = dense_layer(32, 48, 4, 2, 8, 1e-5)
    config = ModelConfig("llama", 64, (layer,) * 5, 256, True)
    plan = make_plan(5, 3, num_draft_layers=1)
    head = SpeculationModule(HeadConfig(layer, 1, plan.anchors, 64, None, "target"), rngs=nnx.Rngs(0))
    program, mesh = make_program(config, head, plan), stage_mesh(plan.num_ranks)
    params = stack_params(program, RandomWeights(config, 0), head, mesh)
    decoder = PipelineDecoder(program, params, mesh, prefill_chunk=8, cycles_per_dispatch=8)
    results = decoder.generate([[5, 6, 7], list(range(3, 13))], Options(max_new_tokens=12)).results
    sys.stdout.write(json.dumps([[result.ids, result.cycles] for result in results]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
