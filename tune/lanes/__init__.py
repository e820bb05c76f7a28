"""Lanes: worker groups that run one trial after another (Ray)."""
