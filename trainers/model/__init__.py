"""A module made trainable: precision, strategy, gradients, optimizer."""
