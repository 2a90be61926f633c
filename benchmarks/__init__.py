"""Benchmarks: named cases, correctness first, one JSON line a result."""
