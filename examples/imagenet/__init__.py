"""ImageNet."""
