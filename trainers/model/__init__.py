"""What makes a module trainable: precision, strategy, gradients, optimizer."""
