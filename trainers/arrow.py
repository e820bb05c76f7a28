"""Export ArrowDataset, which reads Parquet, Arrow, CSV and JSON files."""

from trainers.data.arrow import ArrowDataset

__all__ = ["ArrowDataset"]
