"""Benchmarks: each measures slime against something else in the same run and reports the ratio. See README.md."""
