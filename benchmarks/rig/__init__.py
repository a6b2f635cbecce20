"""What the benchmarks run on: servers and trainers to measure, load to put on them, and their books."""
