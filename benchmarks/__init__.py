"""Benchmarks: one script per claim, which runs all peers of a comparison in turn.

The files in results/ are dated, and name the hardware and the versions.
"""
