"""Training state from memory to storage and back."""
