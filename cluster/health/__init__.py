"""Examine live nodes, and judge what was measured."""
