"""BERT, fine-tuned to classify texts."""
