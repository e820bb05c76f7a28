"""BERT, fine-tuned."""
