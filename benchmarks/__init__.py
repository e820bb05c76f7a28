"""One script a claim, every peer in the same run; results/ is dated, with hardware and
versions.
"""
