"""What a run would take on machines that are not at hand, from what was measured on those that are."""
