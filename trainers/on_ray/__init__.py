"""Everything of trainers that imports Ray."""
