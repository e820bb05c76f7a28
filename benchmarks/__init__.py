"""One script a claim, with every peer in the same run.

results/ is dated, with hardware and versions.
"""
