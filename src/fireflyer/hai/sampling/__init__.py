"""Use of the hardware over time: sampled by supervisors, kept at falling resolution."""
