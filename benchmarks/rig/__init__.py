"""What the gateway's benchmarks run on: servers to measure, load to put on them, and their books."""
