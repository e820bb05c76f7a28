"""One optimizer step, one evaluation, and the search for the microbatch that fits."""
