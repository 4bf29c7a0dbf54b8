"""What a pipeline would cost and give on a machine: cost model, measurements, planner, simulator."""
