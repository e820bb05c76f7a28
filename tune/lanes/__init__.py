"""Worker groups that take trial after trial (Ray)."""
