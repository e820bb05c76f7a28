"""Datasets from Parquet, Arrow, CSV and JSON files: `from trainers.arrow import
ArrowDataset`.
"""

from trainers.data.arrow import ArrowDataset

__all__ = ["ArrowDataset"]
