"""Hosts made on this machine, and `ray up` on them."""
