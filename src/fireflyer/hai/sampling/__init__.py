"""Use of the hardware over time: supervisors take the samples, and older data has a lower
resolution."""
