"""What benchmarks.table measures, row by row. Nothing is imported here: peers in virtual environments of
their own read minibatches.py."""
