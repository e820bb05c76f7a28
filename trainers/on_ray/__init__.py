"""The parts of trainers that import Ray."""
