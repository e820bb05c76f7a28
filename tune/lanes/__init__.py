"""Warm worker groups that run trial after trial (Ray)."""
