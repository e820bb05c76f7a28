"""Rows of a table in Parquet files."""
